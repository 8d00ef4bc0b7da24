"""Checkpoints of this project in llama.cpp, beside Transformers: `python benchmarks/gguf_perplexity.py`.

    --converter FILE         `convert_hf_to_gguf.py` of llama.cpp
    --converter-python PY    interpreter with what the converter needs: torch, transformers, sentencepiece
    --llama-python PY        interpreter with llama-cpp-python
    --write                  replace the tables in docs/guides/gguf.md

The model is the one that `tests/small_llama.py` trains in a minute; the rows are text that it did not see. llama.cpp's
converter knows tokenizers by a fingerprint, and none that was made here: a SentencePiece vocabulary of the same size is
written beside the weights, and both engines are given the same tokens. The command fails if a file that converts is
more than `BOUND` from Transformers.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page_parts import with_part
from serving_matrix import difference, perplexity

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "guides" / "gguf.md"
BOUND = 0.02
"""Largest mean difference of log-probabilities, in nats: the converter writes scales and weights in bf16."""
ROWS = 32
REQUANTIZED = ("Q8_0", "Q4_0")
_VOCABULARY = """
import sys, sentencepiece
how = {"vocab_size": 512, "byte_fallback": True, "model_type": "bpe", "minloglevel": 2}
sentencepiece.SentencePieceTrainer.train(input=sys.argv[1], model_prefix=sys.argv[2], **how)
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One checkpoint."""

    scheme: str
    """Preset; `dense` for none."""
    method: str = "rtn"
    """As of `shardwright quantize`."""
    group_size: int | None = None
    """Weights of a scale; -1 for a row; `None` leaves the preset's."""

    @property
    def name(self) -> str:
        """What the table calls it."""
        groups = {None: "", -1: ", a scale for each row"}.get(self.group_size, f", groups of {self.group_size}")
        return "dense" if self.scheme == "dense" else f"{self.scheme} {self.method}{groups}"


CASES = (
    Case(scheme="dense"),
    Case(scheme="W4A16", method="gptq", group_size=32),
    Case(scheme="W4A16", method="rtn", group_size=128),
    Case(scheme="W4A16_ASYM", group_size=32),
    Case(scheme="W8A16", group_size=128),
    Case(scheme="W3A16", group_size=32),
    Case(scheme="FP8_DYNAMIC"),
    Case(scheme="W8A8"),
    Case(scheme="W8A8_STATIC"),
    Case(scheme="W4A16", group_size=-1),
)


def made(case: Case, llama: Any, work: Path) -> Path:
    """Write the checkpoint of a case, with a vocabulary that the converter reads."""
    from serving_checkpoints import write_quantized

    directory = work / re.sub(r"\W+", "-", case.name)
    if case.scheme == "dense":
        shutil.copytree(llama.directory, directory)
    else:
        text = work / "calibration.txt"
        if not text.exists():
            text.write_text("\n\n".join(llama.tokenizer.decode(row) for row in llama.train_NS[:64]))
        stated = {"scheme": case.scheme, "method": case.method, "dataset": str(text), "seq_len": 128, "num_samples": 64}
        grouped = {} if case.group_size is None else {"group_size": case.group_size}
        write_quantized(stated | grouped, llama.directory, directory)
    for file in directory.glob("tokenizer*"):
        file.unlink()
    shutil.copy(work / "vocabulary.model", directory / "tokenizer.model")
    return directory


def converted(command: Sequence[str], directory: Path) -> tuple[Path, str | None]:
    """Return the file that the converter wrote, and why it wrote none."""
    file = directory.with_suffix(".gguf")
    line = [*command, str(directory), "--outfile", str(file), "--outtype", "bf16"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return file, None
    words = [text.strip() for text in done.stderr.splitlines() if text.strip()]
    # An assertion without words says its line alone, which has carets below.
    told = [text for text in words if set(text) - set("^~ ")]
    return file, " ".join(told[-2:]) if told[-1] == "AssertionError" else told[-1]


def answers_of_transformers(directory: Path, rows_NS: Any) -> list[list[float]]:
    """Return the log-probability of each token but the first, computed in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        log_p_NSV = model(input_ids=rows_NS).logits[:, :-1].log_softmax(-1)
    return log_p_NSV.gather(-1, rows_NS[:, 1:, None])[..., 0].tolist()


def tables(rows: Sequence[dict[str, Any]], refused: Sequence[tuple[str, str]]) -> tuple[str, bool]:
    """Return the tables as Markdown, and whether everything that converts is within the bound."""
    lines = ["| checkpoint | file | difference, nats | perplexity, Transformers | llama.cpp | MB |"]
    lines += ["|---|---|---|---|---|---|"]
    passed = bool(rows)
    for row in rows:
        off = difference(row["here"], row["there"])
        exact = row["file"] == "BF16"
        passed &= off <= BOUND or not exact
        missed = " **missed**" if exact and off > BOUND else ""
        both = f"{perplexity(row['here']):.3f} | {perplexity(row['there']):.3f}"
        lines.append(f"| {row['name']} | {row['file']} | {off:.4f}{missed} | {both} | {row['bytes'] / 1e6:.2f} |")
    lines += ["", "| not converted | in the converter's words |", "|---|---|"]
    lines += [f"| {name} | `{' '.join(words.split())[:160]}` |" for name, words in refused]
    return "\n".join(lines), passed


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert every checkpoint, let both engines read, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--converter", required=True, help="convert_hf_to_gguf.py of llama.cpp")
    parser.add_argument("--converter-python", default=sys.executable, help="interpreter that runs it")
    parser.add_argument("--llama-python", required=True, help="interpreter with llama-cpp-python")
    parser.add_argument("--write", action="store_true", help="replace the tables of the guide")
    flags = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT / "tests"))
    from small_llama import trained_llama

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        llama = trained_llama(work)
        rows_NS = llama.evaluation_NS[:ROWS]
        (work / "text.txt").write_text("\n".join(llama.tokenizer.decode(row) for row in llama.train_NS[:400]))
        written = [str(work / "text.txt"), str(work / "vocabulary")]
        subprocess.run([flags.converter_python, "-c", _VOCABULARY, *written], check=True)
        rows, refused, files = [], [], []
        for case in CASES:
            directory = made(case, llama, work)
            file, why = converted([flags.converter_python, flags.converter], directory)
            print(f"{case.name}: {why or 'converted'}", file=sys.stderr, flush=True)
            if why is not None:
                refused.append((case.name, why))
                continue
            here = answers_of_transformers(directory, rows_NS)
            files.append({"name": f"{case.name} BF16", "path": str(file)})
            rows.append({"name": case.name, "file": "BF16", "path": file, "here": here})
            for kind in REQUANTIZED if case.scheme in ("dense", "W4A16") else ():
                smaller = file.with_suffix(f".{kind}.gguf")
                how = {"from": str(file), "quantize": kind}
                files.append({"name": f"{case.name} {kind}", "path": str(smaller), **how})
                rows.append({"name": case.name, "file": kind, "path": smaller, "here": here})
        manifest, results = work / "manifest.json", work / "results.json"
        manifest.write_text(json.dumps({"rows": rows_NS.tolist(), "files": files}))
        worker = str(Path(__file__).with_name("gguf_worker.py"))
        subprocess.run([flags.llama_python, worker, str(manifest), str(results)], check=True, timeout=900)
        found = json.loads(results.read_text())
        for row in rows:
            row |= {"there": found[f"{row['name']} {row['file']}"], "bytes": row["path"].stat().st_size}
        text, passed = tables(rows, refused)
    print(text)
    print(f"\nllama-cpp-python {found['version']}; {'passed' if passed else 'FAILED'}")
    if flags.write:
        page = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(with_part(page, "gguf", text), encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
