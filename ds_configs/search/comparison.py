"""Layouts that were not taken, each at its best, for the table of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .fastest import Search, shortage
from .variants import Variant

_SHOWN_OF_AN_AXIS = 2
"""Sizes of one axis that were not taken and are shown."""

_MOST_TRIED_FOR_COMPARISON = 4
"""Variants of a slower layout whose memory is estimated to show it at its best."""


def for_comparison(found: Search, taken: Variant | None) -> list[Variant]:
    """Return every other layout at its best: the fastest of its variants that fits, else the one that needs least."""
    shown: list[Variant] = []
    best_of: dict[int, Variant] = {}
    for variant in found.fitting:
        known = best_of.get(variant.level)
        if known is None or variant.tokens_per_second > known.tokens_per_second:
            best_of[variant.level] = variant
    for level in found.by_level:
        if taken is not None and level == taken.level:
            continue
        if not found.possible(level):
            shown.append(found.leanest[level])
            continue
        known, timed = best_of.get(level), found.fastest_first(level)
        for variant in timed[:_MOST_TRIED_FOR_COMPARISON] if not timed[0].strategy.axes else ():
            if known is not None and variant.tokens_per_second <= known.tokens_per_second:
                break
            if found.fits(variant):
                known = variant
        shown.append(known or found.leanest[level])
    return sorted(shown, key=_speed_or_need)


def _speed_or_need(variant: Variant) -> tuple[bool, float, int]:
    fits = variant.memory.fits
    return not fits, -variant.tokens_per_second if fits else float(variant.memory.gpu.high_bytes), variant.level


def leanest_of_each(tried: list[Search]) -> list[Variant]:
    """Return of every layout the variant that needs least, where nothing fits."""
    best: dict[int, Variant] = {}
    for found in tried:
        for level in found.by_level:
            found.possible(level)
            variant = found.leanest[level]
            known = best.get(level)
            if known is None or _need(variant) < _need(known):
                best[level] = variant
    return sorted(best.values(), key=_speed_or_need)


def _need(variant: Variant) -> tuple[int, int]:
    return shortage(variant), variant.memory.gpu.high_bytes


def fewer_of_each_axis(found: Iterable[Variant]) -> list[Variant]:
    """Leave out all but the best layouts of each axis, which say enough; those without further axes all stay."""
    counts: Counter[frozenset[str]] = Counter()
    sizes: set[frozenset[tuple[str, int]]] = set()
    shown: list[Variant] = []
    for variant in found:
        axes = variant.strategy.axes
        key = frozenset(axes.items())
        if axes:
            if key in sizes or counts[frozenset(axes)] >= _SHOWN_OF_AN_AXIS:
                continue
            sizes.add(key)
            counts[frozenset(axes)] += 1
        shown.append(variant)
    return shown
