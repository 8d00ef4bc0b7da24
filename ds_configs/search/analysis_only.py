"""Layouts that no library runs today, weighed all the same so that a plan can say what it goes without."""

from __future__ import annotations

from ..legality.candidate import Candidate
from ..legality.rules import batch_equation, sizes_are_positive, world_is_the_product
from ..memory.buffers import default_zero_options
from ..memory.estimate import MemoryEstimate
from ..specs.errors import Fault
from ..specs.strategy import Strategy
from ..step_time.step_cost import step_cost
from .axis_levels import three_dimensional
from .variants import Question, best_variant

_MOST = 12
"""Layouts whose memory is estimated, cheapest first."""


def best_three_dimensional(question: Question, *, lost_seconds: float) -> tuple[Strategy, MemoryEstimate, str] | None:
    """Return the layout of tensor, pipeline and data parallelism that fits and loses less, and why it cannot run.

    `None` when there is none that loses less than `lost_seconds` of a step.
    """
    model, hardware, job = question.model, question.hardware, question.job
    if lost_seconds <= 0:
        return None
    zero = default_zero_options(model, job, stage=1)
    base = Strategy(engine="deepspeed", zero_stage=1, dp_shard=hardware.world_size, zero=zero)
    costed = [
        (step_cost(strategy, model, hardware, job).lost_seconds, index, strategy, why_not)
        for index, (strategy, why_not) in enumerate(three_dimensional(base, model, hardware, job))
    ]
    cheaper = sorted(entry for entry in costed if entry[0] < lost_seconds)
    for _, _, strategy, why_not in cheaper[:_MOST]:
        found = best_variant(strategy, question, level=0, faults=[], judge=_sizes_only)
        # What loads such a model would decide about host memory.
        if found is not None and found.memory.gpu.fits:
            return found.strategy, found.memory, why_not
    return None


def _sizes_only(candidate: Candidate) -> tuple[Fault, ...]:
    found = (rule(candidate) for rule in (sizes_are_positive, world_is_the_product, batch_equation))
    return tuple(fault for fault in found if fault is not None)
