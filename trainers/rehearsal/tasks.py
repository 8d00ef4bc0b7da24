"""Rehearsals of preference and reinforcement learning: TRL's trainer on the shrunken model, with rows to learn from.

A reward model is rehearsed as supervised training: its scores cannot be compared as logits are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...ds_configs.memory.generation import generated_sequences
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.job import GROUPED_TASKS, TrainingJob
from ...ds_configs.specs.layout import Layout
from ...ds_configs.specs.model import ModelSpec
from ...ds_configs.specs.tasks import TASKS
from ...plugins.peft import add_lora
from ...plugins.transformers.second_model import load_second_model, shard_by_layer
from ...plugins.transformers.training_arguments import byte_tokenizer, class_of_task, weights_dtype
from ..data.models import StartingModel, load_config, load_model
from ..parallel.planned import planned_parallelism

REHEARSED = ("dpo", "kto", "orpo", "cpo", *GROUPED_TASKS)


def small_task(plan: Plan, alone: TrainingJob, model: ModelSpec, layout: Layout) -> TrainingJob:
    """Return the job of a rehearsal with the plan's task: completions of the same share of a sequence by `generate`.

    `alone` is its supervised job, and `model` the shrunken one, which is also the reference.
    """
    planned = plan.job
    if planned.task not in REHEARSED:
        return alone
    job = replace(alone, task=planned.task, beta=planned.beta, loss="auto")
    if planned.task in GROUPED_TASKS:
        share = planned.generated_tokens / planned.seq_len_tokens
        completions = layout.data_parallel_size * generated_sequences(layout, job)
        sizes = range(min(planned.generations, completions), 1, -1)
        group = next((size for size in sizes if completions % size == 0), 2)
        tokens = min(alone.seq_len_tokens - 8, max(1, round(share * alone.seq_len_tokens)))
        job = replace(job, generation="transformers", num_generations=group, completion_tokens=tokens)
    job = job.completed(model) if planned.reference is not None else job
    choice = plan.chosen.placements.get("reference")
    return job if choice is None or job.reference is None else job.placed("reference", choice.placement)


def task_trainer(plan: Plan, arguments: Any, engine: str, rows: int) -> Any:
    """Return TRL's trainer of a rehearsal's plan, with this many rows whose preferred answers are one letter."""
    from datasets import Dataset

    job = plan.job
    source = StartingModel(model=plan.model.name, revision=None, method=job.method)
    dtype = weights_dtype(arguments, method=job.method, trained=job.weights_dtype)
    model = load_model(source, load_config(source), dtype, arguments.seed, engine=engine)
    if job.method != "full":
        targets, fp32 = ",".join(job.lora_targets), engine != "deepspeed"
        model = add_lora(model, rank=job.lora_rank, targets=targets, fp32_adapters=fp32)
    further: dict[str, Any] = {}
    placement = None if job.reference is None else job.reference_placement
    if placement == "sharded" and engine == "fsdp2" and job.task not in GROUPED_TASKS:
        further["ref_model"] = load_second_model(plan.model.name, dtype=dtype)
        shard_by_layer(further["ref_model"], arguments.device.type, arguments.world_size)
    if job.task in GROUPED_TASKS:
        further["reward_funcs"] = [_preferred_letters]
    tokenizer = byte_tokenizer(plan.model.dimensions.vocab_size)
    tokenizer.pad_token = tokenizer.eos_token
    data = Dataset.from_list([_row(job, index) for index in range(rows)])
    return planned_parallelism(plan).make_trainer(
        model=model,
        trainer_class=class_of_task(str(TASKS[job.task].trainer)),
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        **further,
    )


def _row(job: TrainingJob, index: int) -> dict[str, Any]:
    """Return a row: its longest sequence has all tokens of the plan, with the end of the answer."""
    answer = job.seq_len_tokens - 9
    prompt, good, bad = f"{index % 97:07d}=", "a" * answer, "b" * max(1, answer // 2)
    if job.task in GROUPED_TASKS:
        return {"prompt": prompt}
    if job.task == "kto":
        is_good = index % 2 == 0
        return {"prompt": prompt, "completion": good if is_good else bad, "label": is_good}
    return {"prompt": prompt, "chosen": good, "rejected": bad}


def _preferred_letters(completions: list[str], **others: Any) -> list[float]:
    return [text.count("a") / max(1, len(text)) for text in completions]
