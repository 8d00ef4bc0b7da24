"""What is trained with tensor parallelism, and by one process, from the same weights on the same samples."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from engine_settings import engine_settings
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
    Case(name="zero0-adamw-x3", zero_stage=0, optimizer="adamw_torch", accumulation=3),
    Case(name="zero1-sgd-x3", accumulation=3, arguments={"gradient_checkpointing": True}),
    Case(name="zero1-adamw", optimizer="adamw_torch"),
    Case(name="zero2-sgd-x3", zero_stage=2, accumulation=3, config=_BIASES),
    Case(name="zero2-adamw", zero_stage=2, optimizer="adamw_torch"),
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
    *(
        Case(name=f"{family}-{part}", family=family, steps=2, trains=pattern)
        for part, pattern in FROZEN.items()
        for family in ("qwen3", "gemma3_text")
    ),
    Case(name="dropout", family="phi3", config={"resid_pdrop": 0.2, "embd_pdrop": 0.2}, has_reference=False),
    Case(name="drawn", draws=True, deepspeed={"train_batch_size": GLOBAL_BATCH_SIZE}, has_reference=False),
    Case(name="bf16", arguments={"bf16": True}, deepspeed={"bf16": {"enabled": "auto"}}, has_reference=False),
]
FOUR_RANKS = [Case(name="dp-zero1-sgd-x3", accumulation=3), Case(name="dp-zero0-stream", zero_stage=0, iterable=True)]
RESUMED = Case(name="resumed", zero_stage=2, optimizer="adamw_torch", steps=4)
RESUMED_AT = 2
