"""`DistillationConfig`: the terms of a distillation loss and their weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, get_args

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.synonyms import REMOVED
from ..losses.token_objective import Divergence, TokenObjective

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
        fix = REMOVED.get(f"loss={self.divergence}", "")
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
        """The token loss."""
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
