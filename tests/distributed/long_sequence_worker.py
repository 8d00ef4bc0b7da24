"""Trains with and without tiles and offload under every engine, and compares the runs; ranks run this file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from engine_settings import engine_settings
from fresh_process import forget_last_run
from sequence_cases import samples
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.peft import add_lora
from shardwright.trainers import LongSequenceCallback
from shardwright.trainers.data.samples import collate
from shardwright.trainers.distillation.config import DistillationConfig
from shardwright.trainers.distillation.trainer import DistillationTrainer
from small_models import llama, mixtral

CASES = {
    **{engine: (engine, "llama", "full") for engine in ("ddp", "zero1", "zero2", "zero3", "fsdp2")},
    **{f"{engine}-mixtral": (engine, "mixtral", "full") for engine in ("ddp", "zero3")},
    **{f"{engine}-lora": (engine, "llama", "lora") for engine in ("ddp", "fsdp2")},
    "ddp-distilled": ("ddp", "llama", "distilled"),
}
"""Engine, family and method of each comparison."""


def deepspeed(stage: int) -> dict[str, Any]:
    batch = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    return {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, **batch}


def train(
    engine: str, family: str, method: str, output: Path, *, long: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    from transformers import Trainer, TrainingArguments

    forget_last_run()
    kind = "deepspeed" if engine.startswith("zero") else engine
    settings = engine_settings(
        kind, 2, deepspeed(int(engine[-1])) if kind == "deepspeed" else None, layer=family.title(),
        gradient_accumulation_steps=2, max_steps=2, optim="sgd", learning_rate=0.5, max_grad_norm=0.5,
        gradient_checkpointing=True,
    )  # fmt: skip
    arguments = TrainingArguments(str(output / engine), **settings, **configure_cpu_ranks(kind))
    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "initializer_range": 0.2}
    model = llama(tie_word_embeddings=engine == "zero3", **sizes) if family == "llama" else mixtral(**sizes)
    model.config.output_router_logits = family == "mixtral"
    if method == "lora":
        model = add_lora(model, rank=4, targets=None, fp32_adapters=True)
    trainer_class: Any = Trainer
    common: dict[str, Any] = {"args": arguments, "train_dataset": samples(20, 3), "data_collator": collate}
    if method == "distilled":
        trainer_class = DistillationTrainer
        common |= {"teacher": llama(seed=1, **sizes), "distillation": DistillationConfig(implementation="fused")}
    trainer = trainer_class(model=model, **common)
    if long:
        # Batches of the ranks have different lengths, so that the ranks compute different numbers of tiles.
        tiled_loss = 3 if method != "distilled" else False
        LongSequenceCallback(tiled_mlp=True, tiled_loss=tiled_loss, offloaded_checkpoints=2).attach(trainer)
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    values = [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm") if name in entry]
    return values, {name: value.float().clone() for name, value in (state or {}).items()}


def difference(*case: Any) -> float:
    """Return the largest relative difference of losses, gradient norms and weights."""
    expected, weights = train(*case, long=False)
    found, trained = train(*case, long=True)
    assert len(found) == len(expected) == 4
    assert trained.keys() == weights.keys()
    pairs = [(torch.tensor(own), torch.tensor(other)) for own, other in zip(found, expected, strict=True)]
    pairs += [(trained[name], weights[name]) for name in weights]
    return max(float((own - other).abs().max() / other.abs().max().clamp(min=1e-12)) for own, other in pairs)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    results = {name: difference(*case, directory) for name, case in CASES.items()}
    if torch.distributed.get_rank() == 0:
        (directory / "differences.json").write_text(json.dumps(results))
