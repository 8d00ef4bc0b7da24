"""`Candidate`, on which legality is judged, and the arithmetic that rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..specs.errors import Fault
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A strategy with everything that its legality depends on."""

    strategy: Strategy
    model: ModelSpec
    hardware: HardwareSpec
    job: TrainingJob


Rule = Callable[[Candidate], Fault | None]


def nearest_divisors(number: int, value: int) -> str:
    """Return the divisors of `number` on both sides of `value`, as text."""
    divisors = [candidate for candidate in range(1, min(number, 100_000) + 1) if number % candidate == 0]
    below = [d for d in divisors if d <= value][-1:]
    above = [d for d in divisors if d > value][:1]
    return ", ".join(map(str, below + above))


def nearest(legal: Iterable[int], value: int) -> str:
    """Return the legal values on both sides of `value`, as the way out of a fault.

    >>> nearest((1, 2, 4, 8), 3), nearest((1, 2, 4), 8)
    ('nearest legal values: 2, 4', 'nearest legal value: 4')
    """
    ordered = sorted(legal)
    found = [n for n in ordered if n <= value][-1:] + [n for n in ordered if n > value][:1]
    return f"nearest legal value{'s' if len(found) > 1 else ''}: {', '.join(map(str, found))}" if found else ""


def divides(where: str, value: int, number: int, what: str) -> Fault | None:
    """Return the fault of a `value` that does not divide `number`, with the nearest divisors."""
    if value >= 1 and number % value == 0:
        return None
    return Fault(
        where=where,
        value=value,
        rule=f"must divide {what} ({number} % {value} = {number % value if value else number})",
        fix=f"nearest legal values: {nearest_divisors(number, value)}",
    )


def one_of(where: str, value: object, legal: Iterable[object], rule: str, fix: str = "") -> Fault | None:
    """Return the fault of a `value` outside `legal`."""
    return None if value in tuple(legal) else Fault(where=where, value=value, rule=rule, fix=fix)
