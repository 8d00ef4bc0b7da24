"""Settings of `shardwright qat` with their checks, and the job of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import Field

from ....ds_configs.specs.errors import ConfigError
from ....ds_configs.specs.job import adapter_errors
from ...losses.token_objective import Divergence
from ...runs.settings import LaunchedJob, LaunchedSettings, ObjectiveSettings, launched_errors
from ..rounding.config import QATOptions

if TYPE_CHECKING:
    from ...distillation.config import DistillationConfig

LabelLoss = Literal["eager", "chunked"]
"""How the loss of labels is computed without a teacher: from the logits of all tokens, or never storing them."""
SELF = "self"
"""Value of `teacher` for the model itself in full precision."""
TEACHERS_OWN = ("teacher_revision", "alpha", "temperature", "loss", "mixture")
"""Settings that require a teacher."""


class QATSettings(QATOptions, ObjectiveSettings, LaunchedSettings):
    """Every setting of `shardwright qat`."""

    group = "Quantization"

    method: Literal["full", "lora"] = Field("full", description="Full training or LoRA")
    loss: Literal[Divergence, LabelLoss] = Field(  # type: ignore[assignment]
        "forward_kl", description="Distance to the teacher; without one eager, or chunked for long sequences"
    )
    teacher: str | None = Field(
        None,
        description="Hub id or directory of a teacher, or self for the model in full precision. Default: none",
    )
    alpha: float = Field(1.0, description="Weight of the distillation loss, 0 to 1; the label loss gets the rest")


class QATJob(LaunchedJob):
    """Job of every rank."""

    task: Literal["qat"] = "qat"
    settings: QATSettings = Field(description="settings of the user")
    model: str = Field(description="Hub id or directory")
    source_directory: str = Field(description="local directory of the model's files")
    stored_dtype: str = Field(description="dtype of the checkpoint")
    teacher: str | None = Field(description="Hub id or directory; None without one")
    vocab_size: int | None = Field(description="tokens shared with the teacher")

    @property
    def teacher_revision(self) -> str | None:
        """Branch, tag or commit of the teacher; for `self` that of the model."""
        named = teacher_of(self.settings, self.model)
        return None if named is None else named[1]


def teacher_distance_config(settings: QATSettings, vocab_size: int | None) -> DistillationConfig:
    """Return the settings of the distillation loss.

    Raises:
        UsageError: values out of range, all together.
    """
    from ...distillation.config import DistillationConfig

    return DistillationConfig(
        alpha=settings.alpha,
        temperature=settings.temperature,
        divergence=settings.loss,  # type: ignore[arg-type]
        mixture=settings.mixture,
        vocab_size=vocab_size,
    )


def qat_settings_errors(settings: QATSettings) -> list[ConfigError]:
    """Return contradictions that can be found without reading files."""
    errors = launched_errors(settings) + adapter_errors(settings.stated(), settings.method)
    explicit = settings.model_fields_set
    if settings.teacher is None:
        fix = "add --teacher self, or omit it"
        errors += [
            ConfigError(where=name, value=getattr(settings, name), rule="requires a teacher", fix=fix)
            for name in (*TEACHERS_OWN, "teacher_placement")
            if name in explicit and getattr(settings, name) not in ("auto", *get_args(LabelLoss))
        ]
    elif settings.loss in get_args(LabelLoss):
        rule, fix = "is for training without a teacher; distances are always computed in chunks", "omit it"
        errors.append(ConfigError(where="loss", value=settings.loss, rule=rule, fix=fix))
    elif settings.teacher == SELF and settings.teacher_revision is not None:
        rule, fix = "must not be set with --teacher self", "use --revision"
        errors.append(ConfigError(where="teacher_revision", value=settings.teacher_revision, rule=rule, fix=fix))
    if settings.teacher_placement == "cached":
        rule, fix = "cached teacher outputs require `distill`", "use replica, sharded, offloaded or quantized"
        errors.append(ConfigError(where="teacher_placement", value="cached", rule=rule, fix=fix))
    return errors


def teacher_of(settings: QATSettings, model: str) -> tuple[str, str | None] | None:
    """Return the teacher and its revision; `None` without one."""
    if settings.teacher is None:
        return None
    if settings.teacher == SELF:
        return model, settings.revision
    is_model = Path(settings.teacher) == Path(model) and settings.teacher_revision == settings.revision
    return model if is_model else settings.teacher, settings.teacher_revision


def is_own_teacher(settings: QATSettings, model: str) -> bool:
    """Return whether the teacher is the model itself, at the same revision."""
    return teacher_of(settings, model) == (model, settings.revision)
