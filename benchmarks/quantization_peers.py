"""Other ways to four bits on the same model, text and machine: `python benchmarks/quantization_peers.py`.

    --only WORD       ways with this word in their name
    --torchao DIR     directory with torchao (`pip install --no-deps --target DIR torchao`); skipped without it
    --gptqmodel PY    interpreter of an environment with gptqmodel; skipped without it
    --write           replace the table in docs/measurements/quantization_peers.md

The model is the one that `tests/small_llama.py` trains in a minute. Every way is a process of its own, timed with its
imports, that reads the dense checkpoint and the same 64 rows of 128 tokens as text, and writes a checkpoint;
Transformers then reads 96 held-out rows with each. KL is that of the dense model from the quantized one, in fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from page_parts import with_part

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "measurements" / "quantization_peers.md"
CALIBRATION_ROWS, SEQ_LEN, GROUP_SIZE = 64, 128, 128
_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to a checkpoint."""

    name: str
    """What the table calls it."""
    arguments: tuple[str, ...]
    """Command with MODEL, TEXT and OUT in it; without a program, a script of this folder's `peers`."""
    user_writes: str
    """What a user has to write for it."""
    interpreter: str = sys.executable
    """Python that runs it."""
    path: str = ""
    """Further directory with packages."""
    dtype: str = "float32"
    """Type that Transformers reads the result in; torchao's 4-bit tensors know that which they were made in."""


def ways(torchao: str | None, gptqmodel: str | None) -> list[Way]:
    """Return every way that is installed."""
    own = ("-m", "shardwright", "quantize", "MODEL", "--output-dir", "OUT", "--no-evaluate", "--scheme", "W4A16")
    text = ("--dataset", "TEXT", "--seq-len", str(SEQ_LEN), "--num-samples", str(CALIBRATION_ROWS))
    found = [
        Way(name=f"Shardwright, {method}", arguments=(*own, *text, "--method", method), user_writes="one command")
        for method in ("rtn", "gptq", "awq")
    ]
    found += [
        Way(name=f"llm-compressor, {method}", arguments=_script("llm_compressor", method), user_writes="12 lines")
        for method in ("rtn", "gptq")
    ]
    round_line = ("-m", "auto_round", "--model", "MODEL", "--scheme", "W4A16", "--dataset", "TEXT", "--seqlen")
    round_line += (str(SEQ_LEN), "--nsamples", str(CALIBRATION_ROWS), "--iters", "200", "--output_dir", "OUT")
    for layout in ("auto_round", "llm_compressor"):
        found.append(
            Way(name=f"AutoRound, {layout}", arguments=(*round_line, "--format", layout), user_writes="one command")
        )
    for kind in ("nf4", "fp4", "int8"):
        name = f"bitsandbytes, {kind}"
        found.append(Way(name=name, arguments=_script("bitsandbytes", kind), user_writes="4 lines"))
    if torchao is not None:
        for kind, dtype in (("int4", "bfloat16"), ("int8", "float32")):
            script = _script("torchao", kind)
            found.append(
                Way(name=f"torchao, {kind}", arguments=script, user_writes="5 lines", path=torchao, dtype=dtype)
            )
    if gptqmodel is not None:
        script = _script("gptqmodel", "gptq")
        found.append(Way(name="GPTQModel, gptq", arguments=script, user_writes="5 lines", interpreter=gptqmodel))
    return found


def _script(library: str, kind: str) -> tuple[str, ...]:
    return (str(Path(__file__).with_name("quantization_peer.py")), library, kind, "MODEL", "TEXT", "OUT")


def run(way: Way, model: Path, text: Path, output: Path) -> tuple[float, str | None]:
    """Run a way, and return its seconds and why it failed."""
    named = {"MODEL": str(model), "TEXT": str(text), "OUT": str(output)}
    command = [way.interpreter, *(named.get(word, word) for word in way.arguments)]
    environment = _environment(way)
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=_SECONDS, check=False, cwd=output.parent
        )
    except subprocess.TimeoutExpired:
        return time.monotonic() - began, f"not done after {_SECONDS} s"
    seconds = time.monotonic() - began
    if done.returncode == 0:
        return seconds, None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return seconds, lines[-1] if lines else f"exit code {done.returncode}"


def _environment(way: Way) -> dict[str, str]:
    kept = [place for place in (os.environ.get("PYTHONPATH", ""), way.path) if place]
    return os.environ | {"PYTHONPATH": os.pathsep.join(kept), "HF_HUB_OFFLINE": "1"}


def judge(directory: Path, rows_file: Path, dense: Path, dtype: str) -> dict[str, float]:
    """Return KL, loss and agreement of a checkpoint beside the dense one, with standard errors over rows."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    rows_NS = load_file(rows_file)["evaluation"]

    @torch.inference_mode()
    def log_probabilities(place: Path, dtype: str) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(place, device_map={"": "cpu"}, dtype=dtype).eval()
        return torch.cat(
            [model(input_ids=part_nS).logits[:, :-1].float() for part_nS in rows_NS.split(16)]
        ).log_softmax(-1)

    log_p_NSV, log_q_NSV = log_probabilities(dense, "float32"), log_probabilities(directory, dtype)
    kl_N = (log_p_NSV.exp() * (log_p_NSV - log_q_NSV)).sum(-1).mean(-1).double()
    targets_NS1 = rows_NS[:, 1:, None]
    excess_N = (log_p_NSV - log_q_NSV).gather(-1, targets_NS1)[..., 0].mean(-1).double()
    same_N = (log_p_NSV.argmax(-1) == log_q_NSV.argmax(-1)).double().mean(-1)
    found: dict[str, float] = {}
    for name, values_N in (("kl", kl_N), ("excess", excess_N), ("same", same_N)):
        found |= {name: float(values_N.mean()), f"{name}_error": float(values_N.std() / len(values_N) ** 0.5)}
    return found


def judged(way: Way, output: Path, rows_file: Path, dense: Path) -> dict[str, float] | str:
    """Judge in a process with the packages that the format needs; return why it does not load otherwise."""
    # Some libraries write a directory below the one that they are given.
    stored = sorted(output.rglob("*.safetensors"))
    if not stored:
        return "no safetensors were written"
    directory = stored[0].parent
    command = [way.interpreter, __file__, "--judge", str(directory), str(rows_file), str(dense), way.dtype]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(way), timeout=_SECONDS, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return f"does not load: {lines[-1] if lines else done.returncode}"
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found | {"bytes": float(sum(file.stat().st_size for file in stored))}


def table(results: Sequence[tuple[Way, float, dict[str, float] | str]], dense_bytes: int) -> str:
    """Return what every way came to as Markdown."""
    lines = [
        "| way | KL, nats / 1000 | loss above dense, nats / 1000 | same token | MB | seconds | a user writes |",
        "|---|---|---|---|---|---|---|",
        f"| dense, bf16 | 0 | 0 | 100 % | {dense_bytes / 1e6:.2f} | | |",
    ]
    for way, seconds, found in results:
        if isinstance(found, str):
            continue
        lines.append(
            f"| {way.name} | {1e3 * found['kl']:.2f} ± {1e3 * found['kl_error']:.2f} "
            f"| {1e3 * found['excess']:+.2f} ± {1e3 * found['excess_error']:.2f} | {found['same']:.1%} "
            f"| {found['bytes'] / 1e6:.2f} | {seconds:.0f} | {way.user_writes} |"
        )
    failed = [(way.name, found) for way, _, found in results if isinstance(found, str)]
    if failed:
        lines += ["", "| did not run | in its own words |", "|---|---|"]
        lines += [f"| {name} | `{' '.join(why.split())[:200]}` |" for name, why in failed]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every way, judge what it wrote, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="ways with this word in their name")
    parser.add_argument("--torchao", default=None, help="directory with torchao")
    parser.add_argument("--gptqmodel", default=None, help="interpreter of an environment with gptqmodel")
    parser.add_argument("--judge", nargs=4, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="replace the table of the page")
    flags = parser.parse_args(arguments)
    if flags.judge is not None:
        print(json.dumps(judge(*map(Path, flags.judge[:3]), flags.judge[3])))
        return 0
    sys.path.insert(0, str(ROOT / "tests"))
    from small_llama import ROWS_FILE, trained_llama
    from transformers import LlamaForCausalLM

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        llama = trained_llama(work)
        # The model is stored as published ones are.
        dense = work / "dense"
        LlamaForCausalLM.from_pretrained(llama.directory, dtype="bfloat16").save_pretrained(dense)
        llama.tokenizer.save_pretrained(dense)
        text = work / "calibration.jsonl"
        rows = [llama.tokenizer.decode(row) for row in llama.train_NS[:CALIBRATION_ROWS]]
        text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        results = []
        for way in ways(flags.torchao, flags.gptqmodel):
            if flags.only not in way.name:
                continue
            output = work / re.sub(r"\W+", "-", way.name)
            seconds, why = run(way, dense, text, output)
            found = why if why is not None else judged(way, output, llama.directory / ROWS_FILE, dense)
            results.append((way, seconds, found))
            print(way.name, f"{seconds:.0f} s", found, file=sys.stderr, flush=True)
        shown = table(results, sum(file.stat().st_size for file in dense.glob("*.safetensors")))
    print(shown)
    if flags.write:
        page = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(with_part(page, "peers", shown), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
