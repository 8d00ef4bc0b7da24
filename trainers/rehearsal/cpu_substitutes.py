"""Substitutes, on CPU ranks, for what needs a GPU, a network or hours; each is reported.

Where and when a run saves and logs is the rehearsal's own matter and not reported. Seen with transformers 5.17.0,
accelerate 1.15.0 and bitsandbytes 0.50.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ds_configs.shrink.config import section_of
from ...ds_configs.specs.layout import Layout

LEARNING_RATES: Mapping[str, float] = {
    "sgd": 0.5,
    "lion": 1e-3,
    "adagrad": 2e-2,
    "rmsprop": 2e-3,
    "adafactor": 1e-2,
}
"""Rates with which each optimizer visibly learns in a few steps, by the start of its name."""
ADAM_LEARNING_RATE = 5e-3

_GPU_OPTIMIZERS = ("bnb", "8bit", "paged", "32bit", "_4bit", "apex", "fused_npu", "galore", "torchao")
_NEUTRAL: Mapping[str, Any] = {
    "tf32": None,
    "torch_compile": False,
    "use_liger_kernel": False,
    "ddp_backend": "gloo",
    "use_cpu": True,
    "no_cuda": None,
    "warmup_steps": 0,
    "warmup_ratio": None,
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "resume_from_checkpoint": None,
    "dataloader_num_workers": 0,
    "group_by_length": False,
    "neftune_noise_alpha": None,
    "save_total_limit": None,
    "save_only_model": False,
    "logging_dir": None,
    "liger_kernel_config": None,
    "deepspeed": None,
}
"""Keys that are replaced when they are present with another value; `None` removes the key."""


def cpu_arguments(scaled: dict[str, Any], *, layout: Layout, steps: int) -> None:
    """Make training arguments those of a few steps of a layout on CPU ranks."""
    scaled["per_device_train_batch_size"] = layout.micro_batch_size
    scaled["gradient_accumulation_steps"] = layout.gradient_accumulation_steps
    for key, neutral in _NEUTRAL.items():
        if neutral is None:
            scaled.pop(key, None)
        elif scaled.get(key) is not None:
            scaled[key] = neutral
    if scaled.get("fp16"):
        scaled["fp16"] = False
        scaled["bf16"] = True
    optimizer = str(scaled.get("optim", "adamw_torch_fused"))
    if any(part in optimizer for part in _GPU_OPTIMIZERS):
        optimizer = "adamw_torch"
        scaled["optim"] = optimizer
    rates = (rate for name, rate in LEARNING_RATES.items() if optimizer.startswith(name))
    scaled["learning_rate"] = next(rates, ADAM_LEARNING_RATE)
    scaled["max_steps"] = steps


OWN_ARGUMENTS: Mapping[str, Any] = {
    "save_strategy": "steps",
    "logging_strategy": "steps",
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "report_to": "none",
    "disable_tqdm": True,
}
"""What a rehearsal saves and logs."""


def cpu_deepspeed(scaled: dict[str, Any]) -> None:
    """Replace fp16, which CPU ranks do not train, by bf16 in a DeepSpeed configuration."""
    section = scaled.get("fp16")
    if isinstance(section, dict) and section.get("enabled") is not False:
        scaled.pop("fp16", None)
        scaled["bf16"] = {"enabled": section.get("enabled", True)}


def cpu_accelerate(scaled: dict[str, Any]) -> None:
    """Make an Accelerate configuration name no GPUs and compute in bf16 instead of fp16 or fp8.

    FSDP2 offloads into pinned memory, which torch 2.13.0 has only beside an accelerator; on CPU ranks its shards are
    on the host already.
    """
    fsdp = section_of(scaled, "fsdp_config")
    if fsdp is not None and fsdp.get("fsdp_offload_params"):
        fsdp["fsdp_offload_params"] = False
    if scaled.get("mixed_precision") in ("fp16", "fp8"):
        scaled["mixed_precision"] = "bf16"
    for key in ("gpu_ids", "fp8_config", "dynamo_config", "enable_cpu_affinity"):
        if scaled.get(key):
            scaled.pop(key, None)
