"""Metered cases beside what is predicted of them now, as a table that its benchmark stores."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from shardwright.ds_configs.memory.cpu_memory import cpu_rank_terms


def predicted_bytes(case: Any) -> int:
    """Return the predicted peak of a rank after loading."""
    terms = cpu_rank_terms(case.strategy(), case.spec(), case.job())
    return max(sum(terms[name].values()) for name in terms if name != "init")


def metered_table(records: Sequence[dict[str, Any]], case_of: Callable[..., Any]) -> tuple[str, list[float]]:
    """Return the cases as Markdown, and the relative errors of their predictions.

    Args:
        records: Of each case its fields under `case`, and the metered `peak_bytes` of the fullest rank.
        case_of: Makes a case of its fields.
    """
    lines, errors = ["| case | metered MB | predicted MB | error |", "|---|---|---|---|"], []
    for record in records:
        case, metered = case_of(**record["case"]), record["peak_bytes"]
        found = predicted_bytes(case)
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
