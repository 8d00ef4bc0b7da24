"""Predicted beside metered memory of preference and RL tasks, phase by phase: `python benchmarks/task_memory.py`.

Each case trains TRL's trainer on CPU ranks with the byte meter on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from memory_cases import metered_release
from memory_grid import Grid
from shardwright.ds_configs.memory.estimate import cpu_rank_terms
from task_memory_cases import Case, grid

TARGET_MEAN, TARGET_WORST = 0.03, 0.06
PHASES = {"generate": ("generate",), "score": ("score",), "update": ("loss", "backward"), "step": ("step",)}
"""Phases of a step, and those of a prediction that each contains."""
_METERED = {"update": ("forward", "loss", "backward")}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One phase of a case with its metered peak and its prediction."""

    case: Case
    phase: str
    metered_bytes: int
    predicted_bytes: int

    @property
    def error(self) -> float:
        """Relative error of the prediction, positive when it is too large."""
        return self.predicted_bytes / self.metered_bytes - 1


def rows(records: Iterable[dict[str, object]]) -> list[Row]:
    """Predict every phase of every measured case."""
    found = []
    for record in records:
        case = Case(**record["case"])  # type: ignore[arg-type]
        peaks: dict[str, int] = record["peaks"]  # type: ignore[assignment]
        terms = cpu_rank_terms(case.full_layout(), case.spec(metered_release(record)), case.job())
        for phase, parts in PHASES.items():
            metered = max((peaks.get(name, 0) for name in _METERED.get(phase, parts)), default=0)
            predicted = max((sum(terms[name].values()) for name in parts if name in terms), default=0)
            if metered and predicted:
                found.append(Row(case=case, phase=phase, metered_bytes=metered, predicted_bytes=predicted))
    return found


def table(found: Sequence[Row]) -> str:
    """Return one markdown line for each case with its phases."""
    lines = ["| case | generate | score | update | step |", "|---|---|---|---|---|"]
    for case in dict.fromkeys(row.case for row in found):
        own = {row.phase: row for row in found if row.case == case}
        cells = [
            f"{own[phase].predicted_bytes / 1e6:.1f} / {own[phase].metered_bytes / 1e6:.1f} ({own[phase].error:+.1%})"
            if phase in own
            else ""
            for phase in PHASES
        ]
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(found: Sequence[Row]) -> tuple[bool, str]:
    """Return whether the targets are met, and a sentence with the figures."""
    errors = [abs(row.error) for row in found]
    worst = max(found, key=lambda row: abs(row.error))
    passed = mean(errors) <= TARGET_MEAN and max(errors) <= TARGET_WORST
    return passed, (
        f"{len(found)} phases of {len({row.case for row in found})} cases: mean error {mean(errors):.2%} (target "
        f"{TARGET_MEAN:.0%}), worst {max(errors):.2%} (target {TARGET_WORST:.0%}; {worst.case.name}, {worst.phase})"
    )


GRID = Grid(
    name="task_memory",
    document=Path(__file__).parents[1] / "docs" / "measurements" / "tasks.md",
    cases=grid,
    case_of=Case,
    worker_file="task_memory_worker.py",
    rows=rows,
    tables=lambda found: {"cases": table(found)},
    verdict=verdict,
)

if __name__ == "__main__":
    sys.exit(GRID.main(__doc__))
