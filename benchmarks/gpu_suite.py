"""What this project claims about GPUs, on one GPU in nine minutes.

    python benchmarks/gpu_suite.py --output DIR [--only PART ...] [--write] [--device cpu]
    python benchmarks/gpu_suite.py --stored DIR/suite.json

Each part is a process with a time limit of its own. One that fails or takes too long loses its own result only.
`DIR/suite.json` has the outcome of every part. `--write` puts the tables of complete parts into the page of GPUs,
`--stored` those of an earlier run, also of another machine. `--device cpu` tries the parts that need no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from page_parts import with_part

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "measurements" / "gpu.md"
MEMORY_CASES = (
    "^(Llama-3.2-1B-single-full-2k-ckpt|Llama-3.2-1B-zero2-full-8k-ckpt|Llama-3.2-1B-zero3-full-2k-ckpt|"
    "2 layers of Llama-3.1-8B-zero3-full-16k-ckpt|2 layers of Llama-3.1-8B-zero3-full-128k-ckpt-fused loss-tiled MLP|"
    "Llama-3B-single-lora-8k-ckpt)$"
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command and its time limit."""

    arguments: tuple[str, ...]
    limit_seconds: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a part ended: `passed`, `failed` or `too slow`."""

    result: str
    seconds: float
    output: str


def parts(directory: Path, device: str = "cuda") -> dict[str, Part]:
    """Return the parts, the shortest first; their limits add up to nine minutes."""
    python = sys.executable
    rates = (python, str(HERE / "gpu_rates.py"), "--json", str(directory / "rates.json"), "--device", device)
    losses = (python, str(HERE / "kd_memory.py"), "--device", device)
    memory = (python, str(HERE / "gpu_memory.py"), "--into", str(directory / "memory.jsonl"), "--only", MEMORY_CASES)
    anywhere = {
        "rates": Part(arguments=rates, limit_seconds=90),
        "equality": Part(arguments=(*losses, "--equality"), limit_seconds=120),
    }
    if device == "cpu":
        return anywhere
    return anywhere | {
        "distillation": Part(arguments=losses, limit_seconds=90),
        "memory": Part(arguments=(*memory, "--seconds", "60"), limit_seconds=240),
    }


def run(chosen: Mapping[str, Part], into: Path) -> dict[str, Outcome]:
    """Run each part and store the outcomes after each, so that an interrupted suite keeps what it has."""
    outcomes: dict[str, Outcome] = {}
    for name, part in chosen.items():
        start = time.monotonic()
        # A group of its own: ranks of a part that is ended must not keep the GPU.
        process = subprocess.Popen(
            part.arguments,
            cwd=HERE.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=part.limit_seconds)
            result = "passed" if process.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            result = "too slow"
        outcomes[name] = Outcome(result=result, seconds=round(time.monotonic() - start, 1), output=output)
        into.write_text(json.dumps({key: asdict(value) for key, value in outcomes.items()}, indent=1), encoding="utf-8")
        print(f"{name}: {result} after {outcomes[name].seconds} s", flush=True)
    return outcomes


def updated(page: str, outcomes: Mapping[str, Outcome]) -> str:
    """Return the page with the tables of complete parts."""
    for name, outcome in outcomes.items():
        table = [line for line in outcome.output.splitlines() if line.startswith(("|", "Liger"))]
        if outcome.result == "passed" and table:
            page = with_part(page, f"suite: {name}", "\n".join(table))
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; return 1 if a part did not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--output", type=Path, metavar="DIR")
    where.add_argument("--stored", type=Path, metavar="FILE", help=f"run nothing, update {DOCUMENT.name}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=tuple(parts(Path())), metavar="PART")
    parser.add_argument("--write", action="store_true", help=f"update {DOCUMENT.name}")
    options = parser.parse_args(arguments)
    if options.write and options.device == "cpu":
        parser.error(f"--write: {DOCUMENT.name} has results of GPUs. Omit it with --device cpu.")
    if options.stored:
        stored = json.loads(options.stored.read_text(encoding="utf-8"))
        outcomes = {name: Outcome(**outcome) for name, outcome in stored.items()}
    else:
        options.output.mkdir(parents=True, exist_ok=True)
        chosen = parts(options.output.resolve(), options.device)
        wanted = options.only or tuple(chosen)
        outcomes = run({name: part for name, part in chosen.items() if name in wanted}, options.output / "suite.json")
    if options.write or options.stored:
        DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8"), outcomes), encoding="utf-8")
    return int(any(outcome.result != "passed" for outcome in outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
