"""Layouts that no library runs today, weighed all the same so that a plan can say what it goes without."""

from __future__ import annotations

from ..memory.buffers import default_zero_options
from ..specs.strategy import Strategy
from .axis_levels import three_dimensional
from .fastest import WITHIN, Search, search_fastest
from .variants import Question, Variant, losses, variants

_MOST = 12
"""Layouts whose variants are searched, fastest first."""


def best_three_dimensional(question: Question, *, faster_than: float) -> tuple[Variant, str] | None:
    """Return the layout of tensor, pipeline and data parallelism that fits and is faster, and why it cannot run.

    `None` when none is faster than so many tokens per second by more than 1 %.
    """
    model, hardware, job = question.model, question.hardware, question.job
    zero = default_zero_options(model, job, stage=1)
    base = Strategy(engine="deepspeed", zero_stage=1, dp_shard=hardware.world_size, zero=zero)
    asked = losses(question)[:1]
    reasons: dict[int, str] = {}
    by_level: dict[int, list[Variant]] = {}
    for index, (strategy, why_not) in enumerate(three_dimensional(base, model, hardware, job)):
        found = [
            one
            for one in variants(strategy, asked, index, None, sizes_only=True)
            if WITHIN * one.tokens_per_second > faster_than
        ]
        if found:
            by_level[index] = sorted(found, key=lambda one: (-one.tokens_per_second, one.complexity))
            reasons[index] = why_not
    fastest = sorted(by_level, key=lambda index: -by_level[index][0].tokens_per_second)[:_MOST]
    if not fastest:
        return None
    best = search_fastest(Search(by_level=by_level, partial=job.gradient_checkpointing == "auto"), fastest)
    if best is None or WITHIN * best.tokens_per_second <= faster_than:
        return None
    return best, reasons[best.level]
