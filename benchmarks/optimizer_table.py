"""Every optimizer under every engine on CPU ranks: bytes of a step, losses of 20 steps, and a resumed run.

`python benchmarks/optimizer_table.py --write` trains all cells, also those that the planner rejects, and makes
docs/measurements/optimizers.md; names of optimizers train these alone. `--stored` judges what was found before by the
predictions and the legality of today. It needs the packages of `OPTIMIZERS`. A cell that is offered and fails, differs
from one process, or needs other bytes, fails the command.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]
FOUND = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "measurements" / "optimizers.md"
LOSS_TOLERANCE = 1e-5
TOLERANCES = {
    "muon": 5e-4,
    **dict.fromkeys(("galore_adamw", "galore_adafactor"), 5e-3),
    **dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit"), 1e-3),
}
"""Largest difference of a loss from one process, in nats, of optimizers that are not exact.

Muon orthogonalizes in bf16, GaLore projects to singular vectors, which rounding turns, and torchao rounds states.
"""
EIGHT_BIT = 1e-3
"""The same for 8-bit states of bitsandbytes, whose blocks begin elsewhere in a partition of ZeRO."""
MEAN_ERROR, WORST_ERROR = 0.02, 0.05
AT_ONCE = 8
"""Cells of one launch of ranks, whose time is limited."""

SAME = {
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "paged_lion_32bit": "lion_32bit",
    "paged_lion_8bit": "lion_8bit",
    "paged_ademamix_32bit": "ademamix",
    "paged_ademamix_8bit": "ademamix_8bit",
    "rmsprop_bnb_32bit": "rmsprop_bnb",
}
"""Other names of one class, and paged ones, which CPU ranks do not page: measured by the other name."""

Row = dict[str, Any]
"""`optimizer`, `layout`, and either `failed` (of `metered` or `trained`) or what was measured."""


def main() -> int:
    """Train or read the stored rows, print the page, and return 1 if an offered cell is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("optimizers", nargs="*", help="default: all")
    parser.add_argument("--layouts", default="", help="columns, separated by commas; default: all")
    parser.add_argument("--write", action="store_true", help="store what was found, and write the page")
    parser.add_argument("--stored", action="store_true", help="train nothing")
    flags = parser.parse_args()
    rows = stored()
    if not flags.stored:
        for row in trained(flags.optimizers, [name for name in flags.layouts.split(",") if name]):
            print(*row.values(), file=sys.stderr, flush=True)
            rows = [one for one in rows if key(one) != key(row)] + [row]
    if flags.write:
        lines = sorted(json.dumps(row, sort_keys=True) for row in rows)
        FOUND.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
        PAGE.write_text(page(rows), encoding="utf-8")
    else:
        print(page(rows))
    wrong = wrong_cells(rows)
    print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


def stored() -> list[Row]:
    """Return what was found before."""
    found: list[Row] = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else []
    return found


def key(row: Row) -> tuple[str, str]:
    return row["optimizer"], row["layout"]


def trained(optimizers: Iterable[str], layouts: Iterable[str]) -> Iterator[Row]:
    """Yield a row for each cell, one process first."""
    from equivalence.records import each_record
    from optimizer_worker import Case
    from warm_ranks import server

    names = list(optimizers) or [name for name in OPTIMIZERS if name not in SAME]
    columns = list(layouts) or list(ENGINES)
    cells = [(name, layout) for layout in columns for name in names]
    if not list(optimizers):
        cells = [cell for cell in cells if not rejection_of(*cell)]
    worker = Path(__file__).with_name("optimizer_worker.py")
    with server(), tempfile.TemporaryDirectory() as directory:
        for first in range(0, len(cells), AT_ONCE):
            cases = [Case(optimizer=name, layout=layout) for name, layout in cells[first : first + AT_ONCE]]
            for case, record in each_record(cases, Path(directory), worker):
                yield row_of(case.optimizer, case.layout, record)


def row_of(optimizer: str, layout: str, record: dict[str, Any]) -> Row:
    """Return what is kept of a record: the last line of a failure, or the figures."""
    row: Row = {"optimizer": optimizer, "layout": layout}
    for part in ("error", "metered_failed", "trained_failed"):
        if part in record:
            row[part] = " ".join(record[part].strip().splitlines()[-1].split())[:200]
    figures = ("metered", "losses", "resumed_loss_difference", "resumed_weight_difference")
    return row | {name: record[name] for name in figures if name in record}


def predicted(optimizer: str, layout: str) -> int:
    """Return the bytes that the planner predicts for the metered step, on a rank without an accelerator."""
    plan = metered_plan(optimizer, layout)
    phases = cpu_rank_terms(plan.chosen.layout, plan.model, plan.job)
    return max(sum(terms.values()) for phase, terms in phases.items() if phase != "init")


def rejection_of(optimizer: str, layout: str) -> str:
    """Return why the planner rejects a cell, the most specific of its reasons; empty if it offers it."""
    plan = metered_plan(optimizer, layout)
    errors = legality_errors(plan.model, plan.chosen.layout, plan.job, plan.hardware)
    rule = errors[-1].rule if errors else ""
    return rule.partition(": ")[2] or rule


def loss_difference(row: Row, rows: Iterable[Row]) -> float | None:
    """Return the largest difference of a step's loss from that of one process."""
    single = next((one for one in rows if key(one) == (row["optimizer"], "single")), {})
    if "losses" not in row or "losses" not in single:
        return None
    return max(abs(own - other) for own, other in zip(row["losses"], single["losses"], strict=True))


def tolerance(optimizer: str) -> float:
    return EIGHT_BIT if OPTIMIZERS[optimizer].eight_bit else TOLERANCES.get(optimizer, LOSS_TOLERANCE)


def wrong_cells(rows: list[Row]) -> list[str]:
    """Return a line for each offered cell that fails, and for figures above the limits."""
    wrong, errors = [], []
    for row in rows:
        name = "-".join(key(row))
        if rejection_of(*key(row)):
            continue
        if failures := [row[part] for part in ("error", "metered_failed", "trained_failed") if part in row]:
            wrong.append(f"{name} fails: {failures[0]}")
            continue
        if (difference := loss_difference(row, rows)) is not None and difference > tolerance(row["optimizer"]):
            wrong.append(f"{name}: losses differ by {difference:.1e}")
        if row["resumed_loss_difference"] > tolerance(row["optimizer"]):
            wrong.append(f"{name}: a resumed run differs by {row['resumed_loss_difference']:.1e}")
        error = abs(predicted(*key(row)) / row["metered"] - 1)
        errors.append(error)
        if error > WORST_ERROR:
            wrong.append(f"{name}: predicted {predicted(*key(row)):,} bytes, metered {row['metered']:,}")
    if errors and sum(errors) / len(errors) > MEAN_ERROR:
        wrong.append(f"mean error of memory {sum(errors) / len(errors):.1%}")
    return wrong


def page(rows: list[Row]) -> str:
    """Return the page with a table of verdicts, the reasons, and a table of bytes."""
    found = {key(row): row for row in rows}
    names = list(OPTIMIZERS)
    reasons: list[str] = []
    lines = ["| optimizer | " + " | ".join(ENGINES) + " |", "|---" * (len(ENGINES) + 1) + "|"]
    memory = ["| optimizer | engine | metered MB | predicted MB | error | losses | resumed |", "|---" * 7 + "|"]
    errors = []
    for name in names:
        cells = []
        for layout in ENGINES:
            if reason := rejection_of(name, layout):
                reasons += [] if reason in reasons else [reason]
                cells.append(str(reasons.index(reason) + 1))
                continue
            row = found.get((SAME.get(name, name), layout))
            if row is None or "metered" not in row or "losses" not in row:
                cells.append("open")
                continue
            cells.append("✓")
            if name in SAME:
                continue
            bytes_ = predicted(name, layout)
            errors.append(abs(bytes_ / row["metered"] - 1))
            difference = loss_difference(row, rows)
            memory.append(
                f"| {name} | {layout} | {row['metered'] / 1e6:.2f} | {bytes_ / 1e6:.2f} "
                f"| {bytes_ / row['metered'] - 1:+.1%} | {difference or 0:.0e} "
                f"| {row['resumed_loss_difference']:.0e} |"
            )
        label = f"{name} ({SAME[name]})" if name in SAME else name
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    numbered = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    never = [f"| {name} | {rule}; {fix} |" for name, (rule, fix) in REJECTED.items()]
    mean, worst = (sum(errors) / len(errors), max(errors)) if errors else (0.0, 0.0)
    text = PAGE.read_text(encoding="utf-8")
    for part, shown in {
        "engines": [*lines, "", *numbered],
        "rejected": ["| optimizer | reason |", "|---|---|", *never],
        "errors": [f"Mean error of the predicted bytes {mean:.1%}, worst {worst:.1%}."],
        "memory": memory,
    }.items():
        text = with_part(text, part, "\n".join(shown))
    return text


from optimizer_worker import ENGINES, metered_plan  # noqa: E402
from page_parts import with_part  # noqa: E402
from shardwright.ds_configs.legality.rules import legality_errors  # noqa: E402
from shardwright.ds_configs.memory.estimate import cpu_rank_terms  # noqa: E402
from shardwright.ds_configs.specs.optimizers import OPTIMIZERS, REJECTED  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
