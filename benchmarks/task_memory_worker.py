"""Runs on every rank of `task_memory.py`: trains each task for a few steps with the byte meter on."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from memory_grid import run_cases
from metered_training import STEPS, plan_of, run_settings
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import GROUPED_TASKS
from shardwright.ds_configs.specs.tasks import TASKS
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.metering import ByteMeter, meter_trainer
from shardwright.plugins.peft import add_lora
from shardwright.plugins.transformers.second_model import load_second_model, shard_by_layer
from shardwright.plugins.transformers.training_arguments import (
    byte_tokenizer,
    class_of_task,
    training_arguments,
    weights_dtype,
)
from task_memory_cases import PROMPT_BYTES, SEQ_LEN, Case
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, set_seed


def rows_of(case: Case, count: int) -> Dataset:
    """Return rows whose longest sequence has exactly `SEQ_LEN` tokens, as the plan assumes, beside shorter ones."""
    choose = random.Random(0)

    def text(length: int) -> str:
        return "".join(choose.choice("abcdefghij") for _ in range(length))

    full = SEQ_LEN - PROMPT_BYTES - 1
    rows = []
    for index in range(count):
        row: dict[str, Any] = {"prompt": text(PROMPT_BYTES)}
        if case.task == "kto":
            # Rows alternate, so that each batch of two has both lengths and labels.
            row |= {"completion": text(full if index % 2 == 0 else full // 2), "label": index % 2 == 0}
        elif case.task not in GROUPED_TASKS:
            row |= {"chosen": text(full), "rejected": text(full // 2)}
        rows.append(row)
    return Dataset.from_list(rows)


def equal_lengths(completions: list[str], **others: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def measure(case: Case) -> dict[str, Any]:
    """Train one case through TRL's trainer and return what lived on this rank."""
    layout, job = case.full_layout(), case.job()
    plan = plan_of(layout, case.spec(), parse_hardware(f"{case.ranks}xCPU"), job)
    settings = run_settings(plan) | {"dataloader_drop_last": True}
    if case.task in GROUPED_TASKS:
        # No completion ends early, so that every one has the length that the plan assumes.
        settings["generation_kwargs"] = {"min_new_tokens": job.generated_tokens}
    config = AutoConfig.for_model(**case.config)
    kind: Any = AutoModelForSequenceClassification if case.task == "reward" else AutoModelForCausalLM
    if case.task == "reward":
        config.num_labels = 1
    directory = Path(sys.argv[2]).parent / f"model-{case.name}"
    set_seed(1)
    if os.environ["RANK"] == "0":
        # Before ZeRO-3 divides every model that is made.
        kind.from_config(config, dtype=torch.float32, trust_remote_code=False).save_pretrained(directory)
    arguments = training_arguments(settings, configure_cpu_ranks(layout.engine), task=job.task)  # type: ignore[arg-type]
    dtype = weights_dtype(arguments, method=job.method, trained=job.weights_dtype)
    rows = rows_of(case, layout.global_batch_size * (STEPS + 1))
    tokenizer = byte_tokenizer(config.vocab_size)
    tokenizer.pad_token = tokenizer.eos_token
    further: dict[str, Any] = {}
    if case.task in GROUPED_TASKS:
        further["reward_funcs"] = [equal_lengths]
    torch.distributed.barrier()
    with ByteMeter() as meter:
        model = kind.from_pretrained(directory, dtype=dtype, trust_remote_code=False)
        if job.method != "full":
            model = add_lora(
                model, rank=job.lora_rank, targets="all-linear", fp32_adapters=layout.engine != "deepspeed"
            )
        if job.reference is not None and layout.engine == "fsdp2" and job.method == "full":
            further["ref_model"] = load_second_model(str(directory), dtype=torch.bfloat16)
            shard_by_layer(further["ref_model"], arguments.device.type, case.ranks)
        trainer = class_of_task(str(TASKS[job.task].trainer))(
            model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, **further
        )
        del model, further
        meter_trainer(trainer, meter)
        trainer.train()
        reading = meter.reading()
    return asdict(reading) | {"peak_bytes": reading.peak_bytes}


if __name__ == "__main__":
    run_cases(Case, measure)
