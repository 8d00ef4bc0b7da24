"""Random combinations, and verdicts on their runs."""

from __future__ import annotations

import random
from typing import Any

from equivalence.combinations import ALL_LAYOUTS, METHODS, OPTIMIZERS, SWITCHES, Combination


def outcome(combination: Combination, record: dict[str, Any], reference: dict[str, Any]) -> tuple[str, str]:
    """Return `equal`, `refused`, `late` (refused after a step), `off` or `broken`, and what to say about it."""
    if "refused" in record:
        return ("late" if record["steps"] else "refused"), record["refused"]
    if "error" in record:
        return "broken", record["error"]
    if "losses" not in reference:
        return "broken", f"the reference: {reference}"
    pairs = zip(record["losses"], reference["losses"], strict=True)
    difference = max(abs(own - expected) for own, expected in pairs)
    return ("equal" if difference <= combination.tolerance else "off"), f"{difference:.1e}"


def drawn(count: int, seed: int) -> list[Combination]:
    draw = random.Random(seed)
    layouts = [name for name in ALL_LAYOUTS if not name.startswith("single-")]
    found: dict[str, Combination] = {}
    while len(found) < count:
        groups = (METHODS, SWITCHES, OPTIMIZERS)
        settings = tuple(draw.choice(group) for group in groups if draw.random() < 0.5) or (draw.choice(METHODS),)
        combination = Combination(layout=draw.choice(layouts), settings=settings, accumulation=draw.choice((1, 2)))
        # Rounded inputs turn the last bit into whole codes, and have a test of their own.
        if not (combination.is_proven and {"qat_inputs", "qat_ranges"} & set(settings)):
            found[combination.name] = combination
    return list(found.values())


def verdict(combination: Combination, found: str) -> bool:
    """Return whether an outcome agrees with the table.

    What it rejects must be rejected before the first step. What it proves must be equal, unless several settings reject
    one another.
    """
    if not combination.is_proven:
        return found == "refused"
    return found == "equal" or (found == "refused" and len(combination.settings) > 1)
