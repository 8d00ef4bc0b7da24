"""Settings of `shardwright qat`, and the file through which its ranks learn them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ....ds_configs.quantization.combinations import changed
from ....ds_configs.quantization.recipe import SchemeSettings
from ....ds_configs.quantization.scheme import scheme_named
from ....ds_configs.specs.errors import Fault, UsageError
from ....ds_configs.specs.settings import JoinedNames, adapter_faults
from ...runs.settings import LaunchedJob, LaunchedSettings, ObjectiveSettings, launched_faults
from ..rounding.config import BitSchedule, InputRanges, KvCacheNumbers, LoraMode, QATConfig
from ..rounding.rounding import WeightRule

if TYPE_CHECKING:
    from ...distillation.config import DistillationConfig

SELF = "self"
"""Names the model in full precision as its own teacher."""
RANGES_FILE = "input_ranges.safetensors"
TEACHERS_OWN = ("teacher_revision", "alpha", "temperature", "loss", "mixture")
"""Settings that mean nothing without a teacher."""


class QATSettings(SchemeSettings, ObjectiveSettings, LaunchedSettings):
    """Every setting of `shardwright qat`."""

    group = "Quantization"

    method: Literal["full", "lora"] = Field("full", description="Full training or LoRA")
    weight_rule: WeightRule = Field(
        "minmax",
        description="Where scales of weights come from: their own range, training (LSQ), or mean magnitudes with three "
        "or two values",
    )
    ranges: InputRanges = Field(
        "calibrated",
        description="Where stored ranges of activations come from: a pass before training, observers during it, or "
        "learning",
    )
    calibration_samples: int = Field(128, ge=1, description="Training samples that calibrated ranges are found on")
    start_step: int = Field(0, ge=0, description="Optimizer steps in full precision before numbers are rounded")
    freeze_step: int | None = Field(
        None, ge=1, description="Optimizer step from which observed ranges stay. Default: never"
    )
    bit_schedule: JoinedNames | None = Field(
        None,
        description="STEP:BITS pairs such as 0:8,100:4; the last are the scheme's. Default: these from the start",
    )
    lora: LoraMode = Field(
        "merged",
        description="With method lora: round weight and adapter as one and merge them, or the frozen weight alone",
    )
    kv_cache: KvCacheNumbers | None = Field(
        None, description="Train with rounded keys and values too, and store their ranges"
    )
    teacher: str | None = Field(
        None,
        description="Hub id or directory to learn from, or self for the model in full precision. Default: none, labels "
        "alone",
    )
    alpha: float = Field(1.0, description="Weight of the distance to the teacher, 0 to 1; the labels have the rest")


class QATJob(LaunchedJob):
    """Job of every rank, as it stands in `job.json`."""

    settings: QATSettings = Field(description="what the user asked for")
    model: str = Field(description="Hub id or directory")
    source_directory: str = Field(description="where the model's files lie on this machine")
    stored_dtype: str = Field(description="type of the checkpoint")
    teacher: str | None = Field(description="Hub id or directory; None without one")
    vocab_size: int | None = Field(description="tokens that the tokenizer has")
    calibrated: bool = Field(description="whether ranges lie beside this file")

    @property
    def teacher_revision(self) -> str | None:
        """Branch, tag or commit that a Hub teacher is loaded from: of `self` that of the model."""
        named = teacher_of(self.settings, self.model)
        return None if named is None else named[1]


def qat_config(settings: QATSettings, *, stored_dtype: str | None = None) -> QATConfig:
    """Return the numbers that the settings ask for.

    Args:
        settings: What the user asked for.
        stored_dtype: Type of the checkpoint.

    Raises:
        UsageError: they contradict one another; all faults at once.
    """
    faults: list[Fault] = []
    schedule = _bit_schedule(settings.bit_schedule, faults)
    try:
        scheme = changed(
            scheme_named(settings.scheme),
            group_size=settings.group_size,
            symmetric=settings.symmetric,
            ignore=settings.ignore,
            targets=settings.targets,
        )
    except UsageError as error:
        raise UsageError([*faults, *error.faults]) from None
    found = QATConfig(
        scheme=scheme,
        weight_rule=settings.weight_rule,
        ranges=settings.ranges,
        start_step=settings.start_step,
        freeze_step=settings.freeze_step,
        bit_schedule=schedule,
        lora=settings.lora,
        kv_cache=settings.kv_cache,
        stored_dtype=stored_dtype,
    )
    faults += found.faults()
    if faults:
        raise UsageError(faults)
    return found


def callback_options(config: QATConfig) -> dict[str, Any]:
    """Return a configuration as `QATCallback` takes it."""
    return {name: getattr(config, name) for name in QATConfig.__dataclass_fields__}


def teacher_distance_config(settings: QATSettings, vocab_size: int | None) -> DistillationConfig:
    """Return how the distance to a teacher is measured.

    Raises:
        UsageError: all values out of range.
    """
    from ...distillation.config import DistillationConfig

    return DistillationConfig(
        alpha=settings.alpha,
        temperature=settings.temperature,
        divergence=settings.loss,
        mixture=settings.mixture,
        vocab_size=vocab_size,
    )


def qat_settings_faults(settings: QATSettings) -> list[Fault]:
    """Return what does not go together before anything is read."""
    faults = launched_faults(settings) + adapter_faults(settings.stated(), settings.method)
    given = settings.model_fields_set
    if settings.teacher is None:
        fix = "add --teacher self, or drop it"
        faults += [
            Fault(where=name, value=getattr(settings, name), rule="belongs to a teacher", fix=fix)
            for name in (*TEACHERS_OWN, "teacher_placement")
            if name in given and getattr(settings, name) != "auto"
        ]
    elif settings.teacher == SELF and settings.teacher_revision is not None:
        rule, fix = "a model that is its own teacher has one revision", "use --revision"
        faults.append(Fault(where="teacher_revision", value=settings.teacher_revision, rule=rule, fix=fix))
    if settings.teacher_placement == "cached":
        rule, fix = "answers of a cached teacher are for `distill`", "use replica, sharded, offloaded or quantized"
        faults.append(Fault(where="teacher_placement", value="cached", rule=rule, fix=fix))
    if "lora" in given and settings.method != "lora":
        rule, fix = "needs adapters", "add --method lora, or drop it"
        faults.append(Fault(where="lora", value=settings.lora, rule=rule, fix=fix))
    return faults


def calibration_faults(settings: QATSettings, config: QATConfig) -> list[Fault]:
    """Return a fault where samples are named for a calibration that does not take place."""
    if "calibration_samples" not in settings.model_fields_set or (config.stores_ranges and not config.observes):
        return []
    rule = f"{config.scheme.name} stores no ranges" if not config.stores_ranges else "ranges are observed in training"
    fix = "use a scheme with stored ranges such as W8A8_STATIC, and ranges calibrated or learned, or drop it"
    value = settings.calibration_samples
    return [Fault(where="calibration_samples", value=value, rule=f"nothing is calibrated: {rule}", fix=fix)]


def teacher_of(settings: QATSettings, model: str) -> tuple[str, str | None] | None:
    """Return the teacher and its revision; `None` where labels alone are learned from."""
    if settings.teacher is None:
        return None
    if settings.teacher == SELF:
        return model, settings.revision
    is_model = Path(settings.teacher) == Path(model) and settings.teacher_revision == settings.revision
    return model if is_model else settings.teacher, settings.teacher_revision


def is_own_teacher(settings: QATSettings, model: str) -> bool:
    """Tell whether the teacher is the model in full precision, at the revision that is trained."""
    return teacher_of(settings, model) == (model, settings.revision)


def _bit_schedule(text: str | None, faults: list[Fault]) -> BitSchedule:
    if text is None:
        return ()
    found = []
    for part in text.split(","):
        step, colon, bits = part.partition(":")
        if not (colon and step.strip().isdecimal() and bits.strip().isdecimal()):
            rule = f"must be STEP:BITS pairs separated by commas, and {part.strip()!r} is none"
            faults.append(Fault(where="bit_schedule", value=text, rule=rule, fix="such as 0:8,100:4"))
            return ()
        found.append((int(step), int(bits)))
    return tuple(found)
