"""Runs on every rank of `long_sequence_memory.py`: trains each case for a few steps with the byte meter on."""

from __future__ import annotations

import os
from typing import Any

import torch
from long_sequence_cases import LOGITS_BYTES_OF_A_TILE, Case
from memory_grid import run_cases
from metered_training import plan_of, random_samples, run_settings
from shardwright.ds_configs.memory import activations
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.metering import ByteMeter, meter_trainer
from shardwright.plugins.transformers.training_arguments import training_arguments
from shardwright.trainers.parallel.planned import planned_parallelism
from transformers import AutoConfig, AutoModelForCausalLM, default_data_collator, set_seed


def measure(case: Case) -> dict[str, Any]:
    """Train one case and return what lived on this rank in the last step, and whether the limit ended the run."""
    plan = plan_of(case.full_layout(), case.spec(), parse_hardware(f"{case.ranks}xCPU"), case.job())
    engine = plan.chosen.layout.engine
    if engine == "single":
        # With these, Accelerate wraps the model for one rank of DDP.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    arguments = training_arguments(run_settings(plan), configure_cpu_ranks(None if engine == "single" else engine))
    set_seed(1)
    config = AutoConfig.for_model(**case.config)
    # Samples of a complete run are the data set's, not the step's.
    samples = random_samples(plan)
    with ByteMeter(limit_bytes=case.limit_bytes) as meter:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        trainer = planned_parallelism(plan).make_trainer(
            model=model,
            args=arguments,
            train_dataset=samples,
            data_collator=default_data_collator,
        )
        del model
        meter_trainer(trainer, meter)
        try:
            trainer.train()
            is_out_of_memory = False
        except torch.OutOfMemoryError:
            is_out_of_memory = True
        reading = meter.reading()
    return {
        "peak_bytes": reading.peak_bytes,
        "peaks": reading.peaks,
        "host_bytes": reading.host_peak_bytes,
        "out_of_memory": is_out_of_memory,
        "loss": None if is_out_of_memory else trainer.state.log_history[-1]["train_loss"],
    }


if __name__ == "__main__":
    activations.LOGITS_BYTES_OF_A_TILE = LOGITS_BYTES_OF_A_TILE
    run_cases(Case, measure)
