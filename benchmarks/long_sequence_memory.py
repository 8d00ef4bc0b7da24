"""Predicted beside metered memory of long sequences: `python benchmarks/long_sequence_memory.py [--write]`.

Each case trains through `trainer_for`'s Trainer on CPU ranks with the byte meter on. The last cases run under a limit
of bytes: a sequence that fits without tiles and host checkpoints, a longer one that does not, and one 8 times as long
with them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from long_sequence_cases import LOGITS_BYTES_OF_A_TILE, Case, grid
from memory_cases import metered_release
from memory_grid import Grid
from shardwright.ds_configs.memory import activations
from shardwright.ds_configs.memory.estimate import cpu_rank_terms

LARGEST_ERROR = 0.03


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case with its metered peaks and their predictions."""

    case: Case
    metered_bytes: int
    predicted_bytes: int
    host_metered_bytes: int
    host_predicted_bytes: int
    out_of_memory: bool

    @property
    def error(self) -> float:
        """Relative error of the peak on the device, positive when it is predicted too large."""
        return self.predicted_bytes / self.metered_bytes - 1

    @property
    def is_right(self) -> bool:
        """Whether device and host bytes are predicted closely, or the limit's effect is."""
        limit = self.case.limit_bytes
        if limit is not None:
            return self.out_of_memory == (self.predicted_bytes > limit)
        host_difference = abs(self.host_predicted_bytes - self.host_metered_bytes)
        return abs(self.error) <= LARGEST_ERROR and host_difference <= LARGEST_ERROR * self.host_metered_bytes


def rows(records: Iterable[dict[str, object]]) -> list[Row]:
    """Predict every measured case."""
    tile_bytes = activations.LOGITS_BYTES_OF_A_TILE
    activations.LOGITS_BYTES_OF_A_TILE = LOGITS_BYTES_OF_A_TILE
    try:
        return [_row(record) for record in records]
    finally:
        activations.LOGITS_BYTES_OF_A_TILE = tile_bytes


def _row(record: dict[str, object]) -> Row:
    case = Case(**record["case"])  # type: ignore[arg-type]
    spec, job, layout = case.spec(metered_release(record)), case.job(), case.full_layout()
    terms = {name: dict(phase) for name, phase in cpu_rank_terms(layout, spec, job).items()}
    # CPU ranks have both in the same memory, but the meter counts the host's apart.
    host = [phase.pop("offloaded_checkpoints", 0) for phase in terms.values()]
    return Row(
        case=case,
        metered_bytes=record["peak_bytes"],  # type: ignore[arg-type]
        predicted_bytes=max(sum(terms[name].values()) for name in terms if name != "init"),
        host_metered_bytes=record["host_bytes"],  # type: ignore[arg-type]
        host_predicted_bytes=max(host),
        out_of_memory=bool(record["out_of_memory"]),
    )


def case_table(found: Sequence[Row]) -> str:
    """Return one Markdown line for each case without a limit."""
    lines = [
        "| case | metered MB | predicted MB | error | host MB | predicted MB |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        if row.case.limit_bytes is None:
            lines.append(
                f"| {row.case.name} | {_mb(row.metered_bytes)} | {_mb(row.predicted_bytes)} | {row.error:+.1%} | "
                f"{_mb(row.host_metered_bytes)} | {_mb(row.host_predicted_bytes)} |"
            )
    return "\n".join(lines)


def slopes(found: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Return the metered and the predicted growth in bytes per token, from the shortest to the longest sequence."""
    growth = {}
    for name in dict.fromkeys(row.case.run for row in found if row.case.limit_bytes is None):
        own = [row for row in found if row.case.run == name and row.case.limit_bytes is None]
        own = sorted(own, key=lambda row: row.case.tokens)
        if len(own) > 1:
            tokens = own[-1].case.tokens - own[0].case.tokens
            metered = (own[-1].metered_bytes - own[0].metered_bytes) / tokens
            growth[name] = metered, (own[-1].predicted_bytes - own[0].predicted_bytes) / tokens
    return growth


def slope_table(found: Sequence[Row]) -> str:
    """Return the growth with the sequence as Markdown."""
    lines = ["| run | metered bytes per token | predicted | error |", "|---|---|---|---|"]
    for name, (metered, predicted) in slopes(found).items():
        lines.append(f"| {name} | {metered:,.0f} | {predicted:,.0f} | {predicted / metered - 1:+.1%} |")
    return "\n".join(lines)


def limit_table(found: Sequence[Row]) -> str:
    """Return the runs under a limit of bytes as Markdown."""
    lines = ["| features | tokens | limit MB | predicted MB | trained |", "|---|---|---|---|---|"]
    for row in found:
        if row.case.limit_bytes is not None:
            trained = "no: out of memory" if row.out_of_memory else f"yes, {_mb(row.metered_bytes)} MB"
            lines.append(
                f"| {row.case.features} | {row.case.tokens:,} | {_mb(row.case.limit_bytes)} | "
                f"{_mb(row.predicted_bytes)} | {trained} |"
            )
    return "\n".join(lines)


def verdict(found: Sequence[Row]) -> tuple[bool, str]:
    """Return whether every case and every slope is predicted closely, and a sentence with the figures."""
    worst = max((abs(row.error) for row in found if row.case.limit_bytes is None), default=0.0)
    steepest = max((abs(predicted / metered - 1) for metered, predicted in slopes(found).values()), default=0.0)
    wrong = [row.case.name for row in found if not row.is_right]
    passed = not wrong and steepest <= LARGEST_ERROR
    return passed, (
        f"{len(found)} cases: worst error {worst:.2%}, of the growth per token {steepest:.2%} (target "
        f"{LARGEST_ERROR:.0%}){'; wrong: ' + ', '.join(wrong) if wrong else ''}"
    )


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f}"


GRID = Grid(
    name="long_sequence_memory",
    document=Path(__file__).parents[1] / "docs" / "measurements" / "long_sequences.md",
    cases=grid,
    case_of=Case,
    worker_file="long_sequence_worker.py",
    rows=rows,
    tables=lambda found: {"cases": case_table(found), "growth": slope_table(found), "limits": limit_table(found)},
    verdict=verdict,
)

if __name__ == "__main__":
    sys.exit(GRID.main(__doc__))
