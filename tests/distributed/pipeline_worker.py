"""Runs on every rank: trains all cases in pipeline stages, one after the other in one process group."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pipeline_cases import FOUR_RANKS, TWO_RANKS, Case, data_of, untrained_model
from shardwright.plugins.accelerate import configure_cpu_ranks, forget_last_run
from shardwright.trainers.pipeline.trainer import PipelineTrainer
from transformers import TrainingArguments


def trainer_of(case: Case, output: Path, **more: Any) -> PipelineTrainer:
    overrides = configure_cpu_ranks("deepspeed")
    arguments = TrainingArguments(**case.arguments(output, pipeline=True, **more), **overrides)
    return PipelineTrainer(
        untrained_model(case.family), arguments, pipeline_stages=2, dual_pipe=case.dual_pipe, **data_of(case)
    )


def run(case: Case, output: Path) -> dict[str, Any]:
    trainer = trainer_of(case, output)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(output / "model"))
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
        "evaluations": [before, after],
    }


def main(output: Path) -> None:
    chosen = TWO_RANKS if os.environ["WORLD_SIZE"] == "2" else FOUR_RANKS
    for case in chosen:
        if os.environ.get("ONLY", "") not in case.name:
            continue
        found = run(case, output / case.name)
        if os.environ["RANK"] == "0":
            (output / f"{case.name}.json").write_text(json.dumps(found))
        forget_last_run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
