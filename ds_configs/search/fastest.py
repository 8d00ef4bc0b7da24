"""The fastest variant that fits, best first: memory is estimated only for what could still be taken.

A layout is left out as a whole when its leanest variant does not fit. All variants of the others are timed, which is
arithmetic on a few numbers, and taken up in the order of their predicted tokens per second. A variant that fits only
with recomputation comes back with the fewest layers that make it fit, at the speed that it then has; until that is
known it stands at the speed of one recomputed layer, which no count of layers exceeds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil

from .variants import Variant

WITHIN = 0.99
"""Share of the best speed at which a simpler layout is taken."""

_Entry = tuple[float, tuple[int, int, bool, bool], int, str, Variant]


@dataclass(kw_only=True)
class Search:
    """Layouts that have been looked at."""

    by_level: dict[int, list[Variant]]
    """All variants of each layout."""
    partial: bool
    """Whether recomputing some of the layers may be tried."""
    fitting: list[Variant] = field(default_factory=list)
    """Variants whose memory was estimated and suffices."""
    leanest: dict[int, Variant] = field(default_factory=dict)
    """The variant of each layout that needs least."""
    estimated: int = 0
    """Variants whose memory was estimated."""
    _ordered: dict[int, list[Variant]] = field(default_factory=dict)

    def fastest_first(self, level: int) -> list[Variant]:
        """Return the variants of a layout by their speed, of equal ones the simplest first."""
        if level not in self._ordered:
            self._ordered[level] = sorted(self.by_level[level], key=_order)
        return self._ordered[level]

    def fits(self, variant: Variant) -> bool:
        """Whether a variant's memory suffices; remembered when it does."""
        self.estimated += "memory" not in variant.__dict__
        if variant.memory.fits and variant not in self.fitting:
            self.fitting.append(variant)
        return variant.memory.fits

    def possible(self, level: int) -> bool:
        """Whether the leanest variant of a layout fits: the smallest micro-batch with everything that saves memory."""
        if level not in self.leanest:
            self.leanest[level] = min(
                self._lean(level), key=lambda variant: (shortage(variant), variant.memory.gpu.high_bytes)
            )
        return self.fits(self.leanest[level])

    def _lean(self, level: int) -> list[Variant]:
        """The smallest micro-batch, and one without accumulation, which keeps whole gradients in some engines."""
        variants = self.by_level[level]
        recomputing = [one for one in variants if one.strategy.gradient_checkpointing] or variants
        chunked = [one for one in recomputing if one.job.loss == "chunked"] or recomputing
        tightest = [one for one in chunked if one.complexity[3]] or chunked
        size = min(one.strategy.micro_batch_size for one in tightest)
        found = [_first([one for one in tightest if one.strategy.micro_batch_size == size])]
        at_once = [one for one in tightest if one.strategy.gradient_accumulation_steps == 1]
        if at_once and found[0] not in at_once:
            found.append(_first(at_once))
        self.estimated += len(found)
        return found


def _first(variants: list[Variant]) -> Variant:
    """The fastest; a single one is not timed."""
    return variants[0] if len(variants) == 1 else min(variants, key=_order)


def _order(variant: Variant) -> tuple[float, tuple[int, int, bool, bool]]:
    return -variant.tokens_per_second, variant.complexity


def shortage(variant: Variant) -> int:
    """Bytes of host memory that a variant lacks on each node."""
    host = variant.memory.host
    return max(0, host.peak_bytes_per_node - host.capacity_bytes_per_node)


def search_fastest(found: Search, levels: Iterable[int]) -> Variant | None:
    """Return the simplest of the variants within 1 % of the fastest that fits; `None` when none does."""
    heap: list[_Entry] = []
    order = 0

    def push(variant: Variant, state: str, bound: float) -> None:
        nonlocal order
        order += 1
        heapq.heappush(heap, (-bound, variant.complexity, order, state, variant))

    for level in levels:
        # Nothing of a layout whose leanest variant does not fit needs to be timed.
        for variant in found.fastest_first(level) if found.possible(level) else ():
            push(variant, "whole", variant.tokens_per_second)
    best: float | None = None
    near: list[Variant] = []
    while heap:
        bound, _, _, state, variant = heapq.heappop(heap)
        if best is not None and -bound < WITHIN * best:
            break
        if state == "some layers":
            fewest = fewest_layers(found, variant)
            if fewest is not None:
                push(fewest, "known", fewest.tokens_per_second)
            continue
        if state == "known" or found.fits(variant):
            best = best or variant.tokens_per_second
            near.append(variant)
        elif found.partial and not variant.strategy.gradient_checkpointing:
            one = variant.with_recomputed(1)
            push(variant, "some layers", one.tokens_per_second)
    if best is None:
        return None
    return min(near, key=lambda variant: (variant.complexity, -variant.tokens_per_second))


def fewest_layers(found: Search, variant: Variant) -> Variant | None:
    """Return the variant that recomputes as few layers as make it fit; `None` where not even most of them do.

    All of them are a variant of their own.
    """
    layers = variant.question.model.dimensions.num_layers
    low, high = 0, -(-layers // variant.strategy.pp)
    everything = variant.with_recomputed(None)
    if not found.fits(everything):
        return None
    capacity = variant.memory.gpu.capacity_bytes
    most, least = variant.memory.gpu.high_bytes, everything.memory.gpu.high_bytes
    fitting: Variant | None = None
    while high - low > 1:
        # Memory falls almost evenly with each layer, so that interpolation lands beside the border.
        share = (most - capacity) / (most - least) if most > capacity >= least else 0.5
        middle = min(high - 1, max(low + 1, low + ceil(share * (high - low))))
        tried = variant.with_recomputed(middle)
        if found.fits(tried):
            high, fitting, least = middle, tried, tried.memory.gpu.high_bytes
        else:
            low, most = middle, tried.memory.gpu.high_bytes
    return fitting


def frontier(variants: Iterable[Variant]) -> list[Variant]:
    """Return the variants that no other one beats in both speed and memory, fastest first."""
    kept: list[Variant] = []
    ordered = sorted(variants, key=lambda one: (-one.tokens_per_second, one.memory.gpu.high_bytes, one.complexity))
    for variant in ordered:
        if not kept or variant.memory.gpu.high_bytes < kept[-1].memory.gpu.high_bytes:
            kept.append(variant)
    return kept
