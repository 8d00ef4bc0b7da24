"""The pipelines whose training must equal that of the stock Trainer in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from engine_settings import engine_settings
from shardwright.trainers.data.samples import collate
from small_models import llama

STEPS = 5
VOCAB_SIZE = 96
MICRO_BATCH_SIZE = 2
LAYERS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str = "llama"
    zero_stage: int = 1
    accumulation: int = 1
    ragged: bool = False
    optimizer: str = "adamw_torch"
    replicas: int = 1
    stages: int = 2
    tensor_ranks: int = 1
    bf16: bool = False
    checkpointing: bool = False
    dual_pipe: bool = False
    max_steps: int = STEPS
    epochs: bool = False
    """Train two epochs whose last step has fewer micro-batches, instead of `max_steps`."""

    @property
    def name(self) -> str:
        flags = ["ragged"] * self.ragged + ["bf16"] * self.bf16 + ["recompute"] * self.checkpointing
        flags += [f"pp{self.stages}"] * (self.stages > 2)
        flags += [f"tp{self.tensor_ranks}"] * (self.tensor_ranks > 1)
        flags += ["dual"] * self.dual_pipe + ["epochs"] * self.epochs
        sizes = f"zero{self.zero_stage}-x{self.accumulation}-dp{self.replicas}"
        return "-".join([self.family, sizes, self.optimizer, *flags])

    def single_process(self) -> Case:
        return replace(self, zero_stage=0, checkpointing=False, dual_pipe=False)

    def arguments(self, output: Path, *, pipeline: bool, **more: Any) -> dict[str, Any]:
        batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        deepspeed = {
            "zero_optimization": {"stage": self.zero_stage, "reduce_bucket_size": 4096},
            **dict.fromkeys((*batch, "gradient_clipping"), "auto"),
            "bf16": {"enabled": "auto"},
        }
        settings = engine_settings(
            "deepspeed" if pipeline else "single",
            MICRO_BATCH_SIZE * (1 if pipeline else self.replicas),
            deepspeed,
            output_dir=str(output),
            per_device_eval_batch_size=3,
            gradient_accumulation_steps=self.accumulation,
            optim=self.optimizer,
            learning_rate=0.5 if self.optimizer == "sgd" else 5e-3,
            weight_decay=0.1,
            warmup_steps=1,
            max_grad_norm=0.5,
            num_train_epochs=2,
            max_steps=-1 if self.epochs else self.max_steps,
            bf16=self.bf16,
            gradient_checkpointing=self.checkpointing,
        )
        return settings | more


def untrained_model(family: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(3)
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, **sizes, **no_dropout))
    return llama(
        seed=3,
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=4 if family == "llama-4" else LAYERS,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=family == "llama-tied",
    )


def samples(count: int, *, ragged: bool, seed: int = 0) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 21, (count,), generator=draw).tolist() if ragged else [12] * count
    rows = [torch.randint(0, VOCAB_SIZE, (length,), generator=draw).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def data_of(case: Case) -> dict[str, Any]:
    per_step = MICRO_BATCH_SIZE * case.accumulation * case.replicas
    count = per_step + MICRO_BATCH_SIZE * case.replicas if case.epochs else per_step * STEPS
    return {
        "train_dataset": samples(count, ragged=case.ragged),
        "eval_dataset": samples(7, ragged=case.ragged, seed=1),
        "data_collator": collate,
    }


TWO_RANKS = [
    Case(),
    Case(accumulation=3, ragged=True, zero_stage=0, optimizer="sgd"),
    Case(family="gpt2", accumulation=3, ragged=True, zero_stage=0, optimizer="sgd", checkpointing=True),
    Case(family="llama-tied", accumulation=3, ragged=True, optimizer="sgd"),
    Case(accumulation=3, ragged=True, epochs=True),
    Case(family="llama-tied", accumulation=3, bf16=True),
    Case(family="llama-tied", accumulation=3, bf16=True, zero_stage=0),
    Case(family="llama-4", accumulation=4, ragged=True, dual_pipe=True),
    Case(family="llama-4", accumulation=5, ragged=True, dual_pipe=True, epochs=True, zero_stage=0, optimizer="sgd"),
]
# Attention does not depend on the bias of its keys: Adam makes whole steps of the rounding errors in that gradient, so
# that GPT-2's weights are compared after plain SGD alone.
FOUR_RANKS = [
    Case(replicas=2, accumulation=3, ragged=True, zero_stage=0, optimizer="sgd"),
    Case(family="gpt2", replicas=2, ragged=True, optimizer="sgd"),
    Case(family="llama-tied", tensor_ranks=2, accumulation=3, ragged=True, zero_stage=0, optimizer="sgd"),
    Case(family="llama-4", stages=4, accumulation=5, ragged=True, epochs=True),
]
RESUMED = Case(family="llama-tied", accumulation=3, ragged=True, optimizer="adamw_torch")
"""Trains in two halves too."""
