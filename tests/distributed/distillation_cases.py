"""Models, samples and layouts for one optimizer step of distillation, which must be equal under all layouts.

Ranks run this file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import deepspeed_configuration
from engine_settings import engine_settings
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.trainers.distillation.config import DistillationConfig, OnPolicy
from shardwright.trainers.distillation.feature_matching import AttentionTerm, HiddenStateTerm
from small_models import llama

SAMPLES = 12
VOCAB = 512
LONGEST = 24
ALPHA, TEMPERATURE = 0.7, 2.0
Z_WEIGHT = 0.01
LEARNING_RATE = 1024.0
"""Large, so that the rounding of the weights after the step is small beside the gradient."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Split of the step's twelve samples over ranks and micro-batches, and placement of weights."""

    engine: str = "ddp"
    zero_stage: int = 0
    accumulation: int = 1
    implementation: str = "fused"
    teacher: str = "replica"
    packed: bool = False
    checkpointing: bool = False
    sequence_parallel: int = 1
    on_policy: bool = False
    features: bool = False
    lora: bool = False
    idle_rank: bool = False
    """Whether the second rank's samples have no label at all."""
    own_term: bool = False
    """Whether a subclass adds a term of the logits to the loss."""

    @property
    def name(self) -> str:
        engine = f"zero{self.zero_stage}" if self.engine == "deepspeed" else self.engine
        extra = "-packed" * self.packed + "-checkpointed" * self.checkpointing
        extra += f"-sp{self.sequence_parallel}" * (self.sequence_parallel > 1) + "-on-policy" * self.on_policy
        extra += "-features" * self.features + "-lora" * self.lora + "-idle-rank" * self.idle_rank
        extra += "-own-term" * self.own_term
        return f"{engine}-x{self.accumulation}-{self.implementation}-{self.teacher}{extra}"

    def arguments(self, world_size: int) -> dict[str, Any]:
        """Return keywords of TrainingArguments with plain SGD, so that a step shows the gradient."""
        data_ranks = world_size // self.sequence_parallel
        rows = 1 if self.packed else SAMPLES // (data_ranks * self.accumulation)
        arguments = engine_settings(
            self.engine,
            rows,
            deepspeed_configuration(self.zero_stage) if self.engine == "deepspeed" else None,
            gradient_accumulation_steps=self.accumulation,
            gradient_checkpointing=self.checkpointing,
            optim="sgd",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=0.0,
            max_steps=1,
            train_sampling_strategy="sequential" if self.idle_rank else "random",
        )
        if self.sequence_parallel > 1:
            arguments["parallelism_config"] = sequence_parallelism(self.sequence_parallel, data_ranks)
        return arguments


def sequence_parallelism(ranks: int, data_ranks: int) -> Any:
    """Return Accelerate's description of Ulysses sequence parallelism."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_size=ranks, sp_backend="deepspeed", dp_shard_size=data_ranks, sp_handler=handler)


SINGLE = [
    Layout(),
    Layout(accumulation=3),
    Layout(accumulation=3, implementation="plain"),
    Layout(packed=True, accumulation=3),
]
"""Micro-batches of one process."""
LAYOUTS = [
    Layout(packed=True, accumulation=3),
    Layout(checkpointing=True),
    Layout(engine="deepspeed", zero_stage=1, accumulation=3),
    Layout(engine="deepspeed", zero_stage=2, teacher="sharded"),
    Layout(engine="deepspeed", zero_stage=3, teacher="sharded", accumulation=3),
    Layout(engine="fsdp2", teacher="sharded"),
    Layout(engine="fsdp2", teacher="sharded", implementation="plain"),
    Layout(engine="deepspeed", zero_stage=2, accumulation=12, sequence_parallel=2),
    Layout(engine="deepspeed", zero_stage=3, accumulation=12, sequence_parallel=2),
]

ON_POLICY = [
    Layout(on_policy=True),
    Layout(engine="deepspeed", zero_stage=3, teacher="sharded", on_policy=True),
    Layout(engine="fsdp2", teacher="sharded", on_policy=True),
]

FEATURES = [
    Layout(features=True, accumulation=3),
    Layout(engine="deepspeed", zero_stage=2, features=True),
    Layout(engine="deepspeed", zero_stage=3, teacher="sharded", features=True, checkpointing=True),
    Layout(engine="fsdp2", teacher="sharded", features=True, accumulation=3),
]

LORA = [
    Layout(lora=True, accumulation=3),
    Layout(engine="deepspeed", zero_stage=3, teacher="sharded", lora=True),
    Layout(engine="fsdp2", teacher="sharded", lora=True),
]
IDLE_RANK = [
    Layout(idle_rank=True),
    Layout(engine="deepspeed", zero_stage=3, teacher="sharded", idle_rank=True),
    Layout(engine="fsdp2", teacher="sharded", idle_rank=True),
]
OWN_TERM = [
    Layout(own_term=True, implementation="auto", checkpointing=True),
    Layout(engine="deepspeed", zero_stage=3, teacher="sharded", own_term=True, accumulation=3),
    Layout(engine="fsdp2", teacher="sharded", own_term=True, accumulation=3),
    Layout(engine="deepspeed", zero_stage=3, accumulation=12, sequence_parallel=2, own_term=True),
]
EVERY = (*SINGLE, *LAYOUTS, *ON_POLICY, *FEATURES, *LORA, *IDLE_RANK, *OWN_TERM)


def models(directory: Path) -> tuple[Path, Path]:
    return directory / "student", directory / "teacher"


def save_models(directory: Path) -> None:
    """Make a student and a teacher of another width and depth, whose head is wider than the vocabulary."""
    sizes = ((64, 2, VOCAB, 1), (96, 3, VOCAB + 24, 2))
    for path, (hidden, layers, vocab, seed) in zip(models(directory), sizes, strict=True):
        llama(
            seed=seed,
            hidden_size=hidden,
            num_hidden_layers=layers,
            vocab_size=vocab,
            max_position_embeddings=256,
            initializer_range=0.1,
        ).save_pretrained(path)


def distillation(layout: Layout) -> DistillationConfig:
    return DistillationConfig(
        alpha=ALPHA,
        temperature=TEMPERATURE,
        divergence="reverse_kl",
        implementation=layout.implementation,  # type: ignore[arg-type]
        hidden_states=HiddenStateTerm(weight=0.5) if layout.features else None,
        attention=AttentionTerm(weight=0.5) if layout.features else None,
        on_policy=OnPolicy(max_new_tokens=6) if layout.on_policy else None,
    )


def samples(*, idle_half: bool = False) -> list[dict[str, Any]]:
    """Return samples of different lengths with prompts of different lengths, so that means of means differ."""
    import random

    chosen = []
    draw = random.Random(5)
    for index in range(SAMPLES):
        length = 8 + 4 * (index % 5)
        ids = [draw.randrange(1, VOCAB) for _ in range(length)]
        masked = length if idle_half and index >= SAMPLES // 2 else 1 + (3 * index) % (length - 2)
        chosen.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
    return chosen


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return padded(rows, max(len(row["input_ids"]) for row in rows))


def collate_to_longest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Pad on the right to one length for all batches: gloo cannot gather tensors of different sizes."""
    return padded(rows, LONGEST)


def padded(rows: list[dict[str, Any]], longest: int) -> dict[str, Any]:
    import torch

    padding = {"input_ids": 0, "labels": -100}
    batch = {
        name: torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])
        for name, fill in padding.items()
    }
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    positions = torch.arange(longest)
    batch["attention_mask"] = (positions < lengths[:, None]).long()
    batch["position_ids"] = positions.expand(len(rows), -1).contiguous()
    return batch


def packed(world_size: int, accumulation: int) -> list[dict[str, Any]]:
    """Return one packed sample per micro-batch, with positions that restart at each document."""
    rows, count = samples(), world_size * accumulation
    joined = []
    for first in range(count):
        documents = rows[first::count]
        sample: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        for document in documents:
            sample["input_ids"] += document["input_ids"]
            sample["labels"] += document["labels"]
            sample["position_ids"] += range(len(document["input_ids"]))
        joined.append(sample)
    return joined


def collate_packed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    assert len(rows) == 1
    return {name: torch.tensor([values]) for name, values in rows[0].items()}


def with_z_term() -> type:
    """Return a subclass that adds ``Z_WEIGHT`` times the squared log-normalizer of each labelled token."""
    import torch
    from shardwright.trainers.distillation.trainer import DistillationTrainer

    class WithZTerm(DistillationTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            if "shift_labels" in inputs:
                is_labelled = inputs["shift_labels"] != -100
                logits = outputs.logits
            else:
                is_labelled = inputs["labels"][:, 1:] != -100
                logits = outputs.logits[:, :-1]
            z_sum = (torch.logsumexp(logits.float(), -1)[is_labelled] ** 2).sum()
            loss = loss + self.mean_over_step(Z_WEIGHT * z_sum, is_labelled.sum(), num_items_in_batch)
            return (loss, outputs) if return_outputs else loss

    return WithZTerm


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
    trainer = (with_z_term() if layout.own_term else DistillationTrainer)(
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
