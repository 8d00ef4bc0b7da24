"""`--optimizer auto`: the smallest change of numerics with which a job fits, or is much faster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..specs.errors import UsageError
from ..specs.job import WeightsType
from .candidates import SearchContext
from .search import Outcome, search

FASTER = 1.2
"""How much faster an optimizer must be to replace one that fits; above the error of predicted step times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStep:
    """One optimizer in the order in which `auto` tries them."""

    optimizer: str
    weights_dtype: WeightsType = "fp32"
    optim_args: str = ""
    change: str
    """What it changes, compared with AdamW and fp32 weights."""
    only_to_fit: bool = False
    """Whether speed is no reason to select it."""

    @property
    def label(self) -> str:
        """The optimizer and the type of the weights, if they are not fp32."""
        return self.optimizer + (" with bf16 weights" if self.weights_dtype == "bf16" else "")


ORDER = (
    OptimizerStep(optimizer="adamw_torch_fused", change="nothing"),
    OptimizerStep(optimizer="adamw_8bit", change="moments are rounded to 8 bit, per block of 256"),
    OptimizerStep(optimizer="adamw_torch_8bit", change="moments are rounded to 8 bit, per block of 256"),
    OptimizerStep(optimizer="adafactor", change="no first moment, and second moments from rows and columns"),
    OptimizerStep(
        optimizer="adamw_torch_8bit",
        weights_dtype="bf16",
        optim_args="bf16_stochastic_round=true",
        change="moments are rounded to 8 bit and weights to bf16, stochastically",
    ),
    OptimizerStep(
        optimizer="adafactor",
        weights_dtype="bf16",
        change="second moments from rows and columns, and bf16 weights, which lose small updates",
        only_to_fit=True,
    ),
)
"""The same arithmetic first; then rounded moments, approximated moments, and rounded weights.

Paged optimizers are omitted: plans count their states on the accelerator, so they fit where unpaged ones do.
"""


def search_optimizers(context: SearchContext) -> Outcome:
    """Return the outcome of the first optimizer of `ORDER` that fits, or of a later one that is `FASTER`.

    If none fits, returns the outcome of the first, which changes nothing.

    Raises:
        UsageError: no layout is legal with AdamW.
    """
    chosen: tuple[OptimizerStep, Outcome, float] | None = None
    failed, causes, first = list[str](), list[str](), None
    for step in ORDER:
        if context.job.weights_dtype != "auto" and step.weights_dtype != context.job.weights_dtype:
            continue
        if chosen is not None and step.only_to_fit:
            break
        job = replace(
            context.job, optimizer=step.optimizer, weights_dtype=step.weights_dtype, optim_args=step.optim_args
        )
        try:
            outcome = search(replace(context, job=job))
        except UsageError:
            if first is None:
                raise
            continue
        first = first or outcome
        if outcome.chosen is None:
            failed.append(step.label)
            continue
        speed = outcome.chosen.time.tokens_per_second
        if chosen is None or speed >= FASTER * chosen[2]:
            causes = [f"{', '.join(failed)} {'does' if len(failed) == 1 else 'do'} not fit"] if failed else []
            causes += [f"it is {speed / chosen[2]:.1f} times as fast as {chosen[0].label}"] if chosen else []
            chosen = step, outcome, speed
    if chosen is None:
        assert first is not None, "a search returns an outcome or raises"
        return first
    step, outcome, _ = chosen
    cause = f", because {' and '.join(causes)}" if causes else ", which fits"
    assert outcome.chosen is not None, "chosen outcomes fit"
    reason = f"{outcome.chosen.reason} Optimizer {step.label}{cause}. Change of numerics: {step.change}."
    if step.change == "nothing":
        reason = f"{outcome.chosen.reason} Optimizer {step.label}{cause}: no change of numerics is needed."
    return replace(outcome, chosen=replace(outcome.chosen, reason=reason))
