"""The terms of a distillation loss; settings of `shardwright distill` and their checks, and the job of its ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from pydantic import Field

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.job import TeacherFields, adapter_errors
from ...ds_configs.specs.settings import Settings
from ...ds_configs.specs.synonyms import removals
from ..losses.token_objective import Divergence, TokenObjective
from ..runs.settings import LaunchedJob, LaunchedSettings, launched_errors

if TYPE_CHECKING:
    from .feature_matching import AttentionTerm, HiddenStateTerm

Implementation = Literal["auto", "fused", "plain"]


@dataclass(frozen=True, kw_only=True)
class SelfTeacher:
    """The student's own output, which teaches the output of an earlier layer."""

    exit_layer: int | None = None
    """Number of layers before the earlier exit; `None`: half of them."""


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(TokenObjective):
    """``(1 - α) · CE + α · τ² · D + w_h · hidden states + w_a · attention``, each the mean over all labelled tokens."""

    implementation: Implementation = "auto"
    """`fused` never holds the logits of all tokens, `plain` does; both give the same numbers. `auto`: fused if the
    model has an output head and no caller needs its logits."""
    hidden_states: HiddenStateTerm | None = None
    attention: AttentionTerm | None = None
    self_teacher: SelfTeacher | None = None
    """Use the student as its own teacher."""

    def __post_init__(self) -> None:
        """Raise a `UsageError` with all errors."""
        errors = []

        def check(where: str, value: object, holds: bool, rule: str, fix: str = "") -> None:
            if not holds:
                errors.append(ConfigError(where=where, value=value, rule=rule, fix=fix))

        check("alpha", self.alpha, 0 <= self.alpha <= 1, "must be from 0 to 1")
        check("temperature", self.temperature, 0 < self.temperature < math.inf, "must be above 0")
        kinds = get_args(Divergence)
        fix = removals().get(f"loss={self.divergence}", "")
        check("divergence", self.divergence, self.divergence in kinds, f"must be one of {', '.join(kinds)}", fix)
        rule = "must be above 0 and below 1; the ends are forward_kl and reverse_kl"
        check("mixture", self.mixture, 0 < self.mixture < 1, rule)
        check("vocab_size", self.vocab_size, self.vocab_size is None or self.vocab_size > 1, "must be at least 2")
        has_features = self.hidden_states is not None or self.attention is not None
        if self.self_teacher is not None:
            check("self_teacher", self.self_teacher, not has_features, "cannot be combined with feature terms")
            rule, fix = "self_teacher computes both exits in place of the head", "use fused with self_teacher"
            check("implementation", self.implementation, self.implementation != "plain", rule, fix)
        if errors:
            raise UsageError(errors)

    @property
    def objective(self) -> TokenObjective:
        return TokenObjective(**{field.name: getattr(self, field.name) for field in fields(TokenObjective)})

    @property
    def combined_settings(self) -> tuple[str, ...]:
        """Names of these settings in `legality/combinations.py`."""
        names = {
            "distillation": not self.is_plain_training,
            "distilled_features": self.hidden_states is not None,
            "distilled_attention": self.attention is not None,
        }
        return tuple(name for name, is_set in names.items() if is_set)

    @property
    def is_plain_training(self) -> bool:
        """Whether no term needs a teacher."""
        return self.alpha == 0 and self.hidden_states is None and self.attention is None


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
