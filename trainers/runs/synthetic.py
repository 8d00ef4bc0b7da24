"""A Trainer of a plan's layout on synthetic tokens, for rehearsals and trials."""

from __future__ import annotations

from typing import Any

from ...ds_configs.plan.plan import Plan
from ...plugins.peft import add_lora
from ...plugins.transformers.training_arguments import weights_dtype
from ..data.models import StartingModel, load_config, load_model
from ..parallel.trainer_for import planned_parallelism
from .clock import ProgressSender


def synthetic_trainer(plan: Plan, arguments: Any, engine: str, samples: Any, *, random_weights: bool) -> Any:
    """Return a Trainer of the plan's model, method and layout, which reports its progress.

    Args:
        plan: The plan.
        arguments: `TrainingArguments`.
        engine: Engine of the ranks.
        samples: Samples of one length, without padding.
        random_weights: Whether the model's weights are random.
    """
    from transformers import default_data_collator

    job, parallelism = plan.job, planned_parallelism(plan)
    source = StartingModel(
        model=plan.model.name, revision=plan.model.revision, random_weights=random_weights, method=job.method
    )
    dtype = weights_dtype(arguments, method=job.method, trained=job.weights_dtype)
    stages = parallelism.is_pipeline
    model = load_model(source, load_config(source), dtype, arguments.seed, engine=engine, for_stages=stages)
    if job.method != "full":
        targets, fp32 = ",".join(job.lora_targets), engine != "deepspeed"
        model = add_lora(model, rank=job.lora_rank, targets=targets, fp32_adapters=fp32)
    trainer = parallelism.make_trainer(
        model=model,
        args=arguments,
        revision=plan.model.revision,
        train_dataset=samples,
        data_collator=default_data_collator,
    )
    trainer.add_callback(ProgressSender())
    return trainer
