"""A Trainer with synthetic samples, for rehearsals and trials: it trains any task in the planned layout."""

from __future__ import annotations

from typing import Any

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.job import GROUPED_TASKS
from ...plugins.accelerate import Engine
from ...plugins.transformers.training_arguments import byte_tokenizer, weights_dtype
from ..data.models import StartingModel, load_config, load_model
from ..parallel.planned import planned_parallelism
from ..preferences.trainer import task_trainer
from ..runs.clock import ProgressSender
from ..runs.ranks import with_trained_parts


def synthetic_trainer(plan: Plan, arguments: Any, engine: Engine, samples: Any, *, random_weights: bool) -> Any:
    """Return a Trainer of the plan's task, model, method and layout, which reports its progress.

    Args:
        samples: Samples of one length, without padding; of a task other than `sft` rows of `task_rows`. They are stored
            where all ranks share what TRL computes from them.
    """
    from transformers import default_data_collator

    job, parallelism = plan.job, planned_parallelism(plan)
    source = StartingModel(
        model=plan.model.name, revision=plan.model.revision, random_weights=random_weights, method=job.method
    )
    model = load_model(
        source,
        load_config(source),
        weights_dtype(arguments, method=job.method, trained=job.weights_dtype),
        arguments.seed,
        engine=engine,
        for_stages=parallelism.is_pipeline,
        score_head=job.task == "reward",
    )
    targets = ",".join(job.lora_targets)
    model = with_trained_parts(model, job, engine, rank=job.lora_rank, targets=targets, variant=job.lora_variant)
    if job.task == "sft":
        trainer = parallelism.make_trainer(
            model=model,
            args=arguments,
            revision=plan.model.revision,
            train_dataset=samples,
            data_collator=default_data_collator,
        )
    else:
        if job.task in GROUPED_TASKS:
            # Completions of the planned length: none ends early.
            least = "min_new_tokens" if job.generation == "transformers" else "min_tokens"
            arguments.generation_kwargs = {**(arguments.generation_kwargs or {}), least: job.generated_tokens}
        tokenizer = byte_tokenizer(plan.model.dimensions.vocab_size)
        tokenizer.pad_token = tokenizer.eos_token
        trainer = task_trainer(
            plan,
            arguments,
            engine,
            name=plan.model.name,
            revision=plan.model.revision,
            reward=_preferred_letters if job.reward is None else job.reward.name,
            model=model,
            train_dataset=samples,
            processing_class=tokenizer,
        )
    trainer.add_callback(ProgressSender())
    return trainer


def task_rows(plan: Plan, count: int) -> list[dict[str, Any]]:
    """Return rows whose preferred answers are one letter; the longest sequence has all tokens of the plan."""
    job = plan.job
    length = job.seq_len_tokens - job.generated_tokens if job.task in GROUPED_TASKS else _PROMPT_TOKENS
    # A token ends each answer.
    answer = job.seq_len_tokens - length - 1
    good, bad = "a" * answer, "b" * max(1, answer // 2)
    rows: list[dict[str, Any]] = [{"prompt": f"{index % 97:0{length - 1}d}="[-length:]} for index in range(count)]
    for index, row in enumerate(rows):
        if job.task == "kto":
            row |= {"completion": bad if index % 2 else good, "label": index % 2 == 0}
        elif job.task not in GROUPED_TASKS:
            row |= {"chosen": good, "rejected": bad}
    return rows


_PROMPT_TOKENS = 8


def _preferred_letters(completions: list[str], **others: Any) -> list[float]:
    return [text.count("a") / max(1, len(text)) for text in completions]
