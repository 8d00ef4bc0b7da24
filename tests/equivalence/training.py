"""One training run of a case, the same code on every rank and in the single process that it is compared with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from equivalence.cases import CASES, Case, padded, probe_batch, samples
from equivalence.records import logged
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import (
    prepare_model_directory_save,
    save_model_directory,
    training_arguments,
)
from shardwright.trainers.parallel.trainer_for import engine_logits, parallelism_of


def train_case(case: Case, models: Path, output: Path, *, change: Callable[[Any], None] | None = None) -> None:
    """Train, save the model directory, and let rank 0 write losses, gradient norms and the live engine's logits.

    `change` is applied to the trainer before it trains.
    """
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, set_seed

    engine = case.strategy.engine
    overrides = {"use_cpu": True} if engine == "single" else configure_cpu_ranks(engine)
    arguments = training_arguments(case.training_arguments(output), overrides)
    prepare_model_directory_save(arguments)
    set_seed(arguments.seed)
    model = AutoModelForCausalLM.from_pretrained(models / case.family, dtype="float32", trust_remote_code=False)
    trainer = parallelism_of(case.strategy).make_trainer(
        model=model, args=arguments, train_dataset=samples(), data_collator=padded
    )
    if change is not None:
        change(trainer)
    trainer.train()
    logits = engine_logits(trainer, probe_batch()["input_ids"])
    save_model_directory(trainer, str(output / "model"))
    if arguments.process_index == 0:
        save_file({"logits_BTV": logits}, output / "live_logits.safetensors")
        record = {
            "world_size": arguments.world_size,
            "losses": logged(trainer),
            "grad_norms": list(map(float, logged(trainer, "grad_norm"))),
        }
        (output / "record.json").write_text(json.dumps(record))


if __name__ == "__main__":
    chosen = next(case for case in CASES if case.name == sys.argv[3])
    train_case(chosen, Path(sys.argv[1]), Path(sys.argv[2]))
