"""The pipelines whose training must equal that of the stock Trainer in one process. Ranks run this file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from engine_settings import engine_settings
from equivalence.records import logged
from fresh_process import forget_last_run
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.deepspeed_pipeline.engine import whole_logits
from shardwright.plugins.transformers.training_arguments import save_model_directory
from shardwright.trainers.data.samples import collate
from shardwright.trainers.parallel.pipeline.trainer import PipelineTrainer
from small_models import llama
from transformers import TrainerCallback, TrainingArguments

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


def trainer_of(case: Case, output: Path, *, model: Any = None, callbacks: Any = None, **more: Any) -> PipelineTrainer:
    overrides = configure_cpu_ranks("deepspeed")
    arguments = TrainingArguments(**case.arguments(output, pipeline=True, **more), **overrides)
    model = untrained_model(case.family) if model is None else model
    return PipelineTrainer(
        model,
        arguments,
        pipeline_stages=case.stages,
        tensor_parallel_size=case.tensor_ranks,
        dual_pipe=case.dual_pipe,
        callbacks=callbacks,
        **data_of(case),
    )


def run(case: Case, output: Path) -> dict[str, Any]:
    trainer = trainer_of(case, output)
    trainer.train()
    evaluation = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(output / "model"))
    return {"losses": logged(trainer, "loss"), "norms": logged(trainer, "grad_norm"), "evaluation": evaluation}


class Events(TrainerCallback):
    """Counts the events of a training and what they carry."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.complete = True

    def _count(self, name: str, kwargs: dict[str, Any]) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        if "step_begin" in self.counts:
            self.complete &= all(kwargs.get(key) is not None for key in ("model", "optimizer", "lr_scheduler"))
            self.complete &= kwargs["model"].config.vocab_size > 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count("step_begin", kwargs)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count("substep_end", kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count("step_end", kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count("evaluate", kwargs)


def interrupted(output: Path) -> dict[str, Any]:
    """Train, evaluate before and in between, and train the second half again from a checkpoint of the first."""
    events = Events()
    more = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    more |= {"include_num_input_tokens_seen": "non_padding", "max_steps": 4, "lr_scheduler_type": "cosine"}
    whole = trainer_of(RESUMED, output, callbacks=[events], **more)
    before = whole.evaluate()["eval_loss"]
    whole.train()
    found = {"before": before, "whole": logged(whole, "loss"), "events": events.counts, "complete": events.complete}
    found |= {"evaluations": logged(whole, "eval_loss"), "tokens": whole.state.num_input_tokens_seen}
    probe = collate(samples(2, ragged=True, seed=5))
    logits = whole_logits(whole.model_wrapped, (probe["input_ids"], probe["attention_mask"]), probe["labels"])
    save_model_directory(whole, str(output / "model"))
    if os.environ["RANK"] == "0":
        torch.save(logits, output / "logits.pt")
    forget_last_run()
    resumed = trainer_of(RESUMED, output / "resumed", model=str(output / "model"), **more)
    found["from directory"] = resumed.evaluate()["eval_loss"]
    resumed.train(resume_from_checkpoint=str(output / "checkpoint-2"))
    return {**found, "resumed": logged(resumed, "loss"), "resumed from": resumed.state.global_step}


def upstream_norm() -> float:
    """Return the norm that DeepSpeed computes over two stages with one gradient of 3 and one of 4."""
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid
    from deepspeed.runtime.utils import clip_grad_norm_
    from deepspeed.utils import groups

    configure_cpu_ranks("deepspeed")
    grid = PipelineParallelGrid(topology=PipeDataParallelTopology(num_pp=2, num_dp=1))
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([3.0 + grid.get_stage_id()])
    groups.mpu = grid
    return float(clip_grad_norm_([parameter], max_norm=1e9, mpu=grid))


def main(output: Path, name: str) -> None:
    others: dict[str, Callable[[Path], Any]] = {"interrupted": interrupted, "upstream-norm": lambda _: upstream_norm()}
    if name in others:
        record = others[name](output / name)
    else:
        cases = TWO_RANKS if os.environ["WORLD_SIZE"] == "2" else FOUR_RANKS
        record = run(next(case for case in cases if case.name == name), output / name)
    if os.environ["RANK"] == "0":
        (output / f"{name}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
