"""Results of an evaluation, with the unit of every number in its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...ds_configs.plan.notebook import result_html
from ...plugins.lm_eval.tasks import TaskScore
from .estimates import Estimate
from .speed import Speed
from .stored_sizes import StoredSizes

SCHEMA_VERSION = 1
"""Version of `evaluate --format json` and of `evaluation.json`."""
KL_SHARES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9998, 0.9999, 1.0)
"""Shares of the judged tokens whose largest KL is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFacts:
    """Text that the models were judged on."""

    source: str
    """As the user named it."""
    seq_len_tokens: int
    """Longest window."""
    stride_tokens: int
    """From one window's start to the next."""
    windows: int
    """Windows that were read."""
    available_windows: int
    """Windows that the whole text has."""
    predicted_tokens: int
    """Tokens that were judged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelResult:
    """Measures of one model on its own."""

    name: str
    """Hub id or directory."""
    revision: str | None
    """Commit of a Hub model."""
    architecture: str
    """Class of the model."""
    quantization: str | None
    """Library whose format the weights have, with its format where it states one; `None` for plain weights."""
    dtype: str
    """Type that the model computes in."""
    loss_nats_per_token: Estimate
    """Mean cross-entropy."""
    perplexity: Estimate
    """Its exponential."""
    sizes: StoredSizes
    """The checkpoint."""
    speed: Speed | None
    """On this machine; `None` where it was not asked for."""
    tasks: tuple[TaskScore, ...]
    """Scores of the evaluation harness."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A model beside its baseline on the same tokens."""

    loss_difference_nats_per_token: Estimate
    """Cross-entropy of the model less that of the baseline; the error is that of the paired windows."""
    loss_difference_is_significant: bool | None
    """Whether it is more than two standard errors from 0; `None` with a single window."""
    kl_nats_per_token: Estimate
    """Mean KL(baseline | model)."""
    kl_nats_at_share: Mapping[str, float]
    """Largest KL of a token among the given share of them, lowest first; `1.0` is the largest of all."""
    top1_agreement: Estimate
    """Share of tokens for which both find the same next token most likely."""
    compared_vocabulary: int
    """Tokens that KL and agreement range over."""
    window_loss_differences_nats_per_token: tuple[float, ...]
    """The difference of each window."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Evaluation:
    """A model, and its baseline where one was given, on one text."""

    text: TextFacts
    """What was read."""
    model: ModelResult
    """The model."""
    baseline: ModelResult | None
    """What it is compared with."""
    comparison: Comparison | None
    """Both on the same tokens; `None` without a baseline."""
    window_losses_nats_per_token: tuple[float, ...]
    """The model's mean cross-entropy of each window."""
    settings: Mapping[str, Any]
    """Batch size, device and the like."""
    versions: Mapping[str, str]
    """Packages that computed this."""
    seconds: float
    """Wall-clock time of everything."""

    def __repr__(self) -> str:
        """Return the model and its perplexity, in one line."""
        beside = "" if self.baseline is None else f" beside {self.baseline.name}"
        return f"<Evaluation of {self.model.name}{beside}: perplexity {self.model.perplexity.value:.4g}>"

    def _repr_html_(self) -> str:
        """Return the evaluation as a notebook shows it."""
        from .report import rows, verdict

        compared = self.comparison is not None
        headings = ("", "model", "baseline", "difference") if compared else ("", "model")
        found = [(row.name, row.model, row.baseline, row.difference)[: len(headings)] for row in rows(self)]
        return result_html(self.model.name, headings, found, *([verdict(self)] if compared else []))

    def to_dict(self) -> dict[str, Any]:
        """Return the evaluation as JSON values."""
        return {"schema_version": SCHEMA_VERSION} | asdict(self)
