"""Predicted beside measured memory and time of a step on one CUDA GPU.

    python benchmarks/gpu_memory.py --into FILE [--only REGEX]
    python benchmarks/gpu_memory.py --stored FILE
    python benchmarks/gpu_memory.py --write

Each case trains random weights for three steps and reads the caching allocator, the driver and the clock in the last
one; nothing else may use the GPU. Running out of memory is a result, beside what the plan said. Each adds a line to
FILE; `--stored` predicts the cases of a file again, and `--write` those of `gpu_memory.jsonl` for the page.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from memory_cases import spec_of
from page_parts import with_part
from shardwright.ds_configs.memory.communication import default_zero_options
from shardwright.ds_configs.memory.estimate import GpuMemory, estimate_memory, expands_segments
from shardwright.ds_configs.specs.hardware import HardwareSpec, find_gpu, parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.ds_configs.specs.units import gigabytes
from shardwright.ds_configs.step_time.estimate import StepTime, estimate_step_time
from shardwright.plugins.launching.launch import Launch, LaunchFailedError, free_port, launch_ranks

WORKER = Path(__file__).with_name("gpu_memory_worker.py")
MEASURED = Path(__file__).with_suffix(".jsonl")
DOCUMENT = Path(__file__).parents[1] / "docs" / "measurements" / "gpu.md"
CONFIGS = Path(__file__).parents[1] / "ds_configs" / "data" / "models"
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

LAYOUTS = ("single", "zero0", "zero2", "zero3", "zero3+offload")
VALUES: dict[str, tuple[Any, ...]] = {
    "model": ("Qwen2.5-0.5B", "Llama-3.2-1B", "Llama-3B"),
    "layout": LAYOUTS,
    "method": ("full", "lora"),
    "seq_len_tokens": (2048, 8192),
    "checkpointing": (True, False),
}
_FILES = {
    "Qwen2.5-0.5B": "Qwen--Qwen2.5-0.5B",
    "Llama-3.2-1B": "meta-llama--Llama-3.2-1B",
    "2 layers of Llama-3.1-8B": "meta-llama--Llama-3.1-8B",
}


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """One training run on one GPU in bf16, with one sequence in a micro-batch."""

    model: str
    layout: str
    method: str
    seq_len_tokens: int
    checkpointing: bool
    features: tuple[str, ...] = ()
    """Of `FEATURES`."""
    optimizer: str = "adamw_torch_fused"

    @property
    def name(self) -> str:
        checkpointing = "ckpt" if self.checkpointing else "stored"
        words = (self.model, self.layout, self.method, f"{self.seq_len_tokens // 1024}k", checkpointing, *self.features)
        return "-".join([*words, *([] if self.optimizer == "adamw_torch_fused" else [self.optimizer])])

    @property
    def config(self) -> dict[str, Any]:
        if self.model not in _FILES:
            return LLAMA_3B
        loaded: dict[str, Any] = json.loads((CONFIGS / _FILES[self.model] / "config.json").read_text(encoding="utf-8"))
        return loaded | ({"num_hidden_layers": 2} if self.model.startswith("2 layers") else {})

    def spec(self) -> ModelSpec:
        return spec_of(self.config, self.model)

    def job(self) -> TrainingJob:
        return TrainingJob(
            seq_len_tokens=self.seq_len_tokens,
            method=self.method,  # type: ignore[arg-type]
            lora_rank=LORA_RANK,
            optimizer=self.optimizer,
            loss="chunked" if "fused loss" in self.features else "eager",
            use_liger_kernel="liger" in self.features,
            torch_compile="compiled" in self.features,
        )

    def full_layout(self) -> Layout:
        recomputes = {
            "gradient_checkpointing": self.checkpointing,
            "tiled_mlp": "tiled MLP" in self.features,
            "offloaded_checkpoints": self.spec().dimensions.num_layers * ("host checkpoints" in self.features),
        }
        if self.layout == "single":
            return Layout(engine="single", **recomputes)
        stage = int(self.layout[4])
        device = "cpu" if self.layout.endswith("+offload") else "none"
        return Layout(
            engine="deepspeed",
            zero_stage=stage,
            offload_optimizer=device,  # type: ignore[arg-type]
            offload_param=device,  # type: ignore[arg-type]
            zero=default_zero_options(self.spec(), self.job(), stage=stage),
            **recomputes,
        )

    def predicted(self, hardware: HardwareSpec) -> GpuMemory:
        return estimate_memory(self.full_layout(), self.spec(), hardware, self.job()).gpu

    def predicted_time(self, hardware: HardwareSpec) -> StepTime:
        return estimate_step_time(self.full_layout(), self.spec(), hardware, self.job())


def case_of(values: dict[str, Any]) -> GpuCase:
    """Return the case that JSON values describe."""
    return GpuCase(**values | {"features": tuple(values["features"])})


FEATURES = ("fused loss", "tiled MLP", "host checkpoints", "liger", "compiled")
LONG: tuple[tuple[int, tuple[str, ...]], ...] = (
    (16384, ()),
    (32768, ()),
    (65536, FEATURES[:1]),
    (131072, FEATURES[:1]),
    (131072, FEATURES[:2]),
    (131072, FEATURES[:3]),
    (262144, FEATURES[:3]),
    (131072, ("liger", *FEATURES[:1])),
    (131072, ("liger", *FEATURES[:3])),
)
"""Tokens and features of the cases with layers of an 8B model."""
OPTIMIZERS = ("adafactor", "adamw_8bit", "adamw_torch", "lion_32bit", "muon", "paged_adamw_32bit", "sgd")


@cache
def every_case() -> list[GpuCase]:
    """Return the grid of `VALUES`, then long sequences, kernels and optimizers."""
    found = [GpuCase(**dict(zip(VALUES, values, strict=True))) for values in product(*VALUES.values())]
    for layout, (tokens, features) in product(("single", "zero3"), LONG):
        found.append(
            GpuCase(
                model="2 layers of Llama-3.1-8B",
                layout=layout,
                method="full",
                seq_len_tokens=tokens,
                checkpointing=True,
                features=features,
            )
        )
    base: dict[str, Any] = {"model": "Llama-3.2-1B", "layout": "single", "method": "full"}
    for checkpointing, feature in product((True, False), FEATURES[3:]):
        found.append(GpuCase(**base, seq_len_tokens=8192, checkpointing=checkpointing, features=(feature,)))
    for name in OPTIMIZERS:
        found.append(GpuCase(**base, seq_len_tokens=2048, checkpointing=True, optimizer=name))
    found.append(GpuCase(**base | {"method": "qlora"}, seq_len_tokens=8192, checkpointing=True))
    return found


def cases(only: str = "", limit: int | None = None) -> list[GpuCase]:
    """Return the cases whose names hold a match of `only`, at most `limit` of them, small models first."""
    every = every_case()
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
    predicted_seconds: float | None = None
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of the last step."""
    mean_loss: float | None = None
    """Of the three steps."""

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
    def step_seconds(self) -> float | None:
        """Seconds of the last step, without reading its batch."""
        return sum(self.phase_seconds.values()) or None

    @property
    def time_error(self) -> float | None:
        """Relative error of the predicted time of a step, positive when it is too long."""
        return _error(self.predicted_seconds, self.step_seconds) if self.trained else None

    @property
    def trained(self) -> bool:
        """Whether all steps ran."""
        return self.outcome == "trained"


def predicted_fields(predicted: GpuMemory, time: StepTime) -> dict[str, Any]:
    """Return the fields of a result that the plan alone decides."""
    fit = "fits" if predicted.fits else "may fit"
    return {
        "predicted_phases": predicted.phases,
        "predicted_low_bytes": predicted.low_bytes,
        "predicted_peak_bytes": predicted.peak_bytes,
        "predicted_high_bytes": predicted.high_bytes,
        "predicted_fit": "does not fit" if predicted.low_bytes > predicted.capacity_bytes else fit,
        "predicted_seconds": time.seconds,
    }


def _step_peak(phases: dict[str, int]) -> int | None:
    return max((count for phase, count in phases.items() if phase not in ("init", "other")), default=None)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted is not None and measured else None


_COLUMNS = (
    "case", "outcome", "plan said", "allocated GB", "predicted", "error", "reserved GB", "reserved / allocated",
    "context GB", "used GB", "predicted", "error", "interval", "step s", "predicted", "error",
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
        _seconds(result.step_seconds),
        _seconds(result.predicted_seconds) if result.trained else "",
        _percent(result.time_error),
    )


def _gigabytes(count: int | None) -> str:
    return "" if count is None else gigabytes(count)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3g}"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def _summary(results: Sequence[GpuResult]) -> list[str]:
    trained = [result for result in results if result.trained]
    lines = [f"{len(trained)} of {len(results)} cases trained."]
    for name, errors in (
        ("Allocated", [abs(r.allocated_error) for r in trained if r.allocated_error is not None]),
        ("Used", [abs(r.used_error) for r in trained if r.used_error is not None]),
        ("Time of a step", [abs(r.time_error) for r in trained if r.time_error is not None]),
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


def measure(chosen: Sequence[GpuCase], file: Path, *, limit_seconds: float) -> None:
    """Train the cases that have the same environment in one process, which ends early if a case leaves memory behind.

    Adds a line to `file` for each case.
    """
    waiting = list(chosen)
    while waiting:
        kind = _kind(waiting[0])
        group = [case for case in waiting if _kind(case) == kind]
        failure = ""
        try:
            launch_ranks(
                Launch(
                    arguments=(str(WORKER), json.dumps([asdict(case) for case in group]), str(file)),
                    environment=gpu_environment(os.environ, waiting[0]),
                ),
                timeout_seconds=limit_seconds * len(group),
                on_line=lambda line: print(line, file=sys.stderr) if line.startswith("measured ") else None,
            )
        except LaunchFailedError as error:
            stopped = error.launcher_exit_code is None
            failure = "timed out" if stopped else "failed: " + str(error).strip().splitlines()[-1][:160]
        done = {result.case.name for result in stored(file)}
        left = [case for case in group if case.name not in done]
        if left and (failure or len(left) == len(group)):
            with file.open("a", encoding="utf-8") as lines:
                outcome = failure or "failed: wrote no outcome"
                lines.write(json.dumps({"case": asdict(left[0]), "outcome": outcome}) + "\n")
            done.add(left[0].name)
        waiting = [case for case in waiting if case.name not in done]


def _kind(case: GpuCase) -> tuple[bool, bool]:
    return case.layout == "single", expands_segments(case.job(), parse_hardware("1xH100-80GB"))


def stored(file: Path) -> list[GpuResult]:
    """Return what a file has, with today's predictions; the last line of a case counts."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    results = [_result(json.loads(line)) for line in text.splitlines()]
    return list({result.case.name: result for result in results}.values())


def _result(values: dict[str, Any]) -> GpuResult:
    """Return the result from what the process wrote."""
    case = case_of(values["case"])
    if "device" not in values:
        return GpuResult(case=case, outcome=values["outcome"])
    hardware = parse_hardware(f"1x{find_gpu(values['device'])}")
    predicted = predicted_fields(case.predicted(hardware), case.predicted_time(hardware))
    return GpuResult(**values | predicted | {"case": case})


def gpu_environment(environment: os._Environ[str] | dict[str, str], case: GpuCase) -> dict[str, str]:
    """Return the variables of the only rank on the first visible GPU; one process without an engine is no rank."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    shared = {"CUDA_VISIBLE_DEVICES": visible, "DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    single, expands = _kind(case)
    if expands:
        shared["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if single:
        return shared
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**shared, **rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen cases and print the table; return 2 without a CUDA GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_regex, default="", metavar="REGEX", help="cases whose names match")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N cases")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--into", type=Path, metavar="FILE", help="add a line for each case")
    where.add_argument("--stored", type=Path, metavar="FILE", help="train nothing, predict these cases again")
    where.add_argument("--write", action="store_true", help=f"the same with {MEASURED.name}, for {DOCUMENT.name}")
    parser.add_argument("--seconds", type=float, default=SECONDS_PER_CASE, help="time limit of a case")
    flags = parser.parse_args(argv)
    if flags.limit is not None and flags.limit < 1:
        parser.error(f"--limit {flags.limit}: must be at least 1")
    chosen = cases(flags.only, flags.limit)
    if not chosen:
        parser.error(f"--only {flags.only!r} matches no case, such as {cases()[0].name}")
    if flags.write:
        page = with_part(DOCUMENT.read_text(encoding="utf-8"), "runs", table(stored(MEASURED)))
        DOCUMENT.write_text(page, encoding="utf-8")
        return 0
    if flags.stored is None:
        import torch

        if not torch.cuda.is_available():
            print(
                "gpu_memory.py measures a CUDA GPU, and torch sees none: run it on a machine with one", file=sys.stderr
            )
            return 2
        measure(chosen, flags.into, limit_seconds=flags.seconds)
    names = {case.name for case in chosen}
    print(table([result for result in stored(flags.stored or flags.into) if result.case.name in names]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
