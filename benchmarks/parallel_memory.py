"""Predicted beside metered memory of parallel layouts: `python benchmarks/parallel_memory.py [--write]`.

Each case trains with the package's trainers on CPU ranks with the byte meter on; the fullest rank counts, and of a
pipeline every stage.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from memory_cases import metered_release
from memory_grid import Grid
from parallel_memory_cases import LAYOUTS, Case, grid
from shardwright.ds_configs.memory.estimate import cpu_share_terms

TARGET_MEAN = 0.05


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, or one stage of a pipeline, with its metered peak and its prediction."""

    case: Case
    stage: int | None
    metered_bytes: int
    metered_phase: str
    predicted_bytes: int
    predicted_phase: str
    phases: dict[str, int]
    """Predicted bytes of each phase."""

    @property
    def name(self) -> str:
        return self.case.name if self.stage is None else f"{self.case.name}, stage {self.stage}"

    @property
    def error(self) -> float:
        """Relative error of the prediction, positive when it is too large."""
        return self.predicted_bytes / self.metered_bytes - 1


def rows(records: Iterable[dict[str, object]]) -> list[Row]:
    """Predict every measured case."""
    return [row for record in records for row in _rows_of(record)]


def _rows_of(record: dict[str, object]) -> list[Row]:
    case = Case(**record["case"])  # type: ignore[arg-type]
    ranks: list[dict[str, dict[str, int]]] = record["ranks"]  # type: ignore[assignment]
    layout = case.full_layout()
    found = []
    for share, terms in cpu_share_terms(layout, case.spec(metered_release(record)), case.job()):
        stage = None if share.stage is None else share.stage.index
        mine = ranks
        if stage is not None:
            replicas = len(ranks) // layout.pp
            mine = ranks[stage * replicas : (stage + 1) * replicas]
        peaks = [{name: peak for name, peak in rank["peaks"].items() if name not in ("init", "other")} for rank in mine]
        fullest = max(peaks, key=lambda phases: max(phases.values()))
        metered_phase = max(fullest, key=lambda name: fullest[name])
        totals = {str(name): sum(parts.values()) for name, parts in terms.items() if name != "init"}
        predicted_phase = max(totals, key=lambda name: totals[name])
        found.append(
            Row(
                case=case,
                stage=stage,
                metered_bytes=fullest[metered_phase],
                metered_phase=metered_phase,
                predicted_bytes=totals[predicted_phase],
                predicted_phase=predicted_phase,
                phases=totals,
            )
        )
    return found


def fullest_rows(found: Sequence[Row]) -> list[Row]:
    """Return one row for each case, the fullest stage of a pipeline as metered beside the fullest as predicted."""
    cases = dict.fromkeys(row.case for row in found)
    chosen = []
    for case in cases:
        stages = [row for row in found if row.case == case]
        metered = max(stages, key=lambda row: row.metered_bytes)
        predicted = max(stages, key=lambda row: row.predicted_bytes)
        chosen.append(
            Row(
                case=case,
                stage=None,
                metered_bytes=metered.metered_bytes,
                metered_phase=metered.metered_phase,
                predicted_bytes=predicted.predicted_bytes,
                predicted_phase=predicted.predicted_phase,
                phases=predicted.phases,
            )
        )
    return chosen


def case_table(found: Sequence[Row]) -> str:
    """Return one markdown line for each row."""
    lines = ["| case | metered MB | at its peak in | predicted MB | in | error |", "|---|---|---|---|---|---|"]
    for row in found:
        lines.append(
            f"| {row.name} | {row.metered_bytes / 1e6:.2f} | {row.metered_phase} | {row.predicted_bytes / 1e6:.2f} | "
            f"{row.predicted_phase} | {row.error:+.1%} |"
        )
    return "\n".join(lines)


def group_table(found: Sequence[Row]) -> str:
    """Return the mean absolute and the largest error of each layout, and of all cases."""
    lines = ["| layout | cases | MAPE | worst |", "|---|---|---|---|"]
    for layout in LAYOUTS:
        errors = [abs(row.error) for row in found if row.case.layout == layout]
        if errors:
            lines.append(f"| {layout} | {len(errors)} | {mean(errors):.2%} | {max(errors):.2%} |")
    errors = [abs(row.error) for row in found]
    lines.append(f"| **all** | {len(errors)} | **{mean(errors):.2%}** | **{max(errors):.2%}** |")
    return "\n".join(lines)


def verdict(found: Sequence[Row]) -> tuple[bool, str]:
    """Return whether every layout meets the target, and a sentence with the figures."""
    errors = {
        layout: [abs(row.error) for row in found if row.case.layout == layout]
        for layout in LAYOUTS
        if any(row.case.layout == layout for row in found)
    }
    worst = max(errors, key=lambda layout: mean(errors[layout]))
    everything = [error for group in errors.values() for error in group]
    return mean(errors[worst]) <= TARGET_MEAN, (
        f"{len(everything)} cases in {len(errors)} layouts: MAPE {mean(everything):.2%}, of the worst layout ({worst}) "
        f"{mean(errors[worst]):.2%} (target {TARGET_MEAN:.0%} for each), worst case {max(everything):.2%}"
    )


GRID = Grid(
    name="parallel_memory",
    document=Path(__file__).parents[1] / "docs" / "measurements" / "parallel_memory.md",
    cases=grid,
    case_of=Case,
    worker_file="parallel_memory_worker.py",
    rows=rows,
    tables=lambda found: {"groups": group_table(fullest_rows(found)), "cases": case_table(found)},
    verdict=lambda found: verdict(fullest_rows(found)),
)

if __name__ == "__main__":
    sys.exit(GRID.main(__doc__))
