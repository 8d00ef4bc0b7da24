"""Predicted beside metered memory over a grid of real training runs: `python benchmarks/memory_accuracy.py [--write]`.

Each case trains through the Trainer on CPU ranks with the byte meter on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from memory_cases import VALUES, Case, grid, metered_release
from memory_grid import Grid, error_table, line, megabytes, total_line
from shardwright.ds_configs.memory.estimate import ALLOCATED_OVER_PREDICTED, cpu_rank_terms

TARGET_MEAN, TARGET_WORST = 0.03, 0.08


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case with its metered peak and its prediction."""

    case: Case
    metered_bytes: int
    metered_phase: str
    predicted_bytes: int

    @property
    def error(self) -> float:
        """Relative error of the prediction, positive when it is too large."""
        return self.predicted_bytes / self.metered_bytes - 1

    @property
    def interval(self) -> tuple[int, int]:
        """Bytes between which the prediction expects the peak."""
        low, _, high = ALLOCATED_OVER_PREDICTED
        return round(self.predicted_bytes * low), round(self.predicted_bytes * high)

    @property
    def held(self) -> bool:
        """Whether the interval holds the metered peak."""
        low, high = self.interval
        return low <= self.metered_bytes <= high


def rows(records: Iterable[dict[str, object]], case_of: type[Case] = Case) -> list[Row]:
    """Predict every measured case."""
    found = []
    for record in records:
        case = case_of(**record["case"])  # type: ignore[arg-type]
        peaks: dict[str, int] = record["peaks"]  # type: ignore[assignment]
        phases = {name: peak for name, peak in peaks.items() if name not in ("init", "other")}
        phase = max(phases, key=lambda name: phases[name])
        terms = cpu_rank_terms(case.full_layout(), case.spec(metered_release(record)), case.job())
        predicted = max(sum(terms[name].values()) for name in terms if name != "init")
        found.append(Row(case=case, metered_bytes=phases[phase], metered_phase=phase, predicted_bytes=predicted))
    return found


def case_table(found: Sequence[Row]) -> str:
    """Return one markdown line for each case."""
    lines = ["| case | metered MB | at its peak in | predicted MB | error | interval |", "|---|---|---|---|---|---|"]
    for row in found:
        metered, predicted, low, high = map(megabytes, (row.metered_bytes, row.predicted_bytes, *row.interval))
        interval = f"{low} to {high}{'' if row.held else ', missed'}"
        lines.append(line(row.case.name, metered, row.metered_phase, predicted, f"{row.error:+.1%}", interval))
    return "\n".join(lines)


def group_table(found: Sequence[Row]) -> str:
    """Return the errors of each value of each axis, and of all cases."""
    groups = {
        f"{name} {value}": [abs(row.error) for row in found if getattr(row.case, name) == value]
        for name, values in VALUES.items()
        for value in values
    }
    return error_table("group", groups) + "\n" + total_line([abs(row.error) for row in found])


def verdict(found: Sequence[Row]) -> tuple[bool, str]:
    """Return whether the targets are met, and a sentence with the figures."""
    errors = [abs(row.error) for row in found]
    missed = [row.case.name for row in found if not row.held]
    passed = mean(errors) <= TARGET_MEAN and max(errors) <= TARGET_WORST and not missed
    return passed, (
        f"{len(found)} cases: MAPE {mean(errors):.2%} (target {TARGET_MEAN:.0%}), worst {max(errors):.2%} "
        f"(target {TARGET_WORST:.0%}), interval holds {len(found) - len(missed)} of {len(found)}"
    )


GRID = Grid(
    name="memory_accuracy",
    document=Path(__file__).parents[1] / "docs" / "measurements" / "memory.md",
    cases=grid,
    case_of=Case,
    rows=rows,
    tables=lambda found: {"groups": group_table(found), "cases": case_table(found)},
    verdict=verdict,
)

if __name__ == "__main__":
    sys.exit(GRID.main(__doc__))
