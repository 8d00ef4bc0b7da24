"""Predicted beside metered memory over a grid of real training runs: `python benchmarks/memory_accuracy.py [--write]`.

Each case trains through the Trainer on CPU ranks with the byte meter on. The same cases are given to
`accelerate estimate-memory` and to DeepSpeed's estimators.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from memory_cases import VALUES, Case, grid, metered_release
from memory_estimators import accelerate_estimate, deepspeed_estimate
from metered_launch import measure_cases
from page_parts import with_part
from shardwright.ds_configs.memory.estimate import ALLOCATED_OVER_PREDICTED, cpu_rank_terms

MEASURED = Path(__file__).with_name("memory_accuracy.json")
DOCUMENT = Path(__file__).parents[1] / "docs" / "measurements" / "memory.md"
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
        low, high = ALLOCATED_OVER_PREDICTED.low, ALLOCATED_OVER_PREDICTED.high
        return round(self.predicted_bytes * low), round(self.predicted_bytes * high)

    @property
    def held(self) -> bool:
        """Whether the interval holds the metered peak."""
        low, high = self.interval
        return low <= self.metered_bytes <= high


def measure(cases: Sequence[Case]) -> list[dict[str, object]]:
    """Train every case on CPU ranks and return the readings."""
    return measure_cases(cases, worker_file="memory_worker.py")


def rows(records: Iterable[dict[str, object]]) -> list[Row]:
    """Predict every measured case."""
    found = []
    for record in records:
        case = Case(**record["case"])  # type: ignore[arg-type]
        peaks: dict[str, int] = record["peaks"]  # type: ignore[assignment]
        phases = {name: peak for name, peak in peaks.items() if name not in ("init", "other")}
        phase = max(phases, key=lambda name: phases[name])
        terms = cpu_rank_terms(case.strategy(), case.spec(metered_release(record)), case.job())
        predicted = max(sum(terms[name].values()) for name in terms if name != "init")
        found.append(Row(case=case, metered_bytes=phases[phase], metered_phase=phase, predicted_bytes=predicted))
    return found


def case_table(found: Sequence[Row]) -> str:
    """Return one markdown line for each case."""
    lines = ["| case | metered MB | at its peak in | predicted MB | error | interval |", "|---|---|---|---|---|---|"]
    for row in found:
        low, high = row.interval
        lines.append(
            f"| {row.case.name} | {_mb(row.metered_bytes)} | {row.metered_phase} | {_mb(row.predicted_bytes)} | "
            f"{row.error:+.1%} | {_mb(low)} to {_mb(high)}"
            f"{'' if row.held else ', missed'} |"
        )
    return "\n".join(lines)


def group_table(found: Sequence[Row]) -> str:
    """Return the mean absolute and the largest error of each value of each axis, and of all cases."""
    lines = ["| group | cases | MAPE | worst |", "|---|---|---|---|"]
    for name, values in VALUES.items():
        for value in values:
            errors = [abs(row.error) for row in found if getattr(row.case, name) == value]
            if errors:
                lines.append(f"| {name} {value} | {len(errors)} | {mean(errors):.2%} | {max(errors):.2%} |")
    errors = [abs(row.error) for row in found]
    lines.append(f"| **all** | {len(errors)} | **{mean(errors):.2%}** | **{max(errors):.2%}** |")
    return "\n".join(lines)


def estimator_table(found: Sequence[Row]) -> str:
    """Return what other estimators say for the same cases, and their errors."""
    lines = ["| case | metered MB | accelerate | error | DeepSpeed | error |", "|---|---|---|---|---|---|"]
    errors: dict[str, list[float]] = {"accelerate": [], "DeepSpeed": []}
    estimators: dict[str, Callable[[Case], int | None]] = {
        "accelerate": accelerate_estimate,
        "DeepSpeed": deepspeed_estimate,
    }
    for row in found:
        cells = []
        for name, estimator in estimators.items():
            said = estimator(row.case)
            if said is None:
                cells += ["none", ""]
                continue
            error = said / row.metered_bytes - 1
            errors[name].append(abs(error))
            cells += [_mb(said), f"{error:+.0%}"]
        lines.append(f"| {row.case.name} | {_mb(row.metered_bytes)} | {' | '.join(cells)} |")
    summary = " and ".join(
        f"{name} {mean(values):.0%} over {len(values)} cases" for name, values in errors.items() if values
    )
    return "\n".join(lines) + f"\n\nMean absolute error: {summary}."


def verdict(found: Sequence[Row]) -> tuple[bool, str]:
    """Return whether the targets are met, and a sentence with the figures."""
    errors = [abs(row.error) for row in found]
    missed = [row.case.name for row in found if not row.held]
    passed = mean(errors) <= TARGET_MEAN and max(errors) <= TARGET_WORST and not missed
    return passed, (
        f"{len(found)} cases: MAPE {mean(errors):.2%} (target {TARGET_MEAN:.0%}), worst {max(errors):.2%} "
        f"(target {TARGET_WORST:.0%}), interval holds {len(found) - len(missed)} of {len(found)}"
    )


def write_document(found: Sequence[Row]) -> None:
    """Replace the tables between the markers of the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    tables = {
        "summary": verdict(found)[1] + ".",
        "groups": group_table(found),
        "cases": case_table(found),
        "estimators": estimator_table(found),
    }
    for name, table in tables.items():
        text = with_part(text, name, table)
    DOCUMENT.write_text(text, encoding="utf-8")


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f}"


def main() -> int:
    """Measure the grid, or read what was measured before, and print every table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--stored", action="store_true", help=f"predict the measurements in {MEASURED.name} again")
    parser.add_argument("--write", action="store_true", help=f"store measurements and tables in {DOCUMENT.name}")
    options = parser.parse_args()
    wanted = {case.name for case in grid() if re.search(options.only or "", case.name)}
    if options.only and options.write:
        parser.error("--write stores the whole grid: leave --only out")
    if not wanted:
        parser.error(f"--only {options.only} matches no case")
    if options.stored:
        records = json.loads(MEASURED.read_text(encoding="utf-8"))
        records = [record for record in records if Case(**record["case"]).name in wanted]
    else:
        records = measure([case for case in grid() if case.name in wanted])
    found = rows(records)
    for table in (case_table(found), group_table(found), estimator_table(found)):
        print(table, end="\n\n")
    passed, sentence = verdict(found)
    print(sentence)
    if options.write:
        MEASURED.write_text("[\n" + ",\n".join(json.dumps(r, sort_keys=True) for r in records) + "\n]\n", "utf-8")
        write_document(found)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
