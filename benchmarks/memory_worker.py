"""Runs on every rank of a grid of metered memory: trains each case for a few steps with the byte meter on."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from metered_training import STEPS, plan_of, random_samples, run_settings, train_metered
from shardwright.ds_configs.memory import activations
from shardwright.ds_configs.models.images import image_sizes
from shardwright.ds_configs.plan.plan import Plan
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
from shardwright.trainers.parallel.planned import planned_parallelism
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    default_data_collator,
    set_seed,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fresh_process import forget_last_run

Record = Mapping[str, Any]


def plan_for(case: Any) -> Plan:
    return plan_of(case.full_layout(), case.spec(), parse_hardware(f"{case.ranks}xCPU"), case.job())


def of_stock_trainer(case: Any) -> Record:
    """Train one case through the stock Trainer, of a model that reads images with one in each sequence."""
    plan = plan_for(case)
    batch = image_batch(plan, case) if plan.model.reads_images else None
    try:
        reading = train_metered(plan, case.config, ByteMeter(), batch=batch)
    except Exception as error:
        # A class that cannot be trained so fails on all ranks alike; the other cases go on.
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return asdict(reading) | {"peak_bytes": reading.peak_bytes}


def image_batch(plan: Plan, case: Any) -> dict[str, torch.Tensor]:
    """Return a micro-batch of random text, with images in each sequence, as the family's processor returns it."""
    config = AutoConfig.for_model(**case.config)
    sizes, count, vision = image_sizes(plan.model, plan.job), plan.chosen.layout.micro_batch_size, config.vision_config
    assert sizes is not None
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 4000, (count, plan.job.seq_len_tokens), generator=generator)
    types = torch.zeros_like(tokens)
    types[:, 1 : 1 + sizes.tokens] = 1
    labels = tokens.masked_fill(types == 1, -100)
    tokens[types == 1] = config.image_token_id
    batch = {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
    if "spatial_merge_size" in vision.to_dict():
        patch = vision.patch_size
        side = round(sizes.patches**0.5)
        width = vision.in_channels * vision.temporal_patch_size * patch**2
        batch["pixel_values"] = torch.randn(count * sizes.patches, width, generator=generator)
        batch["image_grid_thw"] = torch.tensor([[1, side, side]] * count)
        return batch | {"mm_token_type_ids": types}
    size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    pixels = torch.randn(count * sizes.images, 3, size, size, generator=generator)
    batch["pixel_values"] = pixels
    if "image_grid_pinpoints" in case.config:
        batch["pixel_values"] = pixels.unflatten(0, (count, sizes.images))
        batch["image_sizes"] = torch.tensor([plan.job.image_sides] * count)
    return batch | ({"token_type_ids": types} if case.model == "gemma3" else {})


def of_planned_trainer(case: Any) -> Record:
    """Train one case through the Trainer of its layout; a limit of bytes may end it."""
    plan = plan_for(case)
    engine = plan.chosen.layout.engine
    if engine == "single":
        # With these, Accelerate wraps the model for one rank of DDP.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    arguments = training_arguments(run_settings(plan), configure_cpu_ranks(None if engine == "single" else engine))
    set_seed(1)
    config, dtype = AutoConfig.for_model(**case.config), weights_dtype(arguments, method="full")
    # Samples of a complete run are the data set's, not the step's.
    samples = random_samples(plan)
    with ByteMeter(limit_bytes=getattr(case, "limit_bytes", None)) as meter:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        trainer = planned_parallelism(plan).make_trainer(
            model=model, args=arguments, train_dataset=samples, data_collator=default_data_collator
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
    }


def task_rows(case: Any, count: int) -> Any:
    """Return rows whose longest sequence has exactly `SEQ_LEN` tokens, as the plan assumes, beside shorter ones."""
    from datasets import Dataset
    from task_memory import PROMPT_BYTES, SEQ_LEN

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


def of_task(case: Any) -> Record:
    """Train one case through TRL's trainer."""
    plan = plan_for(case)
    layout, job = plan.chosen.layout, plan.job
    settings = run_settings(plan) | {"dataloader_drop_last": True}
    if case.task in GROUPED_TASKS:
        # No completion ends early, so that every one has the length that the plan assumes.
        settings["generation_kwargs"] = {"min_new_tokens": job.generated_tokens}
    config = AutoConfig.for_model(**case.config)
    kind: Any = AutoModelForSequenceClassification if case.task == "reward" else AutoModelForCausalLM
    if case.task == "reward":
        config.num_labels = 1
    directory = Path(sys.argv[3]).parent / f"model-{case.name}"
    set_seed(1)
    if os.environ["RANK"] == "0":
        # Before ZeRO-3 divides every model that is made.
        kind.from_config(config, dtype=torch.float32, trust_remote_code=False).save_pretrained(directory)
    arguments = training_arguments(settings, configure_cpu_ranks(layout.engine), task=job.task)  # type: ignore[arg-type]
    dtype = weights_dtype(arguments, method=job.method, trained=job.weights_dtype)
    rows = task_rows(case, layout.global_batch_size * (STEPS + 1))
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


def fullest(records: Sequence[Record]) -> Record:
    """Return the record of the rank with the highest peak."""
    return max(records, key=lambda record: record.get("peak_bytes", 0))


MEASURES: Mapping[str, tuple[Callable[[Any], Record], Callable[[Sequence[Record]], Record]]] = {
    "memory_accuracy": (of_stock_trainer, fullest),
    "vision_memory": (of_stock_trainer, fullest),
    "long_sequence_memory": (of_planned_trainer, fullest),
    "parallel_memory": (of_planned_trainer, lambda records: {"ranks": list(records)}),
    "task_memory": (of_task, fullest),
}
"""What measures a case of a grid on each rank, and what combines the ranks' records."""


def main(name: str, cases: Path, output: Path) -> None:
    """Measure, on every rank, the cases of a file; rank 0 adds a line each to `output`."""
    grid, (measure, combine) = importlib.import_module(name), MEASURES[name]
    if name == "long_sequence_memory":
        activations.LOGITS_BYTES_OF_A_TILE = grid.LOGITS_BYTES_OF_A_TILE
    for values in json.loads(cases.read_text(encoding="utf-8")):
        case = grid.Case(**values)
        records: list[Any] = [measure(case)]
        if torch.distributed.is_initialized():
            own, records = records[0], [None] * case.ranks
            torch.distributed.all_gather_object(records, own)
        if os.environ.get("RANK", "0") == "0":
            combined = combine(records)
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": asdict(case), **combined}) + "\n")
            print("measured", case.name, combined.get("failed", ""), flush=True)
        forget_last_run()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
