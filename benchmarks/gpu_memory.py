"""Predicted beside measured memory on one CUDA GPU: `python benchmarks/gpu_memory.py [--only REGEX] [--json FILE]`.

Each case trains random weights for three steps in a process of its own and reads the caching allocator and the driver
in the last one; nothing else may use the GPU. Running out of memory is a result, beside what the plan said.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from memory_cases import spec_of
from shardwright.ds_configs.memory.estimate import GpuMemory, estimate_memory
from shardwright.ds_configs.memory.model_states import default_zero_options
from shardwright.ds_configs.specs.hardware import HardwareSpec
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.ds_configs.specs.units import gigabytes
from shardwright.plugins.launching.launch import Launch, LaunchFailedError, free_port, launch_ranks

CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "models"
WORKER = Path(__file__).with_name("gpu_memory_worker.py")
SECONDS_PER_CASE = 900.0
LORA_RANK = 16

LLAMA_3B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
"""The sizes that the model card of Llama-3.2-3B states."""

LAYOUTS = ("zero0", "zero2", "zero3", "zero3+offload")
VALUES: dict[str, tuple[Any, ...]] = {
    "model": ("Qwen2.5-0.5B", "Llama-3.2-1B", "Llama-3B"),
    "layout": LAYOUTS,
    "method": ("full", "lora"),
    "seq_len_tokens": (2048, 8192),
    "checkpointing": (True, False),
}
_FILES = {"Qwen2.5-0.5B": "Qwen--Qwen2.5-0.5B", "Llama-3.2-1B": "meta-llama--Llama-3.2-1B"}


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """One training run on one GPU in bf16, with one sequence in a micro-batch."""

    model: str
    layout: str
    method: str
    seq_len_tokens: int
    checkpointing: bool

    @property
    def name(self) -> str:
        checkpointing = "ckpt" if self.checkpointing else "stored"
        return f"{self.model}-{self.layout}-{self.method}-{self.seq_len_tokens // 1024}k-{checkpointing}"

    @property
    def config(self) -> dict[str, Any]:
        if self.model not in _FILES:
            return LLAMA_3B
        loaded: dict[str, Any] = json.loads((CONFIGS / _FILES[self.model] / "config.json").read_text(encoding="utf-8"))
        return loaded

    def spec(self) -> ModelSpec:
        return spec_of(self.config, self.model)

    def job(self) -> TrainingJob:
        return TrainingJob(
            seq_len_tokens=self.seq_len_tokens,
            method=self.method,  # type: ignore[arg-type]
            lora_rank=LORA_RANK,
        )

    def strategy(self) -> Layout:
        stage = int(self.layout[4])
        device = "cpu" if self.layout.endswith("+offload") else "none"
        return Layout(
            engine="deepspeed",
            zero_stage=stage,
            offload_optimizer=device,  # type: ignore[arg-type]
            offload_param=device,  # type: ignore[arg-type]
            gradient_checkpointing=self.checkpointing,
            zero=default_zero_options(self.spec(), self.job(), stage=stage),
        )

    def predicted(self, hardware: HardwareSpec) -> GpuMemory:
        return estimate_memory(self.strategy(), self.spec(), hardware, self.job()).gpu


def cases(only: str = "", limit: int | None = None) -> list[GpuCase]:
    """Return the cases whose names hold a match of `only`, at most `limit` of them, small models first."""
    every = [GpuCase(**dict(zip(VALUES, values, strict=True))) for values in product(*VALUES.values())]
    return [case for case in every if re.search(only, case.name)][:limit]


@dataclass(frozen=True, kw_only=True)
class GpuResult:
    """What became of a case, in bytes; measured values are `None` where there are none."""

    case: GpuCase
    outcome: str
    """`trained`, `out of memory`, or why nothing was measured."""
    device: str = ""
    predicted_phases: dict[str, int] = field(default_factory=dict)
    """Predicted tensor bytes of each phase."""
    predicted_low_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_high_bytes: int | None = None
    predicted_fit: str = ""
    """`fits`, `may fit` (the GPU is inside the interval) or `does not fit`."""
    allocated_phases: dict[str, int] = field(default_factory=dict)
    """Largest allocated bytes of each phase of the last step; of all phases so far when the run did not end."""
    reserved_peak_bytes: int | None = None
    context_bytes: int | None = None
    """Bytes used on the device beyond what the allocator had reserved at the same moment."""

    @property
    def predicted_allocated_bytes(self) -> int | None:
        """Predicted tensor bytes of a step, without what only making the model needs."""
        return _step_peak(self.predicted_phases)

    @property
    def allocated_peak_bytes(self) -> int | None:
        """Largest allocated bytes of a step."""
        return _step_peak(self.allocated_phases)

    @property
    def used_bytes(self) -> int | None:
        """Largest bytes used on the device: the allocator's peak, and what lives beside it."""
        if self.reserved_peak_bytes is None or self.context_bytes is None:
            return None
        return self.reserved_peak_bytes + self.context_bytes

    @property
    def fragmentation(self) -> float | None:
        """Reserved over allocated bytes."""
        if not self.allocated_peak_bytes or self.reserved_peak_bytes is None:
            return None
        return self.reserved_peak_bytes / self.allocated_peak_bytes

    @property
    def allocated_error(self) -> float | None:
        """Relative error of the predicted tensor bytes, positive when they are too large."""
        return _error(self.predicted_allocated_bytes, self.allocated_peak_bytes) if self.trained else None

    @property
    def used_error(self) -> float | None:
        """Relative error of the predicted peak with runtime and allocator, positive when it is too large."""
        return _error(self.predicted_peak_bytes, self.used_bytes) if self.trained else None

    @property
    def trained(self) -> bool:
        """Whether all steps ran."""
        return self.outcome == "trained"


def predicted_fields(predicted: GpuMemory) -> dict[str, Any]:
    """Return the fields of a result that the plan alone decides."""
    fit = "fits" if predicted.fits else "may fit"
    return {
        "predicted_phases": predicted.phases,
        "predicted_low_bytes": predicted.low_bytes,
        "predicted_peak_bytes": predicted.peak_bytes,
        "predicted_high_bytes": predicted.high_bytes,
        "predicted_fit": "does not fit" if predicted.low_bytes > predicted.capacity_bytes else fit,
    }


def _step_peak(phases: dict[str, int]) -> int | None:
    return max((count for phase, count in phases.items() if phase not in ("init", "other")), default=None)


def _error(predicted: int | None, measured: int | None) -> float | None:
    return predicted / measured - 1 if predicted is not None and measured else None


def record(result: GpuResult) -> dict[str, Any]:
    """Return a result as JSON, with what follows from its figures."""
    derived = (
        "predicted_allocated_bytes",
        "allocated_peak_bytes",
        "used_bytes",
        "fragmentation",
        "allocated_error",
        "used_error",
    )
    return {"name": result.case.name, **asdict(result), **{name: getattr(result, name) for name in derived}}


_COLUMNS = (
    "case", "outcome", "plan said", "allocated GB", "predicted", "error", "reserved GB", "reserved / allocated",
    "context GB", "used GB", "predicted", "error", "interval",
)  # fmt: skip


def table(results: Sequence[GpuResult]) -> str:
    """Return the results as a Markdown table with a summary below."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + " --- |" * len(_COLUMNS)]
    lines += ["| " + " | ".join(_cells(result)) + " |" for result in results]
    return "\n".join([*lines, "", *_summary(results)])


def _cells(result: GpuResult) -> tuple[str, ...]:
    low, high, used = result.predicted_low_bytes, result.predicted_high_bytes, result.used_bytes
    inside = "" if low is None or high is None or used is None else "inside" if low <= used <= high else "outside"
    return (
        result.case.name,
        result.outcome.replace("|", "/"),
        result.predicted_fit,
        _gigabytes(result.allocated_peak_bytes),
        _gigabytes(result.predicted_allocated_bytes),
        _percent(result.allocated_error),
        _gigabytes(result.reserved_peak_bytes),
        "" if result.fragmentation is None else f"{result.fragmentation:.3f}",
        _gigabytes(result.context_bytes),
        _gigabytes(used),
        _gigabytes(result.predicted_peak_bytes),
        _percent(result.used_error),
        inside if result.trained else "",
    )


def _gigabytes(count: int | None) -> str:
    return "" if count is None else gigabytes(count)


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def _summary(results: Sequence[GpuResult]) -> list[str]:
    trained = [result for result in results if result.trained]
    lines = [f"{len(trained)} of {len(results)} cases trained."]
    for name, errors in (
        ("Allocated", [abs(r.allocated_error) for r in trained if r.allocated_error is not None]),
        ("Used", [abs(r.used_error) for r in trained if r.used_error is not None]),
    ):
        if errors:
            lines.append(f"{name}: mean error {mean(errors):.1%}, worst {max(errors):.1%}.")
    short = [result for result in results if result.outcome == "out of memory"]
    if short:
        words = ("does not fit", "may fit", "fits")
        said = ", ".join(f"{word}: {sum(result.predicted_fit == word for result in short)}" for word in words)
        lines.append(f"Out of memory: {len(short)}, of which the plan said {said}.")
    refused = sum(result.predicted_fit == "does not fit" for result in trained)
    lines.append(f"Trained although the plan said that it does not fit: {refused}.")
    return lines


def measure(case: GpuCase, *, limit_seconds: float) -> GpuResult:
    """Train one case in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "result.json"
        failure = ""
        try:
            launch_ranks(
                Launch(
                    arguments=(
                        str(WORKER),
                        json.dumps(asdict(case)),
                        str(output),
                    ),
                    environment=gpu_environment(os.environ),
                ),
                timeout_seconds=limit_seconds,
            )
        except LaunchFailedError as error:
            stopped = error.launcher_exit_code is None
            failure = "timed out" if stopped else "failed: " + str(error).strip().splitlines()[-1][:160]
        values = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {}
    return result_of(case, values, failure)


def result_of(case: GpuCase, values: dict[str, Any], failure: str) -> GpuResult:
    """Return the result from what the process wrote and how it ended: it writes its prediction before it trains."""
    outcome = values.pop("outcome", None) or failure or "failed: wrote no outcome"
    return GpuResult(case=case, outcome=outcome, **values)


def gpu_environment(environment: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Return the variables of the only rank on the first visible GPU."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    threads = {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    return {"CUDA_VISIBLE_DEVICES": visible, "DS_ACCELERATOR": "cuda", **rank, **address, **threads}


def _write(results: Sequence[GpuResult], file: Path) -> None:
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(json.dumps([record(result) for result in results], indent=1) + "\n", encoding="utf-8")
    temporary.replace(file)


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen cases and print the table; return 2 without a CUDA GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=_regex, default="", metavar="REGEX", help="cases whose names match")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N cases")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures too, after each case")
    parser.add_argument("--seconds", type=float, default=SECONDS_PER_CASE, help="time limit of a case")
    flags = parser.parse_args(argv)
    if flags.limit is not None and flags.limit < 1:
        parser.error(f"--limit {flags.limit}: must be at least 1")
    chosen = cases(flags.only, flags.limit)
    if not chosen:
        parser.error(f"--only {flags.only!r} matches no case, such as {cases()[0].name}")
    import torch

    if not torch.cuda.is_available():
        print("gpu_memory.py measures a CUDA GPU, and torch sees none: run it on a machine with one", file=sys.stderr)
        return 2
    results: list[GpuResult] = []
    for case in chosen:
        results.append(measure(case, limit_seconds=flags.seconds))
        print(f"{len(results)}/{len(chosen)} {case.name}: {results[-1].outcome}", file=sys.stderr)
        if flags.json is not None:
            _write(results, flags.json)
    print(table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
