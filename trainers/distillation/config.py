"""`DistillationConfig`: which terms a distillation adds up, with which weights, and how they change while it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ...ds_configs.specs.errors import Fault, UsageError
from ..losses.objective import Divergence, TokenObjective

if TYPE_CHECKING:
    from .feature_matching import AttentionTerm, HiddenStateTerm

Implementation = Literal["auto", "fused", "plain"]
SelfTeacherKind = Literal["frozen_copy", "ema", "adapter_off", "deeper_exit"]
CrossTokenizerKind = Literal["uld", "aligned"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A value that moves from `start` to `end` while training runs, and then stays."""

    start: float
    """Value at the first step."""
    end: float
    """Value from `until` on."""
    kind: Literal["linear", "cosine"] = "linear"
    """Straight, or half a cosine wave."""
    until: float = 1.0
    """Share of all steps after which `end` is reached, above 0 and at most 1."""

    def at(self, progress: float) -> float:
        """Return the value at a share of all steps from 0 to 1."""
        share = min(1.0, max(0.0, progress) / self.until)
        if self.kind == "cosine":
            share = (1.0 - math.cos(math.pi * share)) / 2.0
        return self.start + (self.end - self.start) * share

    def extremes(self) -> tuple[float, float]:
        """Return both ends; no value lies beyond them."""
        return self.start, self.end


@dataclass(frozen=True, kw_only=True)
class SelfTeacher:
    """A teacher made of the student itself."""

    kind: SelfTeacherKind
    """`frozen_copy` of the weights at the start, `ema` of the weights, the base model with its `adapter_off`, or the
    model's own output as the teacher of a `deeper_exit`: the output teaches an earlier layer's."""
    decay: float = 0.999
    """`ema`: the average keeps this share of itself at every optimizer step."""
    exit_layer: int | None = None
    """`deeper_exit`: number of layers before the exit that learns; `None`: half of them."""


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """Batches whose completions the student writes itself (GKD, arXiv 2306.13649)."""

    fraction: float = 1.0
    """Share of micro-batches that are generated, 0 to 1; the others keep the data's completions."""
    max_new_tokens: int = 128
    """Longest completion, in tokens."""
    prompt_tokens: int | None = None
    """Tokens of each sample that are the prompt; `None`: those before the first label."""
    temperature: float = 1.0
    """Sampling temperature; other than 1 is no longer the student's own distribution."""
    top_p: float = 1.0
    """Nucleus; below 1 is no longer the student's own distribution."""
    top_k: int = 0
    """Likeliest tokens to sample from; 0: all."""


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """``(1 - α) · CE + α · τ² · D + w_h · hidden states + w_a · attention``, each the mean over all labelled tokens."""

    alpha: float | Schedule = 0.5
    """α, 0 to 1."""
    temperature: float | Schedule = 1.0
    """τ, above 0."""
    divergence: Divergence = "forward_kl"
    """D between the softened distributions of teacher and student."""
    mixture: float = 0.5
    """JSD: the teacher's weight in the mixture; skewed divergences: λ."""
    implementation: Implementation = "auto"
    """`fused` never holds the logits of all tokens, `plain` does; both give the same numbers. `auto`: fused where the
    model has an output head and nothing asks for its logits."""
    vocab_size: int | None = None
    """Tokens that the tokenizer has; `None`: the narrower of both heads."""
    hidden_states: HiddenStateTerm | None = None
    """Matches hidden states."""
    attention: AttentionTerm | None = None
    """Matches attention."""
    self_teacher: SelfTeacher | None = None
    """Takes the student itself for a teacher."""
    on_policy: OnPolicy | None = None
    """Lets the student write completions."""
    cross_tokenizer: CrossTokenizerKind | None = None
    """How distributions over different vocabularies are compared; the batches come from `CrossTokenizerCollator`."""
    telemetry: bool = True
    """Logs KL, agreement, overlap and both cross-entropies."""

    def __post_init__(self) -> None:
        """Check all values together.

        Raises:
            UsageError: all faults.
        """
        faults = _range_faults(self) + _combination_faults(self)
        if faults:
            raise UsageError(faults)

    def objective(self, progress: float) -> TokenObjective:
        """Return the token loss at a share of all steps from 0 to 1."""
        return TokenObjective(
            alpha=_at(self.alpha, progress),
            temperature=_at(self.temperature, progress),
            divergence=self.divergence,
            mixture=self.mixture,
            vocab_size=self.vocab_size,
        )

    @property
    def combined_settings(self) -> tuple[str, ...]:
        """Its rows in the table of combinations."""
        names = {
            "distillation": not self.is_plain_training,
            "distilled_features": self.hidden_states is not None,
            "distilled_attention": self.attention is not None,
            "on_policy": self.on_policy is not None,
            "moving_average_teacher": self.self_teacher is not None and self.self_teacher.kind == "ema",
        }
        return tuple(name for name, is_set in names.items() if is_set)

    @property
    def is_plain_training(self) -> bool:
        """Whether no term needs a teacher, so that this is ordinary training."""
        return self.alpha == 0 and self.hidden_states is None and self.attention is None and self.on_policy is None


def _at(value: float | Schedule, progress: float) -> float:
    return value.at(progress) if isinstance(value, Schedule) else value


def _ends(value: float | Schedule) -> tuple[float, ...]:
    return value.extremes() if isinstance(value, Schedule) else (value,)


def _range_faults(config: DistillationConfig) -> list[Fault]:
    faults = []

    def check(where: str, value: object, holds: bool, rule: str) -> None:
        if not holds:
            faults.append(Fault(where=where, value=value, rule=rule))

    for end in _ends(config.alpha):
        check("alpha", end, 0 <= end <= 1, "from 0 to 1")
    for end in _ends(config.temperature):
        check("temperature", end, 0 < end < math.inf, "above 0")
    for name in ("alpha", "temperature"):
        value = getattr(config, name)
        if isinstance(value, Schedule):
            check(f"{name}.until", value.until, 0 < value.until <= 1, "above 0 and at most 1")
    allowed = get_args(Divergence)
    check("divergence", config.divergence, config.divergence in allowed, f"one of {', '.join(allowed)}")
    inside = 0 < config.mixture < 1
    if config.divergence == "jsd":
        check("mixture", config.mixture, inside, "above 0 and below 1; the ends are forward_kl and reverse_kl")
    check("mixture", config.mixture, 0 <= config.mixture <= 1, "from 0 to 1")
    check("vocab_size", config.vocab_size, config.vocab_size is None or config.vocab_size > 1, "at least 2 tokens")
    if config.self_teacher is not None:
        check("self_teacher.decay", config.self_teacher.decay, 0 <= config.self_teacher.decay < 1, "0 to below 1")
    if config.on_policy is not None:
        check("on_policy.fraction", config.on_policy.fraction, 0 <= config.on_policy.fraction <= 1, "from 0 to 1")
        tokens = config.on_policy.max_new_tokens
        check("on_policy.max_new_tokens", tokens, tokens >= 1, "at least 1")
        check("on_policy.temperature", config.on_policy.temperature, config.on_policy.temperature > 0, "above 0")
    return faults


def _combination_faults(config: DistillationConfig) -> list[Fault]:
    faults = []
    features = config.hidden_states is not None or config.attention is not None
    kind = config.self_teacher.kind if config.self_teacher else None
    if config.cross_tokenizer is not None:
        rule = "compares whole distributions of both models"
        if features:
            faults.append(Fault(where="cross_tokenizer", rule="tokens differ, so layers cannot be matched by position"))
        if config.implementation == "fused":
            faults.append(Fault(where="implementation", value="fused", rule=rule, fix="use plain with cross_tokenizer"))
        if config.on_policy is not None:
            faults.append(Fault(where="on_policy", rule="cannot be combined with cross_tokenizer"))
    if kind == "deeper_exit":
        if features:
            faults.append(Fault(where="self_teacher", value=kind, rule="cannot be combined with feature terms"))
        if config.implementation == "plain":
            rule = "computes both exits in place of the head"
            faults.append(Fault(where="implementation", value="plain", rule=rule, fix="use fused with deeper_exit"))
    elif config.self_teacher is not None and config.self_teacher.exit_layer is not None:
        faults.append(Fault(where="self_teacher.exit_layer", rule="belongs to deeper_exit"))
    return faults
