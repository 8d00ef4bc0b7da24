"""Runs on every rank of `parallel_memory.py`: trains each case for a few steps with the byte meter on."""

from __future__ import annotations

from typing import Any

from memory_grid import run_cases
from metered_training import plan_of, random_samples, run_settings
from parallel_memory_cases import Case
from shardwright.ds_configs.memory.rank_parameters import pipeline_stages
from shardwright.ds_configs.plan.plan import Plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.metering import ByteMeter, meter_trainer
from shardwright.plugins.transformers.training_arguments import training_arguments, weights_dtype
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed


def measure(case: Case) -> dict[str, Any]:
    """Train one case and return what lived on this rank in the last step."""
    plan = plan_of(case.full_layout(), case.spec(), parse_hardware(f"{case.ranks}xCPU"), case.job())
    arguments: TrainingArguments = training_arguments(run_settings(plan), configure_cpu_ranks("deepspeed"))
    set_seed(1)
    with ByteMeter() as meter:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**case.config),
            dtype=weights_dtype(arguments, method="full"),
            trust_remote_code=False,
        )
        trainer = _trainer(case, plan, arguments, model)
        del model
        meter_trainer(trainer, meter)
        trainer.train()
        reading = meter.reading()
    return {"peaks": reading.peaks, "peak_bytes": reading.peak_bytes}


def _trainer(case: Case, plan: Plan, arguments: TrainingArguments, model: Any) -> Trainer:
    inputs = {"train_dataset": random_samples(plan), "data_collator": default_data_collator}
    if case.axis == "pp":
        from shardwright.trainers.parallel.pipeline import PipelineTrainer

        layout = plan.chosen.layout
        stages = pipeline_stages(plan.model, plan.job, layout.pp, tensor_parallel_size=layout.tp)
        trainer: Trainer = PipelineTrainer(
            model=model, args=arguments, pipeline_stages=stages, tensor_parallel_size=layout.tp, **inputs
        )
        return trainer
    callback = _callback(case.axis)
    callback.prepare(arguments, model)
    trainer = Trainer(model=model, args=arguments, **inputs)
    callback.attach(trainer)
    return trainer


def _callback(axis: str) -> Any:
    if axis == "tp":
        from shardwright.trainers import TensorParallelCallback

        return TensorParallelCallback(2)
    if axis == "ep":
        from shardwright.trainers import ExpertParallelCallback

        return ExpertParallelCallback(2)
    from shardwright.trainers import SequenceParallelCallback

    return SequenceParallelCallback(2)


if __name__ == "__main__":
    run_cases(Case, measure, lambda records: {"ranks": list(records)})
