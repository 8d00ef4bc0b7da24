"""Teacher layers that student layers are matched with. Layer 0 is the embedding, layer l the output of block l."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...ds_configs.specs.errors import Fault, UsageError

LayerMapKind = Literal["uniform", "interpolate"]
LayerPairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class LayerMatch:
    """A student layer and the mean of teacher layers that it is compared with."""

    student: int
    """Number of the student's layer."""
    teacher: tuple[tuple[int, float], ...]
    """One or two teacher layers with their weights, which add up to 1."""


def layer_map(student_layers: int, teacher_layers: int, kind: LayerMapKind = "uniform") -> tuple[LayerMatch, ...]:
    """Match layers 0 to L_s of a student with layers of a teacher: embedding with embedding, last with last.

    ``uniform``: φ(l) = round(l · L_t / L_s), halves rounded up. ``interpolate``: the two teacher layers around
    l · L_t / L_s, weighted linearly.

    Raises:
        UsageError: a model without layers.
    """
    _check_depths(student_layers, teacher_layers)
    matches = []
    for student in range(student_layers + 1):
        position = student * teacher_layers
        if kind == "uniform":
            teacher: tuple[tuple[int, float], ...] = (((2 * position + student_layers) // (2 * student_layers), 1.0),)
        else:
            lower, remainder = divmod(position, student_layers)
            share = remainder / student_layers
            teacher = ((lower, 1.0),) if not remainder else ((lower, 1.0 - share), (lower + 1, share))
        matches.append(LayerMatch(student=student, teacher=teacher))
    return tuple(matches)


def paired_layers(
    pairs: Sequence[tuple[int, int]],
    student_layers: int,
    teacher_layers: int,
    *,
    first: int = 0,
    where: str = "layers",
) -> tuple[LayerMatch, ...]:
    """Match the layers that a user paired; `first` is 1 where the embedding has nothing to match.

    Raises:
        UsageError: layers that do not exist, all of them together.
    """
    _check_depths(student_layers, teacher_layers)
    faults = []
    for pair in pairs:
        for side, number, last in zip(("student", "teacher"), pair, (student_layers, teacher_layers), strict=True):
            if not first <= number <= last:
                faults.append(Fault(where=where, value=pair, rule=f"{side} layers are {first} to {last}"))
    if faults:
        raise UsageError(faults)
    return tuple(LayerMatch(student=student, teacher=((teacher, 1.0),)) for student, teacher in pairs)


def pair_faults(where: str, pairs: object) -> list[Fault]:
    """Return what is wrong with the form of explicit pairs."""
    rule = "pairs of (student layer, teacher layer), each pair once"
    if not isinstance(pairs, tuple) or not pairs:
        return [Fault(where=where, value=pairs, rule=rule)]
    wrong = [pair for pair in pairs if not _is_pair(pair)]
    if wrong:
        return [Fault(where=where, value=pair, rule=rule) for pair in wrong]
    return [Fault(where=where, value=pair, rule=rule) for pair in sorted({p for p in pairs if pairs.count(p) > 1})]


def _is_pair(pair: object) -> bool:
    return (
        isinstance(pair, tuple)
        and len(pair) == 2
        and all(isinstance(number, int) and not isinstance(number, bool) for number in pair)
    )


def _check_depths(student_layers: int, teacher_layers: int) -> None:
    depths = {"student": student_layers, "teacher": teacher_layers}
    faults = [
        Fault(where=f"layers of the {side}", value=depth, rule="at least 1 is needed to match layers")
        for side, depth in depths.items()
        if depth < 1
    ]
    if faults:
        raise UsageError(faults)
