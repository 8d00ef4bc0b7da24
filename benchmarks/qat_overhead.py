"""What rounding adds to a training step: `python benchmarks/qat_overhead.py [--write] [--strict] [--turns N]`.

A Llama takes the same optimizer steps as it is, with fake quantization by Shardwright, and as torchao prepares it for
the same numbers (4-bit weights in groups of 128, symmetric), if torchao is installed. Every run is a fresh process on
one thread, ways in turns, so that whatever else the machine does meets all alike. Times are medians over steps and
runs; processor time counts for the target, because other programs disturb it least. Bytes are those of live tensors at
their peak within a step, counted in a step of its own; the resident set is that of the process before it.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from page_parts import with_part

MEASURED = Path(__file__).with_name("qat_overhead.json")
DOCUMENT = Path(__file__).parents[1] / "docs" / "measurements" / "qat.md"
WAYS = ("plain", "Shardwright", "torchao")
PRECISIONS = ("fp32", "bf16")
TURNS, STEPS, TIME_ALLOWED, BYTES_ALLOWED = 3, 4, 1.3, 1.05
BATCH_SIZE, SEQ_LEN, VOCAB_SIZE, LAYERS, HIDDEN_SIZE, INTERMEDIATE_SIZE = 8, 256, 4096, 2, 512, 1408
GROUP_SIZE, BITS = 128, 4


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process."""

    way: str
    """One of `WAYS`."""
    precision: str
    """"fp32", or "bf16" for fp32 weights under autocast."""
    wall_seconds: float
    """Median wall time of a step: forward, backward, optimizer."""
    cpu_seconds: float
    """Median processor time of a step."""
    peak_bytes: int
    """Largest bytes of live tensors within a step, weights and optimizer included."""
    resident_bytes: int
    """Largest resident set of the process."""
    version: str
    """Of torch, or of torchao."""


def main() -> int:
    """Measure and print; with `--strict`, return 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {MEASURED.name} and {DOCUMENT.name}")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument("--turns", type=int, default=TURNS, help="runs of each way")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "PRECISION"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(asdict(measure(*arguments.one))))
        return 0
    ways = WAYS if torchao_version() else WAYS[:-1]
    found = [
        measured_in_own_process(way, precision)
        for _ in range(arguments.turns)
        for precision in arguments.precisions
        for way in ways
    ]
    print(table(found))
    if arguments.write:
        write(found)
    return int(arguments.strict and bool(misses(found)))


def torchao_version() -> str | None:
    """Return the version of torchao; `None` where it is not installed."""
    try:
        return version("torchao")
    except PackageNotFoundError:
        return None


def measured_in_own_process(way: str, precision: str) -> Run:
    """Return the figures of a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", way, precision]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=900)
    print(done.stdout.splitlines()[-1], file=sys.stderr)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def measure(way: str, precision: str, *, steps: int = STEPS, **sizes: int) -> Run:
    """Train a few steps in this process; the first, which makes the optimizer's state, is not timed."""
    import torch
    from shardwright.plugins.metering import ByteMeter

    torch.set_num_threads(1)
    model, ids_BS = model_and_tokens(**sizes)
    if way == "Shardwright":
        _attach(model)
    elif way == "torchao":
        _prepare_with_torchao(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with _autocast(precision):
            loss = model(input_ids=ids_BS, labels=ids_BS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    wall, cpu = [], []
    for _ in range(steps):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - wall_start)
        cpu.append(time.process_time() - cpu_start)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
    with ByteMeter() as meter:
        meter.enter("forward")
        meter.label(model.parameters(), "weights")
        meter.label((part for state in optimizer.state.values() for part in state.values()), "optimizer")
        step()
    return Run(
        way=way,
        precision=precision,
        wall_seconds=median(wall),
        cpu_seconds=median(cpu),
        peak_bytes=meter.reading().peak_bytes,
        resident_bytes=resident,
        version=(torchao_version() or "") if way == "torchao" else torch.__version__,
    )


def model_and_tokens(
    *,
    hidden_size: int = HIDDEN_SIZE,
    intermediate_size: int = INTERMEDIATE_SIZE,
    layers: int = LAYERS,
    batch_size: int = BATCH_SIZE,
    seq_len: int = SEQ_LEN,
) -> tuple[Any, Any]:
    """Return a Llama in training mode, always the same, and token ids [B, S]."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        vocab_size=VOCAB_SIZE,
    )
    return LlamaForCausalLM(config).train(), torch.randint(VOCAB_SIZE, (batch_size, seq_len))


def _attach(model: Any) -> None:
    from shardwright.ds_configs.quantization.scheme import scheme_named
    from shardwright.trainers.qat.rounding.attach import attach
    from shardwright.trainers.qat.rounding.config import QATConfig

    attach(model, QATConfig(scheme=scheme_named("W4A16"))).state.enabled = True


def _prepare_with_torchao(model: Any) -> None:
    import torch
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    numbers = IntxFakeQuantizeConfig(torch.int4, group_size=GROUP_SIZE, is_symmetric=True)
    # As ours, and as checkpoints: the head stays in full precision.
    quantize_(
        model,
        QATConfig(weight_config=numbers, step="prepare"),
        lambda module, name: isinstance(module, torch.nn.Linear) and name != "lm_head",
    )


def _autocast(precision: str) -> AbstractContextManager[Any]:
    import torch

    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def misses(found: Sequence[Run]) -> list[str]:
    """Return each precision and target that Shardwright misses."""
    missed = []
    for precision in dict.fromkeys(run.precision for run in found):
        for field, allowed in (("cpu_seconds", TIME_ALLOWED), ("peak_bytes", BYTES_ALLOWED)):
            if ratio(found, "Shardwright", precision, field) > allowed:
                missed.append(f"{precision}, {field}")
    return missed


def ratio(found: Sequence[Run], way: str, precision: str, field: str) -> float:
    """Return a figure of a way in units of the plain step's, medians over runs."""
    return _median(found, way, precision, field) / _median(found, "plain", precision, field)


def table(found: Sequence[Run]) -> str:
    """Return one markdown line for each precision and way; medians, and in brackets times the plain step."""
    lines = ["| precision | step | CPU s | wall s | peak MB of tensors | resident MB |", "|---|---|---|---|---|---|"]
    for precision in dict.fromkeys(run.precision for run in found):
        for way in WAYS:
            lines.append(f"| {precision} | {_name(found, way)} | {' | '.join(_cells(found, way, precision))} |")
    return "\n".join(lines)


def _name(found: Sequence[Run], way: str) -> str:
    versions = [run.version for run in found if run.way == way]
    return f"{way} {versions[0]}" if way == "torchao" and versions else way


def _cells(found: Sequence[Run], way: str, precision: str) -> list[str]:
    if not any(run.way == way for run in found):
        return ["not installed", "", "", ""]
    cells = []
    for field, unit, shown in (
        ("cpu_seconds", 1.0, ".2f"),
        ("wall_seconds", 1.0, ".2f"),
        ("peak_bytes", 1e6, ".0f"),
        ("resident_bytes", 1e6, ".0f"),
    ):
        value = format(_median(found, way, precision, field) / unit, shown)
        cells.append(value if way == "plain" else f"{value} ({ratio(found, way, precision, field):.2f})")
    return cells


def _median(found: Sequence[Run], way: str, precision: str, field: str) -> float:
    return median(getattr(run, field) for run in found if (run.way, run.precision) == (way, precision))


def stored() -> list[Run]:
    """Return the figures that were kept."""
    return [Run(**entry) for entry in json.loads(MEASURED.read_text(encoding="utf-8"))]


def updated(document: str, found: Sequence[Run]) -> str:
    """Return the document with its table replaced."""
    return with_part(document, "overhead", table(found))


def write(found: Sequence[Run]) -> None:
    """Keep the figures and put their table in the document."""
    lines = ",\n".join(json.dumps(asdict(run)) for run in found)
    MEASURED.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
