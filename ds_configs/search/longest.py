"""The longest sequence that a model trains on, and what each mechanism adds to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..memory.estimate import EXPANDABLE_FROM_TOKENS
from ..specs.errors import UsageError
from ..specs.job import TrainingJob, job_errors
from ..specs.layout import Layout
from .candidates import Candidate, SearchContext, candidates, layouts_to_search

_ALIGNED_TOKENS = 256
"""Tokens of a rank's shard are a multiple of this, for products without partly filled tiles."""
_MOST_TOKENS = 100_000_000
_PRECISION = 1 / 512

_NOTHING: dict[str, Any] = {
    "gradient_checkpointing": "on",
    "loss": "eager",
    "tiled_mlp": "off",
    "offload_activations": "off",
    "offload": "none",
    "sequence_parallel_size": 1,
    "context_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "expert_parallel_size": 1,
}
_MECHANISMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gradient checkpointing", {}),
    ("tiled loss", {"loss": "chunked"}),
    ("sequence parallelism", {"sequence_parallel_size": None, "context_parallel_size": None}),
    ("tiled MLP", {"tiled_mlp": "on"}),
    ("layer inputs in host memory", {"offload_activations": "on"}),
    ("optimizer offload", {"offload": "cpu"}),
    ("parameter offload", {"offload": "cpu-all"}),
)
"""Each mechanism with the fields of the job that it changes; every step adds one to those before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestSequence:
    """The longest sequence that fits with a mechanism and those before it."""

    added: str
    """The mechanism that this step may use in addition to earlier ones."""
    tokens: int
    """0 if no sequence fits."""
    strategy: Layout | None = None
    loss: str = "eager"
    tokens_per_second: float = 0.0
    high_bytes: int = 0
    """Upper end of its memory on one accelerator."""
    host_bytes_per_node: int = 0
    limited_by: Literal["accelerator memory", "host memory", "rules"] = "accelerator memory"
    """What a longer sequence exceeds first."""


def longest_sequences(context: SearchContext) -> list[LongestSequence]:
    """Return the longest sequence of one sequence per data-parallel rank, for each mechanism added to those before it.

    Fields of the job that the user set keep their values. Memory decides as in plans, by the upper end of its interval.

    Raises:
        UsageError: the job is invalid.
    """
    job, usual = context.job, TrainingJob()
    if wrong := job_errors(job):
        raise UsageError(wrong)
    free = {name for name in _NOTHING if getattr(job, name) == getattr(usual, name)}
    fields = {name: value for name, value in _NOTHING.items() if name in free}
    best = LongestSequence(added="", tokens=0)
    steps = []
    for added, changes in _MECHANISMS:
        fields |= {name: value for name, value in changes.items() if name in free}
        for layout in layouts_to_search(context.model, context.hardware, replace(job, **fields)):
            best = _longer(replace(context, job=replace(job, **fields)), layout, best)
        steps.append(replace(best, added=added))
    return steps


def _longer(context: SearchContext, layout: Layout, best: LongestSequence) -> LongestSequence:
    """Return the longest sequence of a layout, or `best` if that is longer."""
    unit = _ALIGNED_TOKENS * layout.sp * layout.cp
    shortest = best.tokens // unit + 1
    starts = [shortest]
    if best.tokens < EXPANDABLE_FROM_TOKENS:
        # From here on the allocator wastes less, so that this length can fit where a shorter one does not.
        starts.insert(0, max(shortest, -(-EXPANDABLE_FROM_TOKENS // unit)))
    for low in starts:
        fitting = _fitting(context, layout, low * unit)
        if fitting is not None:
            break
    else:
        return best
    high = 2 * low
    while high * unit <= _MOST_TOKENS and (longer := _fitting(context, layout, high * unit)):
        low, high, fitting = high, 2 * high, longer
    while high - low > max(1, low * _PRECISION):
        middle = (low + high) // 2
        if longer := _fitting(context, layout, middle * unit):
            low, fitting = middle, longer
        else:
            high = middle
    host = fitting.memory.host
    return LongestSequence(
        added="",
        tokens=low * unit,
        strategy=fitting.strategy,
        loss=fitting.job.loss,
        tokens_per_second=fitting.time.tokens_per_second,
        high_bytes=fitting.memory.gpu.high_bytes,
        host_bytes_per_node=host.peak_bytes_per_node,
        limited_by=_limit(context, layout, high * unit),
    )


def _fitting(context: SearchContext, layout: Layout, tokens: int) -> Candidate | None:
    return next((candidate for candidate in _leanest(context, layout, tokens) if candidate.memory.fits), None)


def _leanest(context: SearchContext, layout: Layout, tokens: int) -> Iterator[Candidate]:
    """Yield the legal candidate with the smallest buffers; if the host is too small, one with fewer inputs there."""
    job = replace(context.job, seq_len_tokens=tokens, micro_batch_size=1, global_batch_size=layout.data_parallel_size)
    legal = list(candidates(layout, [replace(context, job=job)], 0, None))
    if legal:
        yield legal[-1]
        if legal[-1].strategy.offloaded_checkpoints and legal[-1].memory.gpu.fits:
            yield legal[-1].with_most_offloaded()


def _limit(
    context: SearchContext, layout: Layout, tokens: int
) -> Literal["accelerator memory", "host memory", "rules"]:
    longer = next(_leanest(context, layout, tokens), None)
    if longer is None:
        return "rules"
    return "host memory" if longer.memory.gpu.fits else "accelerator memory"
