"""Runs that save a checkpoint, and runs that resume from the checkpoint of another layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equivalence.cases import LAYOUTS, MICRO_STEP_SAMPLES, Case, make_model, padded, samples
from equivalence.records import training_record, write_records
from shardwright.ds_configs.specs.layout import Layout
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import training_arguments
from shardwright.trainers.parallel.planned import parallelism_of

SAVED_AT, STEPS = 2, 4
ONE_RANK = {
    "one-process": Layout(engine="single"),
    "one-rank-zero2": Layout(engine="deepspeed", zero_stage=2, dp_shard=1),
    "one-rank-fsdp2": Layout(engine="fsdp2", dp_shard=1),
}


@dataclass(frozen=True, kw_only=True)
class Resumed(Case):
    """A run that saves, or one that resumes from what `saved` names."""

    saved: str = ""
    adapters: bool = False
    only_model: bool = False

    @property
    def name(self) -> str:
        kind = self.layout + ("-adapters" if self.adapters else "") + ("-only-model" if self.only_model else "")
        return f"{kind}-from-{self.saved}" if self.saved else kind

    @property
    def full_layout(self) -> Layout:
        layout = (LAYOUTS | ONE_RANK)[self.layout]
        return replace(layout, micro_batch_size=MICRO_STEP_SAMPLES // layout.data_parallel_size)


def make_trainer(case: Resumed, directory: Path) -> Any:
    engine = case.full_layout.engine
    arguments = case.arguments(directory) | {"max_steps": STEPS, "save_only_model": case.only_model}
    if not case.saved:
        arguments |= {"save_strategy": "steps", "save_steps": SAVED_AT}
    overrides = {"use_cpu": True} if engine == "single" else configure_cpu_ranks(engine)
    model = make_model(case.family, {})
    if case.adapters:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    return parallelism_of(case.full_layout).make_trainer(
        model=model,
        args=training_arguments(arguments, overrides),
        train_dataset=samples()[:24],
        data_collator=padded,
    )


def record(case: Resumed, output: Path) -> dict[str, Any]:
    checkpoint = output / case.saved / f"checkpoint-{SAVED_AT}" if case.saved else None
    return training_record(lambda: make_trainer(case, output / case.name), resume_from_checkpoint=checkpoint)


if __name__ == "__main__":
    write_records(Resumed, record)
