"""Training arguments that runs under every engine share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainingArguments


def engine_settings(
    engine: str, batch_size: int, deepspeed: dict[str, Any] | None = None, *, layer: str = "Llama", **more: Any
) -> dict[str, Any]:
    """Return keys of `TrainingArguments`; FSDP2 wraps `layer`, the family's name of its decoder layers."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": batch_size,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 11,
        **more,
    }
    if engine == "deepspeed":
        settings["deepspeed"] = deepspeed
    if engine == "fsdp2":
        settings |= fsdp2_settings(f"{layer}DecoderLayer")
    return settings


def fsdp2_settings(layer: str = "LlamaDecoderLayer", **more: Any) -> dict[str, Any]:
    return {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": [layer], **more}}


def cpu_arguments(directory: Path, batch_size: int, **settings: Any) -> TrainingArguments:
    """Return the arguments of a short training on the CPU that saves and reports nothing."""
    from transformers import TrainingArguments

    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return TrainingArguments(str(directory), **({"per_device_train_batch_size": batch_size} | quiet | settings))
