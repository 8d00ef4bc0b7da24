"""Settings of `shardwright distill` and their checks, and the job of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ...ds_configs.specs.errors import ConfigError
from ...ds_configs.specs.job import TeacherFields, adapter_errors
from ...ds_configs.specs.settings import Settings
from ..losses.token_objective import Divergence
from ..runs.settings import LaunchedJob, LaunchedSettings, launched_errors

if TYPE_CHECKING:
    from .config import DistillationConfig


class ObjectiveSettings(Settings, TeacherFields):
    """Objective of a student: the distance to its teacher and the weight of the labels."""

    group = "Objective"
    own_options: ClassVar[frozenset[str]] = frozenset({"loss"})

    loss: Divergence = Field("forward_kl", description="Distance between teacher and student")
    mixture: float = Field(0.5, description="Teacher's weight in JSD")
    alpha: float = Field(0.5, description="Weight of the distance, 0 to 1; labels get 1 - alpha")
    temperature: float = Field(1.0, description="Softens both distributions")

    def distillation(self, vocab_size: int | None, **terms: Any) -> DistillationConfig:
        """Return the terms of the loss.

        Raises:
            UsageError: values out of range, all together.
        """
        from .config import DistillationConfig

        distance = {name: getattr(self, name) for name in ("alpha", "temperature", "mixture")}
        return DistillationConfig(**distance, divergence=self.loss, vocab_size=vocab_size, **terms)


class DistillSettings(ObjectiveSettings, LaunchedSettings):
    """Every setting of `shardwright distill`."""

    group = "Distillation"

    method: Literal["full", "lora"] = Field("full", description="Full training or LoRA")
    teacher_revision: str | None = Field(None, description="Branch, tag or commit of a Hub teacher")
    hidden_states: float = Field(0.0, ge=0, description="Weight of the hidden-state loss; 0: off")
    attention: float = Field(0.0, ge=0, description="Weight of the attention-relation loss; 0: off")
    teacher_cache: str | None = Field(
        None, description="Directory written by cache-teacher; no teacher runs during training"
    )

    def distillation(self, vocab_size: int | None, **terms: Any) -> DistillationConfig:
        """Return the terms of the loss, those of features included."""
        from .feature_matching import AttentionTerm, HiddenStateTerm

        if self.hidden_states:
            terms["hidden_states"] = HiddenStateTerm(weight=self.hidden_states)
        if self.attention:
            terms["attention"] = AttentionTerm(weight=self.attention)
        return super().distillation(vocab_size, **terms)


class DistillJob(LaunchedJob):
    """Job of every rank."""

    task: Literal["distill"] = "distill"
    settings: DistillSettings = Field(description="the user's settings")
    teacher: str = Field(description="Hub id or directory")
    student: str = Field(description="Hub id, directory or config.json")
    vocab_size: int = Field(description="tokens that both tokenizers have")


def distill_settings_errors(settings: DistillSettings) -> list[ConfigError]:
    """Return the errors that are known before any file is read."""
    placement, cache = settings.teacher_placement, settings.teacher_cache
    errors = launched_errors(settings) + adapter_errors(settings.stated(), settings.method)
    if placement == "cached" and cache is None:
        fix = "pass --teacher-cache with a directory written by cache-teacher"
        errors.append(ConfigError(where="teacher_placement", value="cached", rule="requires a cache", fix=fix))
    if cache is not None and placement not in ("auto", "cached"):
        rule = "must be auto or cached with --teacher-cache"
        errors.append(ConfigError(where="teacher_placement", value=placement, rule=rule, fix="remove one of them"))
    if cache is not None and not Path(cache).is_dir():
        errors.append(ConfigError(where="teacher_cache", value=cache, rule="must be an existing directory"))
    if settings.method == "lora" and settings.hidden_states:
        rule, fix = "trains projectors, which LoRA adapters cannot store", "use --method full"
        errors.append(ConfigError(where="hidden_states", value=settings.hidden_states, rule=rule, fix=fix))
    if placement == "cached" or cache is not None:
        live_terms = {name: getattr(settings, name) for name in ("hidden_states", "attention")}
        rule, fix = "requires a live teacher", "remove --teacher-cache"
        errors += [ConfigError(where=name, value=x, rule=rule, fix=fix) for name, x in live_terms.items() if x]
    return errors
