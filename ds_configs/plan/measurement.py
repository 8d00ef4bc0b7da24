"""`plan_measurement.json`: memory and step times of a training run per rank, with the prediction of its plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ..memory.estimate import MeasuredRun, check_ratio
from ..specs.errors import ConfigError, RefusedInputError, UsageError
from ..specs.tasks import TASKS
from ..specs.texts import strict_json
from ..specs.units import gigabytes
from ..step_time.learning import MeasuredStep
from .plan import Plan, job_dict, layout_dict

FILE_NAME = "plan_measurement.json"
SCHEMA_VERSION = 1
# A rank takes some hundred bytes, so 16 MiB hold tens of thousands of ranks. The limit keeps a foreign file from
# filling the memory.
LARGEST_FILE_BYTES = 16 * 2**20
FIRST_STEPS = 2
"""Steps reported separately: the first builds kernels, and ZeRO-3 prefetches from the second on, after its trace."""

_NOISY_SPREAD = 0.25
"""Spread of a run's steps from which on another job probably uses the machine."""

# A file of another schema breaks nearly every field; more errors would not help.
_MOST_ERRORS = 20
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Bytes = Annotated[int, Field(ge=0, le=10**18)]
Count = Annotated[int, Field(ge=1, le=10**15)]
Seconds = Annotated[float, Field(ge=0, le=10**9)]
Text = Annotated[str, Field(min_length=1, max_length=4096)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """Facts of the plan that a run measured."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    model: Text
    model_type: Text
    architecture: Text
    parameters: Count
    gpu: Text
    gpu_bytes: Bytes
    world_size: Count
    layout: dict[str, object]
    """The chosen layout, as in `plan.json`."""
    job: dict[str, object]
    """The job, as in `plan.json`, with names of second models instead of their specifications."""
    flops_per_s: Annotated[float, Field(gt=0, le=1e21)] | None = None
    """Of the planned accelerator; `None` in files of older versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedMemory:
    """Prediction of the plan for the fullest accelerator."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    peak_bytes: Bytes
    """Expected device memory with runtime, communicators and fragmentation."""
    low_bytes: Bytes
    high_bytes: Bytes
    allocated_bytes: Annotated[int, Field(ge=1, le=10**18)]
    reserved_bytes: Bytes
    """Tensors with the allocator's fragmentation."""
    phase: Text
    terms: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeasurement:
    """Measurements of one rank; byte counts are `None` without an accelerator."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    rank: Annotated[int, Field(ge=0, le=10**6)]
    device: Text
    """The driver's name of the accelerator, or `cpu`."""
    peak_allocated_bytes: Bytes | None
    """Largest tensor bytes since the callback was created."""
    peak_reserved_bytes: Bytes | None
    """Largest bytes that the caching allocator held since then."""
    later_peak_allocated_bytes: Bytes | None
    """Largest tensor bytes after the first step; `None` also after one step or if the meter cannot reset its peak."""
    reserved_at_end_bytes: Bytes | None
    device_used_bytes: Bytes | None
    """Device memory in use at the end, by all processes."""
    device_bytes: Bytes | None
    steps: Annotated[int, Field(ge=0, le=10**12)]
    first_step_seconds: tuple[Seconds, ...]
    """The first steps one by one, which median and mean do not include."""
    median_step_seconds: Seconds | None
    """Median of the other steps; `None` if there were none."""
    mean_step_seconds: Seconds | None
    step_spread: Annotated[float, Field(ge=0, le=10**9)] | None = None
    """Range of the other steps without the fastest and the slowest tenth, divided by their median."""

    @property
    def outside_allocator_bytes(self) -> int | None:
        """Device memory in use outside this rank's allocator at the end."""
        if self.device_used_bytes is None or self.reserved_at_end_bytes is None:
            return None
        return max(0, self.device_used_bytes - self.reserved_at_end_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMeasurement:
    """Measurements of a training run with the prediction of its plan."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    schema_version: Literal[1] = 1
    plan: PlannedRun
    predicted: PredictedMemory
    measured: Annotated[tuple[RankMeasurement, ...], Field(min_length=1)]
    predicted_step_seconds: Annotated[float, Field(gt=0, le=10**9)] | None = None
    """Prediction of the plan without the correction of earlier runs; `None` in files of older versions."""
    differences: tuple[Text, ...] = ()
    """Settings in which the run differed from its plan, so that the two can hardly be compared."""
    versions: dict[str, str]

    @property
    def fullest(self) -> RankMeasurement:
        """The rank whose allocator held the most memory, else the first."""
        return max(self.measured, key=lambda rank: (rank.peak_reserved_bytes or 0, -rank.rank))

    @property
    def step_seconds(self) -> float | None:
        """Median step of the slowest rank; `None` if the run had only the first steps."""
        medians = [rank.median_step_seconds for rank in self.measured if rank.median_step_seconds is not None]
        return max(medians, default=None)


def planned_run(plan: Plan) -> PlannedRun:
    job = job_dict(plan.job)
    job["lora_targets"] = list(plan.job.lora_targets)
    job |= {second.role: second.spec.name for second in plan.job.second_models}
    return PlannedRun(
        model=plan.model.name,
        model_type=plan.model.model_type,
        architecture=plan.model.architecture,
        parameters=plan.model.parameter_count,
        gpu=plan.hardware.gpu,
        gpu_bytes=plan.hardware.gpu_bytes,
        world_size=plan.hardware.world_size,
        layout=layout_dict(plan.chosen.layout),
        job=job,
        flops_per_s=plan.hardware.flops_per_s,
    )


def predicted_memory(plan: Plan) -> PredictedMemory:
    gpu = plan.chosen.memory.gpu
    return PredictedMemory(
        peak_bytes=gpu.peak_bytes,
        low_bytes=gpu.low_bytes,
        high_bytes=gpu.high_bytes,
        allocated_bytes=gpu.allocated_bytes,
        reserved_bytes=gpu.allocated_bytes + gpu.terms.get("allocator_fragmentation", 0),
        phase=gpu.phase,
        terms=dict(gpu.terms),
    )


def measurement_text(measurement: RunMeasurement) -> str:
    return json.dumps(asdict(measurement), indent=2, ensure_ascii=False) + "\n"


def measurement_from_text(text: bytes, *, source: str) -> RunMeasurement:
    """Return the measurement that a run wrote, or raise `RefusedInputError`."""
    if len(text) > LARGEST_FILE_BYTES:
        raise RefusedInputError(ConfigError(where=source, rule=f"is over {LARGEST_FILE_BYTES} bytes"))
    try:
        data = strict_json(text)
    except ValueError as error:
        raise RefusedInputError(ConfigError(where=source, rule=f"is not valid JSON ({error})")) from None
    if not isinstance(data, dict) or "schema_version" not in data:
        fix = "pass the output directory of a run"
        raise RefusedInputError(ConfigError(where=source, rule="is not a measurement", fix=fix))
    version = data["schema_version"]
    if version != SCHEMA_VERSION or isinstance(version, bool):
        where, rule = f"{source}: schema_version", f"this version reads {SCHEMA_VERSION}"
        raise RefusedInputError(ConfigError(where=where, value=version, rule=rule, fix="measure the run again"))
    # Parts of the predicted step, which earlier versions wrote.
    data.pop("predicted_parts", None)
    try:
        measurement: RunMeasurement = TypeAdapter(RunMeasurement).validate_json(json.dumps(data))
    except ValidationError as error:
        errors = []
        for detail in error.errors()[:_MOST_ERRORS]:
            path = ".".join(str(part) for part in detail["loc"])
            where = f"{source}: {path}" if path else source
            value = None if detail["type"] == "missing" else detail["input"]
            errors.append(ConfigError(where=where, value=value, rule=str(detail["msg"]).lower()))
        raise RefusedInputError(errors) from None
    ranks = [rank.rank for rank in measurement.measured]
    if ranks != list(range(len(ranks))):
        raise RefusedInputError(
            ConfigError(where=f"{source}: measured", value=ranks, rule="must list each rank once, in order")
        )
    return measurement


def measured_run(measurement: RunMeasurement) -> MeasuredRun:
    """Return the run for the calibration of later plans; equal measurements have equal identifiers.

    Raises:
        UsageError: no accelerator was measured, or the run differed from its plan.
    """
    full = measurement.fullest
    reserved = [rank.peak_reserved_bytes for rank in measurement.measured if rank.peak_reserved_bytes is not None]
    allocated = [rank.peak_allocated_bytes for rank in measurement.measured if rank.peak_allocated_bytes is not None]
    if len(reserved) < len(measurement.measured) or len(allocated) < len(measurement.measured):
        rule = "has no memory peaks, because the ranks had no accelerator"
        fix = "calibrate with a run on GPUs, or with one of at least three steps by this version"
        raise UsageError(ConfigError(where="measurement", rule=rule, fix=fix))
    _refuse_differences(measurement)
    run = MeasuredRun(
        identifier=_identifier(measurement),
        gpu=measurement.plan.gpu,
        architecture=measurement.plan.architecture,
        model=measurement.plan.model,
        layout=str(measurement.plan.layout["label"]),
        ranks=len(measurement.measured),
        predicted_allocated_bytes=measurement.predicted.allocated_bytes,
        allocated_peak_bytes=max(allocated),
        reserved_peak_bytes=max(reserved),
        outside_allocator_bytes=full.outside_allocator_bytes,
        step_seconds=measurement.step_seconds,
    )
    check_ratio(run)
    return run


def measured_step(measurement: RunMeasurement) -> MeasuredStep | None:
    """Return the step time, which corrects later plans; `None` without a timed step or its prediction.

    Steps that generate correct none: decoding is slower or faster than predicted for other reasons than an update.

    Raises:
        UsageError: the run differed from its plan.
    """
    if measurement.step_seconds is None or measurement.predicted_step_seconds is None:
        return None
    if any(task.generates for task in TASKS.values() if task.name == measurement.plan.job.get("task")):
        return None
    _refuse_differences(measurement)
    return MeasuredStep(
        identifier=_identifier(measurement),
        gpu=measurement.plan.gpu,
        engine=str(measurement.plan.layout["engine"]),
        model=measurement.plan.model,
        layout=str(measurement.plan.layout["label"]),
        ranks=len(measurement.measured),
        predicted_seconds=measurement.predicted_step_seconds,
        measured_seconds=measurement.step_seconds,
        flops_per_s=measurement.plan.flops_per_s,
        release=measurement.versions.get("shardwright"),
    )


def _refuse_differences(measurement: RunMeasurement) -> None:
    if measurement.differences:
        fix = "run the plan unchanged, or plan with the settings of the run"
        raise UsageError([ConfigError(where="run", rule=difference, fix=fix) for difference in measurement.differences])


def _identifier(measurement: RunMeasurement) -> str:
    canonical = json.dumps(asdict(measurement), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def log_values(measurement: RunMeasurement) -> dict[str, float]:
    """Return flat numbers for experiment trackers, without those that were not measured."""
    full, predicted = measurement.fullest, measurement.predicted
    first = full.first_step_seconds
    values: dict[str, float | None] = {
        "plan/predicted_allocated_gb": predicted.allocated_bytes / 1e9,
        "plan/predicted_reserved_gb": predicted.reserved_bytes / 1e9,
        "plan/predicted_peak_gb": predicted.peak_bytes / 1e9,
        "plan/predicted_high_gb": predicted.high_bytes / 1e9,
        "plan/peak_allocated_gb": None if full.peak_allocated_bytes is None else full.peak_allocated_bytes / 1e9,
        "plan/peak_reserved_gb": None if full.peak_reserved_bytes is None else full.peak_reserved_bytes / 1e9,
        "plan/device_used_gb": None if full.device_used_bytes is None else full.device_used_bytes / 1e9,
        "plan/step_seconds": measurement.step_seconds,
        "plan/predicted_step_seconds": measurement.predicted_step_seconds,
        "plan/first_step_seconds": first[0] if first else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def report_lines(measurement: RunMeasurement) -> Iterator[str]:
    """Yield a table of predicted and measured memory, step times, and differences from the plan."""
    full, predicted = measurement.fullest, measurement.predicted
    fullest = f"rank {full.rank} of {len(measurement.measured)}, {printable(full.device)}"
    yield f"{'GB on the fullest rank':<32}{'predicted':>10}{'measured':>10}  ({fullest})"
    for name, expected, measured in (
        ("tensors (peak allocated)", predicted.allocated_bytes, full.peak_allocated_bytes),
        ("allocator (peak reserved)", predicted.reserved_bytes, full.peak_reserved_bytes),
        ("device (in use at the end)", predicted.peak_bytes, full.device_used_bytes),
    ):
        yield f"{name:<32}{gigabytes(expected):>10}{'-' if measured is None else gigabytes(measured):>10}"
    first = ", ".join(f"{seconds:.3g}" for seconds in full.first_step_seconds)
    typical = measurement.step_seconds
    later = "" if typical is None else f", then {typical:.3g} (median, slowest rank)"
    planned = measurement.predicted_step_seconds
    prediction = "" if planned is None else f"; {planned:.3g} predicted"
    yield f"seconds per step: {first or 'none'}{later}{prediction}"
    spread = max((rank.step_spread or 0.0 for rank in measurement.measured), default=0.0)
    if spread > _NOISY_SPREAD:
        yield f"step times vary by {100 * spread:.0f} % of the median: another job may use this machine"
    for difference in measurement.differences:
        yield f"differs from the plan: {printable(difference)}"


def printable(text: str) -> str:
    """Replace unprintable characters, with which a foreign file could control the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
