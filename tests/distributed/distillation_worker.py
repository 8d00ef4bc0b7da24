"""Rank script: train one step under a layout and write the weights."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distillation_cases import (
    EVERY,
    VOCAB,
    Layout,
    collate,
    collate_packed,
    collate_to_longest,
    distillation,
    models,
    packed,
    samples,
)
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks


def step(layout: Layout, directory: Path, output: Path, world_size: int) -> None:
    import torch
    from safetensors.torch import save_file
    from shardwright.plugins.peft import add_lora
    from shardwright.plugins.transformers.teacher_placement import load_teacher
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer
    from shardwright.trainers.distillation.trainer import DistillationTrainer
    from transformers import AutoModelForCausalLM, TrainingArguments

    overrides: dict[str, Any] = configure_cpu_ranks(layout.engine)  # type: ignore[arg-type]
    settings = layout.arguments(world_size)
    arguments = TrainingArguments(str(output / layout.name), **settings, **overrides)
    student_path, teacher_path = models(directory)
    student = AutoModelForCausalLM.from_pretrained(student_path, attn_implementation="sdpa")
    if layout.lora:
        student = add_lora(student, rank=4, targets=None, fp32_adapters=True)
    teacher = load_teacher(
        str(teacher_path), revision=None, placement=layout.teacher, dtype=torch.float32, engine=layout.engine
    )
    trainer = DistillationTrainer(
        model=student,
        args=arguments,
        teacher=teacher,
        teacher_placement=layout.teacher,  # type: ignore[arg-type]
        distillation=distillation(layout),
        train_dataset=packed(world_size, layout.accumulation) if layout.packed else samples(idle_half=layout.idle_rank),
        data_collator=collator(layout),
        processing_class=byte_tokenizer(VOCAB) if layout.on_policy else None,
    )
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if arguments.process_index == 0:
        save_file(
            {name: value.float().contiguous() for name, value in state.items()}, output / f"{layout.name}.safetensors"
        )
        (output / f"{layout.name}.json").write_text(json.dumps(trainer.state.log_history))


def collator(layout: Layout) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    if layout.packed:
        return collate_packed
    return collate_to_longest if layout.sequence_parallel > 1 else collate


if __name__ == "__main__":
    chosen = next(layout for layout in EVERY if layout.name == sys.argv[3])
    step(chosen, Path(sys.argv[1]), Path(sys.argv[2]), int(os.environ["WORLD_SIZE"]))
