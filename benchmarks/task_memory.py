"""Predicted beside metered memory of preference and RL tasks, phase by phase: `python benchmarks/task_memory.py`.

Each case trains TRL's trainer on CPU ranks with the byte meter on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from memory_cases import MODELS, metered_release, small_limits, spec_of
from memory_grid import Grid
from shardwright.ds_configs.memory.estimate import cpu_rank_terms
from shardwright.ds_configs.memory.rank_parameters import rank_parameters
from shardwright.ds_configs.specs.job import GROUPED_TASKS, TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.ds_configs.specs.tasks import TASKS

TARGET_MEAN, TARGET_WORST = 0.03, 0.06
PROMPT_BYTES, SEQ_LEN = 24, 192
TASKS_OF_GRID = ("dpo", "kto", "orpo", "cpo", "reward", "grpo", "rloo")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One task under one engine, metered in its phases."""

    task: str
    layout: str
    method: str = "full"
    precision: str = "bf16"
    checkpointing: bool = True

    @property
    def ranks(self) -> int:
        return 2

    @property
    def name(self) -> str:
        checkpointing = "ckpt" if self.checkpointing else "kept"
        return "-".join([self.task, self.layout, self.method, self.precision, checkpointing])

    @property
    def config(self) -> dict[str, Any]:
        return {"model_type": "llama", **MODELS["llama"], "pad_token_id": 256, "eos_token_id": 256}

    def spec(self, release: str | None = None) -> ModelSpec:
        spec = spec_of(self.config, "llama", release)
        return spec.with_score_head() if self.task == "reward" else spec

    def job(self) -> TrainingJob:
        grouped = self.task in GROUPED_TASKS
        job = TrainingJob(
            task=self.task,  # type: ignore[arg-type]
            seq_len_tokens=SEQ_LEN,
            precision=self.precision,  # type: ignore[arg-type]
            method=self.method,  # type: ignore[arg-type]
            lora_rank=8,
            beta=(0.0 if self.layout == "fsdp2" else 0.05) if grouped else None,
            **({"generation": "transformers", "num_generations": 2} if grouped else {}),
            completion_tokens=SEQ_LEN - PROMPT_BYTES if grouped else None,
        ).completed(self.spec())
        placed = "sharded" if self.layout in ("zero3", "fsdp2") else "replica"
        if "reference" not in TASKS[job.task].second_models or job.reference is None:
            return job
        return job.placed("reference", "shared" if self.method != "full" else placed)  # type: ignore[arg-type]

    def full_layout(self) -> Layout:
        stage = int(self.layout[-1]) if self.layout.startswith("zero") else None
        engine = "deepspeed" if stage is not None else self.layout
        return Layout(
            engine=engine,  # type: ignore[arg-type]
            zero_stage=stage,
            dp_shard=1 if self.layout == "ddp" else self.ranks,
            dp_replicate=self.ranks if self.layout == "ddp" else 1,
            micro_batch_size=2,
            gradient_accumulation_steps=2 if self.task in GROUPED_TASKS else 1,
            gradient_checkpointing=self.checkpointing,
            zero=small_limits(self.spec(), rank_parameters(self.spec(), self.job()).trainable),
        )


@cache
def grid() -> list[Case]:
    """Return every task under every engine, and each task once more with other choices."""
    cases = [
        Case(task=task, layout=layout) for task, layout in product(TASKS_OF_GRID, ("ddp", "zero2", "zero3", "fsdp2"))
    ]
    for task in TASKS_OF_GRID:
        cases += [
            Case(task=task, layout="zero2", method="lora"),
            Case(task=task, layout="zero3", precision="fp32", checkpointing=False),
        ]
    return cases


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
    rows=rows,
    tables=lambda found: {"cases": table(found)},
    verdict=verdict,
)

if __name__ == "__main__":
    sys.exit(GRID.main(__doc__))
