"""Runs combinations in as few forks as their ranks allow, and says of each what came of it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from equivalence.combinations import ALL_LAYOUTS, METHODS, OPTIMIZERS, SWITCHES, Combination
from warm_ranks import RanksFailedError, run_ranks

_WORKER = Path(__file__).with_name("drawn_worker.py")
_SECONDS_OF_A_RUN = 60.0


def records_of(combinations: Iterable[Any], directory: Path, *, worker: Path = _WORKER) -> dict[str, dict[str, Any]]:
    """Train combinations and return their records by name; one that ends its ranks ends no other.

    Args:
        combinations: Dataclasses with a `name` and a `strategy`.
        directory: Where ranks put their records.
        worker: What trains them on every rank.
    """
    found: dict[str, dict[str, Any]] = {}
    by_ranks: dict[int, list[Any]] = {}
    for combination in dict.fromkeys(combinations):
        by_ranks.setdefault(combination.strategy.world_size, []).append(combination)
    for ranks, waiting in by_ranks.items():
        while waiting:
            found |= _attempt(waiting, ranks, directory, worker)
            waiting = [one for one in waiting if one.name not in found]
    return found


def _attempt(combinations: Sequence[Any], ranks: int, directory: Path, worker: Path) -> dict[str, dict[str, Any]]:
    asked = json.dumps([asdict(one) for one in combinations])
    failure = ""
    try:
        timeout = 30 + _SECONDS_OF_A_RUN * len(combinations)
        run_ranks([worker, directory, asked], ranks=ranks, timeout_seconds=min(timeout, 600))
    except RanksFailedError as error:
        failure = str(error)
    found: dict[str, dict[str, Any]] = {}
    for combination in combinations:
        files = [directory / f"{combination.name}.{rank}.json" for rank in range(ranks)]
        records = [json.loads(file.read_text()) for file in files if file.is_file()]
        wrong = next((record for record in records if "error" in record), None)
        if wrong is not None or len(records) < ranks:
            found[combination.name] = wrong or {"error": failure or "no record"}
            break
        found[combination.name] = records[0]
    return found


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
        if _is_judged(combination):
            found[combination.name] = combination
    return list(found.values())


def _is_judged(combination: Combination) -> bool:
    """Whether losses tell: rounded inputs turn the last bit into whole codes, and have a test of their own."""
    return not combination.is_proven or not {"qat_inputs", "qat_ranges"} & set(combination.settings)


def verdict(combination: Combination, found: str) -> bool:
    """Return whether an outcome agrees with the table.

    What it rejects must be rejected before the first step. What it proves must be equal, unless several settings reject
    one another.
    """
    if not combination.is_proven:
        return found == "refused"
    return found == "equal" or (found == "refused" and len(combination.settings) > 1)
