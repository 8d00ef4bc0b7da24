"""Runs on every rank: trains with samples grouped by length, in one go and from a checkpoint inside an epoch."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from equivalence.cases import LAYOUTS, MICRO_STEP_SAMPLES, Case, make_model, padded, samples
from fresh_process import forget_last_run
from shardwright.ds_configs.specs.layout import Layout
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import training_arguments
from shardwright.trainers.parallel.trainer_for import parallelism_of

SAMPLES, STEPS, SAVED = 20, 10, 7
"""An epoch has five steps: the checkpoint is inside the second."""


def train(layout: str, output: Path, *, dropout: float, resume: bool) -> dict[str, Any]:
    """Return the losses of all steps, and the samples of this rank in their order."""
    strategy = LAYOUTS[layout] if layout in LAYOUTS else Layout(engine="single")
    strategy = replace(strategy, micro_batch_size=MICRO_STEP_SAMPLES // strategy.data_parallel_size)
    settings = Case(layout=layout, strategy=strategy, optimizer="adamw_torch").training_arguments(output)
    settings |= {"train_sampling_strategy": "group_by_length", "max_steps": STEPS}
    settings |= {"save_strategy": "steps", "save_steps": SAVED}
    single = strategy.engine == "single"
    arguments = training_arguments(settings, {"use_cpu": True} if single else configure_cpu_ranks(strategy.engine))
    rows = samples()[:SAMPLES]
    places = {id(row["input_ids"]): index for index, row in enumerate(rows)}
    seen: list[int] = []

    def noted(batch: list[dict[str, Any]]) -> dict[str, Any]:
        seen.extend(places[id(one["input_ids"])] for one in batch)
        return padded(batch)

    trainer = parallelism_of(strategy).make_trainer(
        model=make_model("llama", {"attention_dropout": dropout}),
        args=arguments,
        train_dataset=rows,
        data_collator=noted,
    )
    trainer.train(resume_from_checkpoint=str(output / f"checkpoint-{SAVED}") if resume else None)
    return {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], "seen": seen}


if __name__ == "__main__":
    output, layout, dropout = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    found = {}
    for name, resume in (("whole", False), ("resumed", True)):
        found[name] = train(layout, output, dropout=dropout, resume=resume)
        forget_last_run()
    (output / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
