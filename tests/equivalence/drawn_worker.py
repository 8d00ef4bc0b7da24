"""Runs on every rank: trains combinations one after the other and writes what came of each."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from equivalence.cases import IGNORED, LONGEST, make_model, samples
from equivalence.combinations import Combination, collated, prepared_run
from equivalence.records import training_record, write_records
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import training_arguments
from shardwright.trainers.parallel.trainer_for import parallelism_of


def make_trainer(combination: Combination, directory: Path) -> Any:
    from datasets import Dataset

    run = prepared_run(combination, directory)
    strategy = combination.strategy
    engine = strategy.engine
    shares = run.distillation is not None and strategy.sp > 1
    if shares:
        from distillation_cases import sequence_parallelism

        # This trainer shares sequences by itself.
        run.arguments["parallelism_config"] = sequence_parallelism(strategy.sp, strategy.data_parallel_size)
        strategy = replace(strategy, sp=1)
    overrides = {"use_cpu": True} if engine == "single" else configure_cpu_ranks(engine)
    own = run.arguments.pop("accelerator_config", {})
    if own:
        overrides = {**overrides, "accelerator_config": {**overrides.get("accelerator_config", {}), **own}}
    arguments = training_arguments(run.arguments, overrides)
    model = make_model(run.family, run.sizes)
    for change in run.change_model:
        model = change(model)
    data: Any = run.data or samples()
    if run.streams:
        rows = [{name: list(map(int, value)) for name, value in row.items()} for row in data]
        data = Dataset.from_list(rows).to_iterable_dataset()
    settings = {
        "model": model,
        "args": arguments,
        "train_dataset": data,
        "data_collator": one_length if run.streams or shares else collated,
        "callbacks": [make() for make in run.callbacks],
    }
    layout = parallelism_of(strategy)
    if run.distillation is None:
        return layout.make_trainer(**settings)
    from shardwright.trainers.distillation import DistillationConfig, DistillationTrainer

    config = DistillationConfig(**run.distillation)
    teacher = None if config.self_teacher else make_model(run.family, run.sizes, seed=9, layers=3)
    return layout.make_trainer(**settings, trainer_class=DistillationTrainer, teacher=teacher, distillation=config)


def one_length(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate rows to one length, with positions: batches that one rank reads for all, or shares, have one shape."""
    import torch

    batch = collated([{name: torch.as_tensor(value) for name, value in row.items()} for row in rows])
    missing = (0, LONGEST - batch["input_ids"].shape[1])
    fill = {"labels": IGNORED}
    batch = {name: torch.nn.functional.pad(one, missing, value=fill.get(name, 0)) for name, one in batch.items()}
    positions = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    return {"position_ids": positions.contiguous(), **batch}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
    write_records(Combination, lambda case, output: training_record(lambda: make_trainer(case, output / case.name)))
