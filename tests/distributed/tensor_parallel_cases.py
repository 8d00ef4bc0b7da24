"""What is trained with tensor parallelism, and by one process, from the same weights on the same samples.

Ranks run this file.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from engine_settings import engine_settings
from fresh_process import forget_last_run
from safetensors.torch import save_file
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import save_model_directory
from shardwright.trainers.parallel.tensor import TensorParallelCallback
from torch.utils.data import IterableDataset
from transformers import Trainer

VOCAB_SIZE = 320
SEQ_LEN = 32
TP = 2
GLOBAL_BATCH_SIZE = 4
EVALUATION_SAMPLES = 18
"""No multiple of the batch size, so that the last batch is cut."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    family: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    zero_stage: int = 1
    optimizer: str = "sgd"
    accumulation: int = 1
    steps: int = 5
    arguments: dict[str, Any] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    vocabulary_parallel_head: bool = False
    iterable: bool = False
    draws: bool = False
    """Whether the collator replaces tokens by random ones of three generators."""
    own_loss: str = ""
    """Ranks by which a loss of its own is multiplied: `all`, or `groups` as Transformers counts them."""
    trains: str = ""
    """A pattern of the parameters that train; empty for all."""
    has_reference: bool = True

    def model(self) -> Any:
        """Return the model, its norms and biases away from their neutral values."""
        from transformers import AutoConfig, AutoModelForCausalLM, set_seed

        set_seed(0)
        head_dim = {"head_dim": 16} if self.family in ("gemma", "gemma2", "gemma3_text", "qwen3") else {}
        config = AutoConfig.for_model(self.family, **(SIZES | head_dim | {"tie_word_embeddings": False} | self.config))
        model = AutoModelForCausalLM.from_config(config).float()
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(re.search(self.trains, name) is not None)
        return model

    def training_arguments(self, output: str, *, batch_size: int, **more: Any) -> Any:
        """Return the arguments; `batch_size` is that of a tensor-parallel group."""
        from transformers import TrainingArguments

        settings = engine_settings(
            "single",
            batch_size,
            output_dir=output,
            per_device_eval_batch_size=batch_size,
            gradient_accumulation_steps=self.accumulation,
            max_steps=self.steps,
            learning_rate=0.5 if self.optimizer == "sgd" else 5e-3,
            optim=self.optimizer,
            # Above the rounding of gradients near zero, of which Adam with a smaller one makes whole steps.
            adam_epsilon=1e-6,
            lr_scheduler_type="constant",
            max_grad_norm=0.5,
        )
        return TrainingArguments(**(settings | self.arguments | more))

    def deepspeed_configuration(self) -> dict[str, Any]:
        """Return the section-less configuration that a user would have."""
        auto = (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
        )
        zero = {"stage": self.zero_stage, **self.deepspeed.get("zero_optimization", {})}
        return dict.fromkeys(auto, "auto") | self.deepspeed | {"zero_optimization": zero}

    def trainer(self, model: Any, arguments: Any) -> Any:
        kind = _OwnLoss(self.own_loss) if self.own_loss else Trainer
        data = Stream() if self.iterable else samples()
        return kind(
            model=model,
            args=arguments,
            train_dataset=data,
            data_collator=drawing if self.draws else None,
            eval_dataset=samples(EVALUATION_SAMPLES),
            compute_metrics=counts,
        )


def _OwnLoss(scaled_by: str) -> Any:
    from torch.nn.functional import cross_entropy

    class OwnLoss(Trainer):  # type: ignore[misc]
        """Computes the loss from the logits of the whole vocabulary, as a subclass of a user's does."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
            labels = inputs["labels"][:, 1:]
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            logits = outputs.logits[:, :-1].reshape(-1, outputs.logits.shape[-1])
            reduction = "mean" if num_items_in_batch is None else "sum"
            loss = cross_entropy(logits, labels.reshape(-1), ignore_index=-100, reduction=reduction)
            if num_items_in_batch is not None:
                ranks = self.accelerator.num_processes
                ranks = ranks // self.get_tp_size() if scaled_by == "groups" else ranks
                loss = loss / num_items_in_batch * ranks
            return (loss, {"loss": loss, "logits": outputs.logits}) if return_outputs else loss

    return OwnLoss


def samples(count: int = 64) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        length = int(torch.randint(8, SEQ_LEN + 1, (1,), generator=draw))
        tokens = torch.randint(1, VOCAB_SIZE, (length,), generator=draw).tolist()
        rest = SEQ_LEN - length
        found.append(
            {
                "input_ids": tokens + [0] * rest,
                "attention_mask": [1] * length + [0] * rest,
                "labels": tokens + [-100] * rest,
            }
        )
    return found


def drawing(rows: list[dict[str, Any]]) -> dict[str, Any]:
    from transformers import default_data_collator

    batch: dict[str, Any] = default_data_collator(rows)
    tokens = [
        random.randrange(1, VOCAB_SIZE),
        int(numpy.random.randint(1, VOCAB_SIZE)),
        int(torch.randint(VOCAB_SIZE, ())),
    ]
    batch["input_ids"][:, :3] = torch.tensor(tokens)
    return batch


class Stream(IterableDataset):  # type: ignore[misc,type-arg]
    """The same samples without a length."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from samples()


def counts(predictions: Any) -> dict[str, float]:
    """Return how many samples and labels the metrics see, and how wide logits are."""
    labels = predictions.label_ids
    return {
        "samples": len(predictions.predictions),
        "tokens": float((labels != -100).sum()),
        "vocabulary": predictions.predictions.shape[-1],
    }


def probe() -> torch.Tensor:
    return torch.tensor([sample["input_ids"] for sample in samples(2)])


PROVEN = ("gemma", "gemma2", "gemma3_text", "granite", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "starcoder2")
_BIASES = {"attention_bias": True, "mlp_bias": True}
_CPU_OFFLOAD = {"zero_force_ds_cpu_optimizer": False, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
FROZEN = {
    "frozen-layer": "layers.1|lm_head|norm.weight$",
    "frozen-norms": "proj|lm_head|layernorm",
    "mlp-alone": "mlp",
    "head-alone": "lm_head",
}
"""Patterns of what trains in families whose queries and keys have norms, which every rank holds whole."""
TWO_RANKS = [
    # First, because data loader workers are forks, which hang where many threads of earlier runs hold locks.
    Case(name="drawn-by-workers", draws=True, arguments={"dataloader_num_workers": 2}, has_reference=False),
    Case(name="zero0-sgd", zero_stage=0),
    Case(name="zero1-sgd-x3", accumulation=3, arguments={"gradient_checkpointing": True}),
    Case(name="zero2-sgd-x3", zero_stage=2, accumulation=3, config=_BIASES),
    Case(name="offload", zero_stage=2, deepspeed=_CPU_OFFLOAD),
    *(
        Case(name=family, family=family, steps=2, config={"residual_dropout": 0.0, "embedding_dropout": 0.0})
        for family in PROVEN
    ),
    Case(name="tied", config={"tie_word_embeddings": True}, steps=2),
    Case(name="tied-vocabulary", config={"tie_word_embeddings": True}, steps=2, vocabulary_parallel_head=True),
    Case(name="vocabulary-zero0", zero_stage=0, steps=2, vocabulary_parallel_head=True),
    Case(name="odd-vocabulary", config={"vocab_size": VOCAB_SIZE + 1}, steps=2),
    Case(name="own-loss", own_loss="all", steps=2, accumulation=3),
    Case(name="own-loss-by-groups", own_loss="groups", steps=2, accumulation=3),
    *(Case(name=f"qwen3-{part}", family="qwen3", steps=2, trains=pattern) for part, pattern in FROZEN.items()),
    Case(name="dropout", family="phi3", config={"resid_pdrop": 0.2, "embd_pdrop": 0.2}, has_reference=False),
    Case(name="drawn", draws=True, deepspeed={"train_batch_size": GLOBAL_BATCH_SIZE}, has_reference=False),
    Case(name="bf16", arguments={"bf16": True}, deepspeed={"bf16": {"enabled": "auto"}}, has_reference=False),
]
FOUR_RANKS = [Case(name="dp-zero1-sgd-x3", accumulation=3), Case(name="dp-zero0-stream", zero_stage=0, iterable=True)]
RESUMED = Case(name="resumed", zero_stage=2, optimizer="adamw_torch", steps=4)
RESUMED_AT = 2


def prepared(case: Case, output: Path, **more: Any) -> tuple[Any, Any]:
    overrides = configure_cpu_ranks("deepspeed")
    groups = int(os.environ["WORLD_SIZE"]) // TP
    arguments = case.training_arguments(
        str(output),
        batch_size=GLOBAL_BATCH_SIZE // groups,
        deepspeed=case.deepspeed_configuration(),
        **overrides,
        **more,
    )
    model = case.model()
    callback = TensorParallelCallback(TP, vocabulary_parallel_head=case.vocabulary_parallel_head)
    callback.prepare(arguments, model)
    trainer = case.trainer(model, arguments)
    callback.attach(trainer)
    return trainer, model


def train(case: Case, output: Path) -> None:
    trainer, model = prepared(case, output)
    seen: list[int] = []
    step = trainer.training_step

    def training_step(model: Any, inputs: Any, *rest: Any) -> Any:
        seen.append(int((inputs["input_ids"] * torch.arange(1, inputs["input_ids"].shape[1] + 1)).sum()))
        return step(model, inputs, *rest)

    trainer.training_step = training_step
    # What one rank draws besides must not give it other dropout masks.
    torch.rand(1 + int(os.environ["RANK"]))
    random.seed(int(os.environ["RANK"]))
    numpy.random.seed(int(os.environ["RANK"]))
    trainer.train()
    record = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "grad_norms": [entry.get("grad_norm") for entry in trainer.state.log_history if "loss" in entry],
        "seen": seen,
        "whole_parameters_that_differ": differing_parameters(model),
        "local_elements": sum(parameter.numel() for parameter in model.parameters()),
        "evaluation": trainer.evaluate(),
    }
    model.eval()
    with torch.no_grad():
        logits = trainer.model_wrapped(input_ids=probe()).logits
    save_model_directory(trainer, str(output / "model"))
    rank = int(os.environ["RANK"])
    save_file({"logits": logits.contiguous()}, output / f"logits-{rank}.safetensors")
    (output / f"record-{rank}.json").write_text(json.dumps(record))


def differing_parameters(model: Any) -> list[str]:
    """Return the parameters that every rank holds whole and that are not the same on all ranks of the group."""
    from deepspeed.utils import groups

    found = []
    for name, parameter in model.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False):
            continue
        first = parameter.detach().clone()
        source = groups.get_tensor_model_parallel_src_rank()
        torch.distributed.broadcast(first, src=source, group=groups.get_tensor_model_parallel_group())
        if not torch.equal(first, parameter):
            found.append(name)
    return found


def resume(output: Path) -> None:
    whole, _ = prepared(RESUMED, output / "whole", save_strategy="steps", save_steps=RESUMED_AT)
    whole.train()
    forget_last_run()
    rest, _ = prepared(RESUMED, output / "rest")
    rest.train(resume_from_checkpoint=str(output / "whole" / f"checkpoint-{RESUMED_AT}"))
    if os.environ["RANK"] == "0":
        runs = [
            [entry["loss"] for entry in trainer.state.log_history if "loss" in entry and entry["step"] > RESUMED_AT]
            for trainer in (whole, rest)
        ]
        (output / "losses.json").write_text(json.dumps(runs))


def refuse(output: Path) -> None:
    """Write what a model with a layer that no rule divides, and a forgotten `attach`, are answered with."""
    answers = []
    case = Case(name="refused", steps=1)
    overrides = configure_cpu_ranks("deepspeed")
    settings = case.training_arguments(str(output), batch_size=2, deepspeed=case.deepspeed_configuration(), **overrides)
    model = case.model()
    model.model.layers[1].mlp.extra = torch.nn.Linear(4, 4)
    callback = TensorParallelCallback(TP)
    try:
        callback.prepare(settings, model)
    except UsageError as error:
        answers.append(str(error))
    model = case.model()
    callback.prepare(settings, model)
    trainer = case.trainer(model, settings)
    trainer.add_callback(callback)
    try:
        trainer.train()
    except UsageError as error:
        answers.append(str(error))
    if os.environ["RANK"] == "0":
        (output / "answers.json").write_text(json.dumps(answers))


def main(output: Path, name: str) -> None:
    directory = output / name
    directory.mkdir(exist_ok=True)
    others = {"resumed": resume, "refused": refuse}
    if name in others:
        others[name](directory)
    else:
        cases = TWO_RANKS if os.environ["WORLD_SIZE"] == "2" else FOUR_RANKS
        train(next(case for case in cases if case.name == name), directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
