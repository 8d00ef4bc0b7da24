"""Metered cases beside what is predicted of them now, as a table that its benchmark stores."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from memory_cases import metered_release
from shardwright.ds_configs.memory.estimate import cpu_rank_terms

STORED = ("case", "peak_bytes", "release")
"""What is stored of a metered case."""


def predicted_bytes(case: Any, release: str) -> int:
    """Return the predicted peak of a rank after loading, with a release of Transformers."""
    terms = cpu_rank_terms(case.strategy(), case.spec(release), case.job())
    return max(sum(terms[name].values()) for name in terms if name != "init")


def metered_table(records: Sequence[dict[str, Any]], case_of: Callable[..., Any]) -> tuple[str, list[float]]:
    """Return the cases as Markdown, and the relative errors of their predictions.

    Args:
        records: Of each case its fields under `case`, the metered `peak_bytes` of the fullest rank, and the `release`
            of Transformers where it is not `FIRST_RELEASE`.
        case_of: Makes a case of its fields.
    """
    lines, errors = ["| case | metered MB | predicted MB | error |", "|---|---|---|---|"], []
    for record in records:
        case, metered = case_of(**record["case"]), record["peak_bytes"]
        found = predicted_bytes(case, metered_release(record))
        errors.append(found / metered - 1)
        lines.append(f"| {case.name} | {metered / 1e6:.2f} | {found / 1e6:.2f} | {errors[-1]:+.1%} |")
    return "\n".join(lines), errors


def show(table: tuple[str, list[float]]) -> None:
    """Print a table and the errors of all its cases."""
    text, errors = table
    print(text)
    print(f"{len(errors)} cases: MAPE {mean(map(abs, errors)):.2%}, worst {max(map(abs, errors)):.2%}")


def store(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Write what was metered, a line a case."""
    file.write_text("[\n" + ",\n".join(json.dumps(each, sort_keys=True) for each in records) + "\n]\n", "utf-8")
