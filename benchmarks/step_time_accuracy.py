"""Predicted beside published step times: `python benchmarks/step_time_accuracy.py [--tables DIR] [--write]`.

Every figure leaves one model shape out: the constants are fitted without its rows, in any table, and then predict them.

The table with most rows is also predicted without all rows of its width and without any of its rows.

`--tables` names another directory with tables of the same columns. Their rows are predicted with the constants that
ship with the package, which have not seen them, and nothing is fitted.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from statistics import mean

from page_parts import with_part
from published_steps import HELD_OUT, TABLES, PublishedStep, published_steps
from shardwright.ds_configs.step_time.rates import constants_of
from step_time_fit import BOUNDS, FITTED, cases_of, fit, predictions, slopes_of

DOCUMENT = Path(__file__).parents[1] / "docs" / "measurements" / "step_time.md"
_SMALLEST_GROUP = 3
"""Configurations of a question from which on the best of them is a result."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well a model predicts a table."""

    rows: int
    mape: float
    worst: float
    groups: int
    """Questions with at least three configurations."""
    best_picked: int
    """Questions whose fastest configuration is predicted to be fastest."""
    mean_regret: float
    worst_regret: float


def score(cases: Sequence[PublishedStep], predicted: Sequence[float]) -> Score:
    """Return the errors of predictions, and what picking by them loses against the measured best."""
    errors = [abs(found / case.seconds - 1) for case, found in zip(cases, predicted, strict=True)]
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case, found in zip(cases, predicted, strict=True):
        if case.group:
            groups[case.group].append((found, case.seconds))
    questions = [rows for rows in groups.values() if len(rows) >= _SMALLEST_GROUP]
    regrets = [_picked_seconds(rows) / min(seconds for _, seconds in rows) - 1 for rows in questions]
    return Score(
        rows=len(cases),
        mape=mean(errors),
        worst=max(errors),
        groups=len(questions),
        best_picked=sum(regret < 1e-9 for regret in regrets),
        mean_regret=mean(regrets) if regrets else 0.0,
        worst_regret=max(regrets, default=0.0),
    )


def _picked_seconds(rows: Sequence[tuple[float, float]]) -> float:
    """Return the measured seconds of the configuration predicted to be fastest, the mean of those that tie."""
    best = min(found for found, _ in rows)
    return mean(seconds for found, seconds in rows if found <= best * (1 + 1e-6))


def physical(
    cases: Sequence[PublishedStep],
    key: Callable[[PublishedStep], str | int] = lambda case: case.shape,
    *,
    only: str = "",
    afresh: bool = False,
) -> list[float]:
    """Return predictions of the step-time model, the constants refitted without the rows of equal `key` in any table.

    `only` names the one table that is predicted by refitted constants. With `afresh`, the fit starts in the middle of
    the bounds instead of at the constants of all rows, so that nothing of the omitted rows remains.
    """
    found = dict(enumerate(predictions_as_shipped(cases)))
    for generation, (gpu, names) in FITTED.items():
        own, start, evaluations = cases_of(generation, cases), constants_of(gpu), 4
        if afresh:
            start, evaluations = replace(start, **{name: math.sqrt(math.prod(BOUNDS[name])) for name in names}), 25
        family = gpu.split("-")[0]
        predicted = [i for i, case in enumerate(cases) if case.hardware.gpu.startswith(family)]
        predicted = [i for i in predicted if cases[i].table not in HELD_OUT]
        predicted = [i for i in predicted if cases[i].table == (only or cases[i].table)]
        slopes = None if afresh else slopes_of(own, start, names)
        for value in sorted({key(cases[i]) for i in predicted}):
            # The constants of all rows are a good start, and few steps reach the new optimum from there.
            kept = [index for index, case in enumerate(own) if key(case) != value]
            constants = fit(
                [own[index] for index in kept],
                start,
                names,
                evaluations=evaluations,
                slopes=None if slopes is None else slopes[kept],
            )
            test = [i for i in predicted if key(cases[i]) == value]
            for index, seconds in zip(test, predictions([cases[i] for i in test], constants), strict=True):
                found[index] = float(seconds)
    return [found[index] for index in range(len(cases))]


LARGEST = "vTrain single node"
"""The table with four of five rows, which decides most about the constants of its generation."""

OMITTED: Mapping[str, Callable[[PublishedStep], str | int]] = {
    "shape": lambda case: case.shape,
    "width": lambda case: case.model.dimensions.hidden_size,
    "table": lambda case: case.table,
}
"""What the largest table is predicted without: the rows, in any table, of the predicted one's shape, hidden size or
table."""


def omitted_table(cases: Sequence[PublishedStep], without_shape: Sequence[float]) -> str:
    """Return the errors of the largest table by what is omitted from the fit, as Markdown."""
    lines = ["| fitted without its | rows | MAPE | worst | best picked | mean regret |", "|---|---|---|---|---|---|"]
    places = [index for index, case in enumerate(cases) if case.table == LARGEST]
    for name, key in OMITTED.items():
        predicted = without_shape if name == "shape" else physical(cases, key, only=LARGEST, afresh=True)
        found = score([cases[index] for index in places], [predicted[index] for index in places])
        picked = f"{found.best_picked} of {found.groups} | {found.mean_regret:.1%}"
        lines.append(f"| {name} | {found.rows} | {found.mape:.1%} | {found.worst:.0%} | {picked} |")
    return "\n".join(lines)


def predictions_as_shipped(cases: Iterable[PublishedStep]) -> list[float]:
    """Return predictions with the constants that ship with the package."""
    found = []
    for case in cases:
        found += [float(value) for value in predictions([case], constants_of(case.hardware.gpu))]
    return found


def document_table(cases: Sequence[PublishedStep], predicted: Sequence[float]) -> str:
    """Return the scores of each table as Markdown."""
    lines = [
        "| table | rows | MAPE | worst | best picked | mean regret | worst regret |",
        "|---|---|---|---|---|---|---|",
    ]
    for table in dict.fromkeys(case.table for case in cases):
        places = [index for index, case in enumerate(cases) if case.table == table]
        found = score([cases[index] for index in places], [predicted[index] for index in places])
        picked = f"{found.best_picked} of {found.groups} | {found.mean_regret:.1%} | {found.worst_regret:.0%}"
        rest = picked if found.groups else " | | "
        lines.append(f"| {table} | {found.rows} | {found.mape:.1%} | {found.worst:.0%} | {rest} |")
    return "\n".join(lines)


GAINS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Limits of the predicted gain of one configuration over another one of its question."""


def order_table(cases: Sequence[PublishedStep], predicted: Sequence[float]) -> str:
    """Return how often the configuration that is predicted to be faster was, by its predicted gain, as Markdown."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case, seconds in zip(cases, predicted, strict=True):
        if case.group:
            groups[case.table + case.group].append((seconds, case.seconds))
    pairs = [
        (slow[0] / fast[0] - 1, fast[1] < slow[1])
        for rows in groups.values()
        for fast, slow in combinations(sorted(rows), 2)
        if fast[0] < slow[0]
    ]
    lines = ["| predicted gain | pairs | was faster |", "|---|---|---|"]
    for low, high in pairwise(GAINS):
        faster = [was for gain, was in pairs if low <= gain < high]
        lines.append(f"| {low:.0%} to {high:.0%} | {len(faster)} | {mean(faster):.0%} |")
    return "\n".join(lines)


def main() -> None:
    """Print the scoreboard."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--write", action="store_true", help=f"store the tables in {DOCUMENT.name}")
    arguments = parser.parse_args()
    own = arguments.tables == TABLES
    cases = published_steps(arguments.tables)
    shipped = predictions_as_shipped(cases)
    predicted = physical(cases) if own else shipped
    parts = {"scores": document_table(cases, predicted)}
    if own:
        parts["omitted"] = omitted_table(cases, predicted)
        parts["order"] = order_table(cases, shipped)
    print(*parts.values(), sep="\n\n")
    if arguments.write and own:
        for name, table in parts.items():
            DOCUMENT.write_text(with_part(DOCUMENT.read_text(encoding="utf-8"), name, table), encoding="utf-8")


if __name__ == "__main__":
    main()
