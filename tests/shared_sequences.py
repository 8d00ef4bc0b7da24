"""A small Llama and training arguments for tests of sequence and context parallelism without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def tiny(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | changes))


def sizes_of(*, sp: int = 1, cp: int = 1, **more: Any) -> Any:
    return SimpleNamespace(sp_size=sp, cp_size=cp, tp_size=1, **more)


def arguments(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "world_size": 4,
        "average_tokens_across_devices": True,
        "accelerator_config": SimpleNamespace(split_batches=False),
        "deepspeed_plugin": SimpleNamespace(deepspeed_config={"train_batch_size": "auto"}),
        "parallelism_config": None,
        "label_smoothing_factor": 0.0,
    }
    return SimpleNamespace(**given | changes)
