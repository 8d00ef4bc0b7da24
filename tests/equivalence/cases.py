"""The layouts whose training must equal one process, and the data on which they train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine_settings import engine_settings
from shardwright.ds_configs.specs.layout import Layout

STEPS = 5
MICRO_STEP_SAMPLES = 4
"""Sequences of one micro-step over all ranks; an optimizer step has as many for each accumulated micro-batch."""
ACCUMULATIONS = (1, 3)
OPTIMIZERS = ("adamw_torch", "sgd")
LEARNING_RATES: Mapping[str, float] = {"adamw_torch": 1e-3, "sgd": 0.5}
ADAM_EPSILON = 1e-6
"""Above the rounding of gradients that are near zero, of which Adam with a smaller one makes whole steps."""
MAX_GRAD_NORM = 0.5
"""Below every gradient norm of these runs, so that each step is clipped."""
LOSS_TOLERANCE = 1e-5
"""Largest difference of a step's loss from the single process's, in nats for each token."""
WEIGHT_TOLERANCE = 1e-4
"""Largest difference of a tensor's elements from the single process's, over the tensor's largest absolute element."""
LOGIT_TOLERANCE = 1e-5
"""Largest difference of logits from those of the live engine, over the largest absolute logit."""
VOCAB_SIZE = 128
SHORTEST, LONGEST = 5, 24
"""Tokens of a sample: micro-batches differ in length, and half of what they hold is padding."""
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: str
    """Name of the layout, or `reference` for the single process."""
    strategy: Layout
    """The layout, with its micro-batch and accumulation."""
    optimizer: str
    """A name of the Trainer's `optim`."""
    family: str = "llama"
    """The model that is trained: `llama` (dense) or `mixtral` (experts without a capacity)."""

    @property
    def name(self) -> str:
        return f"{self.layout}-{self.optimizer.split('_')[0]}-x{self.strategy.gradient_accumulation_steps}"

    @property
    def ranks(self) -> int:
        return self.strategy.world_size

    def training_arguments(self, directory: Path) -> dict[str, Any]:
        return engine_settings(
            self.strategy.engine,
            self.strategy.micro_batch_size,
            deepspeed_config(self.strategy),
            output_dir=str(directory),
            gradient_accumulation_steps=self.strategy.gradient_accumulation_steps,
            optim=self.optimizer,
            adam_epsilon=ADAM_EPSILON,
            learning_rate=LEARNING_RATES[self.optimizer],
            weight_decay=0.1,
            max_grad_norm=MAX_GRAD_NORM,
            max_steps=STEPS,
        )


def deepspeed_config(strategy: Layout) -> dict[str, Any]:
    """Return a small DeepSpeed configuration; buckets hold several tensors but not the whole model."""
    elements = 20_000 if strategy.ep > 1 else 12_000
    sizes: dict[str, Any] = {"reduce_bucket_size": elements, "allgather_bucket_size": elements}
    if strategy.zero_stage == 3:
        sizes = {"reduce_bucket_size": elements, "stage3_param_persistence_threshold": 100}
    for part in ("optimizer", "param"):
        if getattr(strategy, f"offload_{part}") == "cpu":
            sizes[f"offload_{part}"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": strategy.zero_stage or 0, **sizes},
    }


def _deepspeed(zero_stage: int, data: int, **axes: Any) -> Layout:
    data_axis = {"dp_shard": data} if zero_stage else {"dp_replicate": data}
    return Layout(engine="deepspeed", zero_stage=zero_stage, **data_axis, **axes)


LAYOUTS: dict[str, Layout] = {
    "ddp": Layout(engine="ddp", dp_replicate=2),
    "zero1": _deepspeed(1, 2),
    "zero2": _deepspeed(2, 2),
    "zero3": _deepspeed(3, 2),
    "fsdp2": Layout(engine="fsdp2", dp_shard=2),
    "sp2-zero1": _deepspeed(1, 1, sp=2),
    "sp2-zero3": _deepspeed(3, 1, sp=2),
    "sp2-dp2-zero2": _deepspeed(2, 2, sp=2),
    "tp2-zero1": _deepspeed(1, 1, tp=2),
    "pp2-zero0": _deepspeed(0, 1, pp=2),
    "pp2-dp2-zero1": _deepspeed(1, 2, pp=2),
    "ep2-zero1": _deepspeed(1, 2, ep=2),
    "ep2-zero2": _deepspeed(2, 2, ep=2),
}
"""Every layout by name; those with expert parallelism train a mixture of experts, the others a dense model. ZeRO adds
the gradients of a shared sequence in its first stages and averages them in the third: there is a case of each. A layout
is run with every optimizer and every accumulation once."""

FURTHER: dict[str, Layout] = {
    "tp2-dp2-zero1": _deepspeed(1, 2, tp=2),
    "tp2-pp2-zero1": _deepspeed(1, 1, tp=2, pp=2),
    "ep2-dp2-zero2": _deepspeed(2, 4, ep=2),
    "ep2-dp2-zero3": _deepspeed(3, 4, ep=2),
    "cp2-fsdp2": Layout(engine="fsdp2", cp=2),
    "zero0": _deepspeed(0, 2),
}
"""Layouts that combine axes which stand alone above, context parallelism and DeepSpeed without ZeRO."""

OFFLOADED: dict[str, Layout] = {
    "zero1-offload": _deepspeed(1, 2, offload_optimizer="cpu"),
    "zero2-offload": _deepspeed(2, 2, offload_optimizer="cpu"),
    "zero3-offload": _deepspeed(3, 2, offload_optimizer="cpu"),
    "zero3-offload-param": _deepspeed(3, 2, offload_optimizer="cpu", offload_param="cpu"),
}
"""Layouts whose optimizer, DeepSpeed's CPU Adam, steps on the host."""


def case_of(layout: str, optimizer: str, accumulation: int) -> Case:
    """Return a layout's run; however many ranks see different samples, a micro-step has the same ones."""
    strategy = (LAYOUTS | FURTHER | OFFLOADED)[layout]
    sized = replace(
        strategy,
        micro_batch_size=MICRO_STEP_SAMPLES // strategy.data_parallel_size,
        gradient_accumulation_steps=accumulation,
    )
    family = "mixtral" if strategy.ep > 1 else "llama"
    return Case(layout=layout, strategy=sized, optimizer=optimizer, family=family)


def reference_of(case: Case) -> Case:
    strategy = Layout(
        engine="single",
        micro_batch_size=MICRO_STEP_SAMPLES,
        gradient_accumulation_steps=case.strategy.gradient_accumulation_steps,
    )
    return Case(layout=f"reference-{case.family}", strategy=strategy, optimizer=case.optimizer, family=case.family)


CASES = [
    case_of(layout, optimizer, accumulation)
    for layout in (*LAYOUTS, *FURTHER)
    for optimizer, accumulation in zip(OPTIMIZERS, ACCUMULATIONS, strict=True)
]
CASES += [case_of(layout, "adamw_torch", max(ACCUMULATIONS)) for layout in OFFLOADED]


def samples() -> list[dict[str, Any]]:
    """Return ragged samples of few distinct tokens, which a step can learn, enough for the steps of every case."""
    import torch

    draw = torch.Generator().manual_seed(3)
    weights = 0.5 ** torch.arange(10)
    found = []
    for _ in range(STEPS * MICRO_STEP_SAMPLES * max(ACCUMULATIONS)):
        length = int(torch.randint(SHORTEST, LONGEST + 1, (1,), generator=draw))
        tokens_T = 7 + 11 * torch.multinomial(weights, length, replacement=True, generator=draw)
        found.append({"input_ids": tokens_T, "labels": tokens_T})
    return found


def padded(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    shape = (len(rows), longest)
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, IGNORED),
    }
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        batch["input_ids"][index, :length] = row["input_ids"]
        batch["attention_mask"][index, :length] = 1
        batch["labels"][index, :length] = row["labels"]
    return batch


def probe_batch() -> dict[str, Any]:
    """Return two whole sequences on which live engines and reloaded checkpoints are compared."""
    import torch

    draw = torch.Generator().manual_seed(5)
    return {"input_ids": torch.randint(1, VOCAB_SIZE, (2, 16), generator=draw)}


def make_model(family: str, sizes: Mapping[str, Any], *, seed: int = 0, layers: int = 2) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, set_seed

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "use_cache": False,
    }
    set_seed(seed)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**common | sizes))
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False}
    return MixtralForCausalLM(MixtralConfig(**common | experts | sizes))
