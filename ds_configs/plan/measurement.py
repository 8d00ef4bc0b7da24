"""`plan_measurement.json`: what a training run used, rank by rank, beside what its plan predicted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ..memory.calibration import MeasuredRun, check_ratio
from ..specs.errors import Fault, RefusedInputError, UsageError
from ..specs.json_text import strict_json
from ..specs.units import gigabytes
from .plan import Plan
from .plan_json import job_dict, strategy_dict

FILE_NAME = "plan_measurement.json"
SCHEMA_VERSION = 1
# Some hundred bytes a rank: 16 MiB hold tens of thousands of ranks, and no file from elsewhere fills the memory.
LARGEST_FILE_BYTES = 16 * 2**20
FIRST_STEPS = 2
"""Steps reported apart: kernels are built in the first, ZeRO-3 records its trace and prefetches from the second on."""

# A file of another schema breaks nearly every field; the first few tell as much.
_MOST_FAULTS = 20
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Bytes = Annotated[int, Field(ge=0, le=10**18)]
Count = Annotated[int, Field(ge=1, le=10**15)]
Seconds = Annotated[float, Field(ge=0, le=10**9)]
Text = Annotated[str, Field(min_length=1, max_length=4096)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """The facts of the plan that a measurement belongs to."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    model: Text
    """Hub id or directory."""
    model_type: Text
    """Family, such as `llama`."""
    architecture: Text
    """Model class, such as `LlamaForCausalLM`."""
    parameters: Count
    """All parameters of the model."""
    gpu: Text
    """Catalog name of the accelerator."""
    gpu_bytes: Bytes
    """Memory of one accelerator in the plan."""
    world_size: Count
    """Accelerators in the plan."""
    layout: Text
    """The strategy's label, such as `zero2`."""
    strategy: dict[str, Any]
    """The chosen strategy, as in `plan.json`."""
    job: dict[str, Any]
    """The job, as in `plan.json`, with a teacher's name for its specification."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedMemory:
    """Prediction of the plan for the fullest accelerator."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    peak_bytes: Bytes
    """Expected device memory with runtime, communicators and fragmentation."""
    low_bytes: Bytes
    """Lower end of its interval."""
    high_bytes: Bytes
    """Upper end of its interval."""
    allocated_bytes: Annotated[int, Field(ge=1, le=10**18)]
    """Tensors alone."""
    reserved_bytes: Bytes
    """Tensors with the allocator's fragmentation."""
    phase: Text
    """The phase of the peak."""
    terms: dict[str, int]
    """What makes up `peak_bytes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeasurement:
    """Use of one rank; byte counts are `None` where there is no accelerator."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    rank: Annotated[int, Field(ge=0, le=10**6)]
    """Rank in the whole job."""
    device: Text
    """The driver's name of the accelerator, or `cpu`."""
    peak_allocated_bytes: Bytes | None
    """Largest tensor bytes since the callback was made."""
    peak_reserved_bytes: Bytes | None
    """Largest bytes that the caching allocator held since then."""
    later_peak_allocated_bytes: Bytes | None
    """Largest tensor bytes after the first step; `None` also when there was one step or the meter cannot tell."""
    reserved_at_end_bytes: Bytes | None
    """Bytes that the caching allocator holds at the end."""
    device_used_bytes: Bytes | None
    """Device memory in use at the end, by all processes."""
    device_bytes: Bytes | None
    """Memory of the device."""
    steps: Annotated[int, Field(ge=0, le=10**12)]
    """Optimizer steps."""
    first_step_seconds: tuple[Seconds, ...]
    """The first steps, one by one, which the median and mean leave out."""
    median_step_seconds: Seconds | None
    """Median of the other steps; `None` when there were no others."""
    mean_step_seconds: Seconds | None
    """Mean of the other steps."""

    @property
    def outside_allocator_bytes(self) -> int | None:
        """Device memory in use beside this rank's allocator at the end."""
        if self.device_used_bytes is None or self.reserved_at_end_bytes is None:
            return None
        return max(0, self.device_used_bytes - self.reserved_at_end_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMeasurement:
    """A training run beside its plan."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    schema_version: Literal[1] = 1
    """Version of the file."""
    plan: PlannedRun
    """What was planned."""
    predicted: PredictedMemory
    """What the plan predicted."""
    measured: Annotated[tuple[RankMeasurement, ...], Field(min_length=1)]
    """What each rank used, by rank."""
    differences: tuple[Text, ...] = ()
    """Where the run did otherwise than planned, which makes the two hard to compare."""
    versions: dict[str, str]
    """Library versions that trained."""

    def _repr_html_(self) -> str:
        """Return predicted beside measured as a notebook shows it."""
        return f"<pre>{escape(chr(10).join(report_lines(self)))}</pre>"

    @property
    def fullest(self) -> RankMeasurement:
        """The rank whose allocator held most, else the first."""
        return max(self.measured, key=lambda rank: (rank.peak_reserved_bytes or 0, -rank.rank))

    @property
    def step_seconds(self) -> float | None:
        """Median step of the slowest rank; `None` when the first steps were all."""
        medians = [rank.median_step_seconds for rank in self.measured if rank.median_step_seconds is not None]
        return max(medians, default=None)


def planned_run(plan: Plan) -> PlannedRun:
    """Return the facts of a plan that its measurement repeats."""
    strategy = strategy_dict(plan.chosen.strategy)
    layout = strategy.pop("label")
    job = job_dict(plan.job)
    job["lora_targets"] = list(plan.job.lora_targets)
    if plan.job.teacher is not None:
        job["teacher"] = plan.job.teacher.name
    return PlannedRun(
        model=plan.model.name,
        model_type=plan.model.model_type,
        architecture=plan.model.architecture,
        parameters=plan.model.parameter_count,
        gpu=plan.hardware.gpu,
        gpu_bytes=plan.hardware.gpu_bytes,
        world_size=plan.hardware.world_size,
        layout=layout,
        strategy=strategy,
        job=job,
    )


def predicted_memory(plan: Plan) -> PredictedMemory:
    """Return what a plan predicts for its fullest accelerator."""
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
    """Return the text of `plan_measurement.json`."""
    return json.dumps(asdict(measurement), indent=2, ensure_ascii=False) + "\n"


def measurement_from_text(text: bytes, *, source: str) -> RunMeasurement:
    """Return the measurement that a run wrote.

    Raises:
        RefusedInputError: it is damaged, of another version, or holds values that no run has.
    """
    if len(text) > LARGEST_FILE_BYTES:
        raise RefusedInputError(Fault(where=source, rule=f"is over {LARGEST_FILE_BYTES} bytes"))
    try:
        data = strict_json(text)
    except ValueError as error:
        raise RefusedInputError(Fault(where=source, rule=f"is not valid JSON ({error})")) from None
    if not isinstance(data, dict) or "schema_version" not in data:
        fix = "give the output directory of a run with --plan"
        raise RefusedInputError(Fault(where=source, rule="is not a measurement", fix=fix))
    version = data["schema_version"]
    if version != SCHEMA_VERSION or isinstance(version, bool):
        where, rule = f"{source}: schema_version", f"this version reads {SCHEMA_VERSION}"
        raise RefusedInputError(Fault(where=where, value=version, rule=rule, fix="measure the run again"))
    try:
        measurement: RunMeasurement = TypeAdapter(RunMeasurement).validate_json(text)
    except ValidationError as error:
        raise RefusedInputError([_fault(detail, source) for detail in error.errors()[:_MOST_FAULTS]]) from None
    ranks = [rank.rank for rank in measurement.measured]
    if ranks != list(range(len(ranks))):
        raise RefusedInputError(
            Fault(where=f"{source}: measured", value=ranks, rule="must hold each rank once, in order")
        )
    return measurement


def _fault(detail: Any, source: str) -> Fault:
    place = ".".join(str(part) for part in detail["loc"])
    value = None if detail["type"] == "missing" else detail["input"]
    return Fault(where=f"{source}: {place}" if place else source, value=value, rule=str(detail["msg"]).lower())


def measured_run(measurement: RunMeasurement) -> MeasuredRun:
    """Return what planning can learn from a measurement; the same measurement always has the same identifier.

    Raises:
        UsageError: no accelerator was measured, or the run was not the planned one.
    """
    full = measurement.fullest
    reserved = [rank.peak_reserved_bytes for rank in measurement.measured if rank.peak_reserved_bytes is not None]
    allocated = [rank.peak_allocated_bytes for rank in measurement.measured if rank.peak_allocated_bytes is not None]
    if len(reserved) < len(measurement.measured) or len(allocated) < len(measurement.measured):
        rule = "has no peaks: the ranks had no accelerator, so there is nothing to calibrate with"
        raise UsageError(Fault(where="measurement", rule=rule, fix="give a run on GPUs"))
    if measurement.differences:
        fix = "run the plan as written, or plan what was run"
        raise UsageError([Fault(where="run", rule=difference, fix=fix) for difference in measurement.differences])
    canonical = json.dumps(asdict(measurement), sort_keys=True, separators=(",", ":"))
    run = MeasuredRun(
        identifier=hashlib.sha256(canonical.encode()).hexdigest(),
        gpu=measurement.plan.gpu,
        architecture=measurement.plan.architecture,
        model=measurement.plan.model,
        layout=measurement.plan.layout,
        ranks=len(measurement.measured),
        predicted_allocated_bytes=measurement.predicted.allocated_bytes,
        allocated_peak_bytes=max(allocated),
        reserved_peak_bytes=max(reserved),
        outside_allocator_bytes=full.outside_allocator_bytes,
        step_seconds=measurement.step_seconds,
    )
    check_ratio(run)
    return run


def log_values(measurement: RunMeasurement) -> dict[str, float]:
    """Return flat numbers for experiment trackers; what was not measured is left out."""
    full, predicted = measurement.fullest, measurement.predicted
    first = full.first_step_seconds
    values: dict[str, float | None] = {
        "plan/predicted_allocated_gb": predicted.allocated_bytes / 1e9,
        "plan/predicted_reserved_gb": predicted.reserved_bytes / 1e9,
        "plan/predicted_peak_gb": predicted.peak_bytes / 1e9,
        "plan/predicted_high_gb": predicted.high_bytes / 1e9,
        "plan/peak_allocated_gb": _giga(full.peak_allocated_bytes),
        "plan/peak_reserved_gb": _giga(full.peak_reserved_bytes),
        "plan/device_used_gb": _giga(full.device_used_bytes),
        "plan/step_seconds": measurement.step_seconds,
        "plan/first_step_seconds": first[0] if first else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _giga(count: int | None) -> float | None:
    return None if count is None else count / 1e9


def report_lines(measurement: RunMeasurement) -> Iterator[str]:
    """Yield predicted beside measured, for people."""
    full, predicted = measurement.fullest, measurement.predicted
    place = f"rank {full.rank} of {len(measurement.measured)}, {printable(full.device)}"
    yield f"{'GB on the fullest rank':<32}{'predicted':>10}{'measured':>10}  ({place})"
    for name, expected, found in (
        ("tensors (peak allocated)", predicted.allocated_bytes, full.peak_allocated_bytes),
        ("allocator (peak reserved)", predicted.reserved_bytes, full.peak_reserved_bytes),
        ("device (in use at the end)", predicted.peak_bytes, full.device_used_bytes),
    ):
        yield f"{name:<32}{gigabytes(expected):>10}{'-' if found is None else gigabytes(found):>10}"
    first = ", ".join(f"{seconds:.3g}" for seconds in full.first_step_seconds)
    typical = measurement.step_seconds
    later = f"then {typical:.3g} (median, slowest rank)" if typical is not None else "and no more"
    yield f"seconds of a step: {first or 'none'}, {later}; step time is not predicted yet"
    for difference in measurement.differences:
        yield f"not as planned: {printable(difference)}"


def printable(text: str) -> str:
    """Return `text` without what would steer a terminal, as a file from elsewhere may hold it."""
    return "".join(character if character.isprintable() else "?" for character in text)
