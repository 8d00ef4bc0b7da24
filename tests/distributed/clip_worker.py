"""Runs on every rank: one optimizer step of CLIP distillation on sixteen pairs, however many ranks share them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shardwright.plugins.accelerate import configure_cpu_ranks


def main(directory: Path) -> None:
    from safetensors.torch import save_file
    from shardwright.trainers.distillation.clip_trainer import CLIPDistillationTrainer
    from test_distillation_clip import collate, pairs, tiny_clip
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        str(directory),
        per_device_train_batch_size=16 // int(os.environ["WORLD_SIZE"]),
        max_steps=1,
        optim="sgd",
        learning_rate=1024.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **configure_cpu_ranks("ddp"),
    )
    trainer = CLIPDistillationTrainer(
        model=tiny_clip(16, 1),
        teacher=tiny_clip(24, 2),
        args=arguments,
        train_dataset=pairs(16),
        data_collator=collate,
    )
    trainer.train()
    if arguments.process_index == 0:
        state = {name: value for name, value in trainer.model.state_dict().items() if "alignment" not in name}
        save_file(state, directory / "weights.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
