"""`shardwright train` on two CPU ranks under every kind of layout, beside one process, and resumed.

`python benchmarks/train_layouts.py --write` runs one command for each layout, which trains three steps and saves after
two, the same in one process, and once more from the checkpoint, and makes docs/measurements/train.md. Names of layouts
run these alone, and only print.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "distributed")]
PAGE = ROOT / "docs" / "measurements" / "train.md"
TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One layout: largest differences in nats a token."""

    layout: str
    command: str
    seconds: float
    """From the command's start to its end, with ranks whose libraries are loaded."""
    steps: float
    """Of a step's loss to that of one process."""
    held_out: float | None
    """Of the held-out loss, before and after; `None` where ranks cannot evaluate."""
    resumed: float
    """Of a step's loss in the resumed run to that of the run which went on."""
    loss: tuple[float, float]
    """First and last step's."""


def main() -> int:
    """Train and print; 1 where a loss differs by more than the tolerance, or a resumed one at all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", help="default: all")
    parser.add_argument("--write", action="store_true", help="write the page")
    flags = parser.parse_args()
    if flags.write and flags.layouts:
        parser.error("--write makes the page of all layouts: name none")
    rows = []
    for row in measured(flags.layouts):
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    text = page(rows)
    if flags.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)
    return int(any(max(row.steps, row.held_out or 0.0) > TOLERANCE or row.resumed for row in rows))


def measured(layouts: Iterable[str]) -> Iterator[Row]:
    """Yield one layout after the other, trained by warm ranks."""
    import session
    from training_runs import LAYOUTS, make_inputs, method_of, model_of, resumed, trained

    opened = session.open_session()
    alone: dict[tuple[str, str], Any] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="train-layouts-") as directory:
            root = Path(directory)
            make_inputs(root)
            for layout in list(layouts) or LAYOUTS:
                model, method = model_of(layout), method_of(layout)
                if (model, method) not in alone:
                    flags = f"--hardware 1xCPU {method}"
                    alone[model, method] = trained(root, model, root / f"one-{layout}", flags)
                flags = f"--hardware 2xCPU {LAYOUTS[layout]}"
                began = time.perf_counter()
                run = root, model, root / layout, flags
                losses, shown = trained(*run, save_steps=2)
                seconds = time.perf_counter() - began
                expected, one = alone[model, method]
                again, _ = resumed(*run, save_steps=2)
                pairs = [(shown["cross_entropy"][when], one["cross_entropy"][when]) for when in ("before", "after")]
                yield Row(
                    layout=layout,
                    command=f"shardwright train {model} --config settings.yaml {flags} --output-dir out",
                    seconds=seconds,
                    steps=difference(losses, expected),
                    held_out=None if pairs[0][0] is None else max(abs(a - b) for a, b in pairs),
                    resumed=difference(again, losses),
                    loss=(losses[0], losses[-1]),
                )
    finally:
        opened.close()


def difference(losses: list[float], expected: list[float]) -> float:
    """Return the largest difference of two runs of equal length."""
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


def page(rows: Iterable[Row]) -> str:
    """Return docs/measurements/train.md."""
    from training_runs import SETTINGS

    rows = list(rows)
    settings = [f"{name.replace('-', '_')}: {json.dumps(value)}" for name, value in SETTINGS.items()]
    table = [
        f"| {row.layout} | {row.loss[0]:.4f} to {row.loss[1]:.4f} | {shown(row.steps)} | {shown(row.held_out)} | "
        f"{shown(row.resumed)} | {row.seconds:.0f} |"
        for row in rows
    ]
    return "\n".join(
        [
            "# `train` under every layout",
            "",
            "One command for each kind of layout, on two CPU ranks in fp32, with a tiny Llama (for `ep` a Mixtral)",
            "and 40 rows of prompts and completions. Three steps, a checkpoint after two. `python",
            "benchmarks/train_layouts.py --write` makes this page; `pytest tests/distributed/test_train.py` holds the",
            "same runs to what stands here.",
            "",
            "| layout | loss of the first and last step | steps | held-out loss | resumed | seconds |",
            "|---|--:|--:|--:|--:|--:|",
            *table,
            "",
            "*Steps* and *held-out loss* (before and after training) are the largest differences to one process in",
            "nats a token, of which 1e-5 is asked; *resumed* that of a run that resumes from the checkpoint to one",
            "that was never stopped, of which 0 is asked. Ranks that share a sequence by `cp` cannot evaluate. Seconds",
            "are those of the first command, in processes whose libraries are loaded.",
            "",
            "The commands:",
            "",
            "```text",
            *(row.command for row in rows),
            "```",
            "",
            "and `settings.yaml`, which they share:",
            "",
            "```yaml",
            "dataset: rows.jsonl",
            *settings,
            "save_steps: 2",
            "```",
            "",
        ]
    )


def shown(value: float | None) -> str:
    """Return a difference as the table has it."""
    return "not evaluated" if value is None else "0" if not value else f"{value:.1e}"


if __name__ == "__main__":
    raise SystemExit(main())
