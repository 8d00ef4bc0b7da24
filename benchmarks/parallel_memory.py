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
from typing import Any

from memory_cases import MICRO_BATCH_SIZE, MODELS, SEQ_LEN, metered_release, small_limits, spec_of
from memory_grid import Grid, error_table, line, megabytes, total_line
from shardwright.ds_configs.memory.estimate import cpu_share_terms
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import ModelSpec

TARGET_MEAN = 0.05

LAYOUTS: dict[str, dict[str, int]] = {
    "sp2": {"sp": 2},
    "sp2xdp2": {"sp": 2, "dp_shard": 2},
    "tp2": {"tp": 2},
    "tp2xdp2": {"tp": 2, "dp_shard": 2},
    "pp2": {"pp": 2},
    "pp2xdp2": {"pp": 2, "dp_shard": 2},
    "pp2xtp2": {"pp": 2, "tp": 2},
    "ep2": {"ep": 2, "dp_shard": 2},
    "ep2xdp2": {"ep": 2, "dp_shard": 4},
}
"""Axes of each layout; expert-parallel ranks are data-parallel ones."""

STAGES: dict[str, tuple[int, ...]] = {"sp": (1, 2, 3), "tp": (0, 1, 2), "pp": (0, 1), "ep": (1, 2)}
FAMILIES: dict[str, tuple[str, ...]] = {
    "sp": ("llama", "qwen3"),
    "tp": ("llama", "qwen3"),
    "pp": ("llama", "qwen3", "gpt2"),
    "ep": ("mixtral",),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run whose peak is predicted and metered on every rank."""

    layout: str
    zero_stage: int
    model: str
    precision: str
    accumulation: int
    checkpointing: bool

    @property
    def name(self) -> str:
        checkpointing = "ckpt" if self.checkpointing else "full"
        words = (self.layout, f"zero{self.zero_stage}", self.model, self.precision, f"x{self.accumulation}")
        return "-".join([*words, checkpointing])

    @property
    def config(self) -> dict[str, Any]:
        return {"model_type": self.model, **MODELS[self.model]}

    @property
    def ranks(self) -> int:
        return self.full_layout().world_size

    def spec(self, release: str | None = None) -> ModelSpec:
        return spec_of(self.config, self.model, release)

    def job(self) -> TrainingJob:
        return TrainingJob(
            seq_len_tokens=SEQ_LEN,
            precision=self.precision,  # type: ignore[arg-type]
            gradient_checkpointing="on" if self.checkpointing else "off",
        )

    def full_layout(self) -> Layout:
        return Layout(
            engine="deepspeed",
            zero_stage=self.zero_stage,
            micro_batch_size=MICRO_BATCH_SIZE,
            gradient_accumulation_steps=self.accumulation,
            gradient_checkpointing=self.checkpointing,
            zero=small_limits(self.spec()),
            **LAYOUTS[self.layout],
        )


_SETTINGS = (("fp32", 1, False), ("bf16", 3, True), ("fp32", 3, True), ("bf16", 1, False))
"""Precision, accumulation and checkpointing."""


def grid() -> list[Case]:
    """Return cases for each layout and stage of ZeRO over the layout's model families: two on 2 ranks, one on 4."""
    cases: list[Case] = []
    for layout in LAYOUTS:
        stages, families = STAGES[layout[:2]], FAMILIES[layout[:2]]
        number = 1 if "x" in layout else 2
        for index, (stage, _) in enumerate((stage, place) for stage in stages for place in range(number)):
            precision, accumulation, checkpointing = _SETTINGS[(index + (layout[:2] in ("tp", "ep"))) % len(_SETTINGS)]
            cases.append(
                Case(
                    layout=layout,
                    zero_stage=stage,
                    model=families[(index + (index // 2 if len(families) == 2 else 0)) % len(families)],
                    precision=precision,
                    accumulation=accumulation,
                    checkpointing=checkpointing,
                )
            )
    return cases


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
        metered, predicted = megabytes(row.metered_bytes), megabytes(row.predicted_bytes)
        lines.append(line(row.name, metered, row.metered_phase, predicted, row.predicted_phase, f"{row.error:+.1%}"))
    return "\n".join(lines)


def group_table(found: Sequence[Row]) -> str:
    """Return the errors of each layout, and of all cases."""
    groups = {layout: [abs(row.error) for row in found if row.case.layout == layout] for layout in LAYOUTS}
    return error_table("layout", groups) + "\n" + total_line([abs(row.error) for row in found])


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
    rows=rows,
    tables=lambda found: {"groups": group_table(fullest_rows(found)), "cases": case_table(found)},
    verdict=lambda found: verdict(fullest_rows(found)),
)

if __name__ == "__main__":
    sys.exit(GRID.main(__doc__))
