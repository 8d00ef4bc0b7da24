"""Substitutes, on CPU ranks, for what needs a GPU, a network or hours; each is reported.

Where and when a run saves and logs is the rehearsal's own matter and not reported. Seen with transformers 5.17.0,
accelerate 1.15.0 and bitsandbytes 0.50.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ds_configs.shrink.config import Change

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
    "deepspeed": None,
}
"""Keys that are replaced when they are present with another value; `None` removes the key."""


def cpu_arguments(
    arguments: Mapping[str, Any], *, steps: int, save_step: int
) -> tuple[dict[str, Any], tuple[Change, ...]]:
    """Return training arguments for a few steps on CPU ranks, with a checkpoint after `save_step`."""
    where = "training_arguments.json"
    scaled, changes = dict(arguments), []

    def replace(key: str, value: Any) -> None:
        before = scaled.pop(key, None)
        if value is not None:
            scaled[key] = value
        changes.append(Change(where=f"{where}: {key}", before=before, after=value))

    for key, neutral in _NEUTRAL.items():
        if key in scaled and scaled[key] not in (neutral, None):
            replace(key, neutral)
    scaled.pop("liger_kernel_config", None)
    if scaled.get("fp16"):
        replace("fp16", False)
        replace("bf16", True)
    optimizer = str(scaled.get("optim", "adamw_torch_fused"))
    if any(part in optimizer for part in _GPU_OPTIMIZERS):
        optimizer = "adamw_torch"
        replace("optim", optimizer)
    rates = (rate for name, rate in LEARNING_RATES.items() if optimizer.startswith(name))
    replace("learning_rate", next(rates, ADAM_LEARNING_RATE))
    replace("max_steps", steps)
    scaled |= {
        "save_strategy": "steps",
        "save_steps": save_step,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return scaled, tuple(changes)


def cpu_model(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Change, ...]]:
    """Return a model configuration without dropout, whose masks take other bytes on a CPU.

    There attention with dropout leaves its fused kernel and keeps every score.
    """
    scaled, changes = dict(config), []
    for key, value in config.items():
        if "drop" in key and isinstance(value, float) and value > 0:
            scaled[key] = 0.0
            changes.append(Change(where=key, before=value, after=0.0))
    return scaled, tuple(changes)


def cpu_deepspeed(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Change, ...]]:
    """Return a DeepSpeed configuration without fp16, which CPU ranks do not train, ZenFlow and SuperOffload.

    SuperOffload requires CUDA. ZenFlow steps in a process of its own, whose memory no rank measures.
    """
    scaled, changes = {key: value for key, value in config.items() if key != "_shardwright"}, []
    zero = scaled.get("zero_optimization")
    if isinstance(zero, dict) and "zenflow" in zero:
        before = {"zenflow": zero["zenflow"], "optimizer": scaled.pop("optimizer", None)}
        scaled["zero_optimization"] = zero = {key: value for key, value in zero.items() if key != "zenflow"}
        changes.append(Change(where="ds_config.json: zenflow", before=before, after=None))
    offload = zero.get("offload_optimizer") if isinstance(zero, dict) else None
    if isinstance(zero, dict) and isinstance(offload, dict) and offload.get("super_offload"):
        kept = {key: value for key, value in offload.items() if key not in ("super_offload", "cpuadam_cores_perc")}
        scaled["zero_optimization"] = {**zero, "offload_optimizer": kept}
        changes.append(Change(where="ds_config.json: super_offload", before=True, after=None))
    section = scaled.get("fp16")
    if isinstance(section, dict) and section.get("enabled") is not False:
        del scaled["fp16"]
        scaled["bf16"] = {"enabled": section.get("enabled", True)}
        changes.append(Change(where="ds_config.json: fp16", before=section, after={"bf16": scaled["bf16"]}))
    return scaled, tuple(changes)


def cpu_accelerate(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Change, ...]]:
    """Return an Accelerate configuration that names no GPUs and computes in bf16 instead of fp16 or fp8.

    FSDP2 offloads into pinned memory, which torch 2.13.0 has only beside an accelerator; on CPU ranks its shards are
    on the host already.
    """
    scaled, changes = dict(config), []
    fsdp = scaled.get("fsdp_config")
    if isinstance(fsdp, dict) and fsdp.get("fsdp_offload_params"):
        scaled["fsdp_config"] = {**fsdp, "fsdp_offload_params": False}
        changes.append(Change(where="accelerate.yaml: fsdp_offload_params", before=True, after=False))
    precision = scaled.get("mixed_precision")
    if precision in ("fp16", "fp8"):
        scaled["mixed_precision"] = "bf16"
        changes.append(Change(where="accelerate.yaml: mixed_precision", before=precision, after="bf16"))
    for key in ("gpu_ids", "fp8_config", "dynamo_config", "enable_cpu_affinity"):
        if scaled.get(key):
            changes.append(Change(where=f"accelerate.yaml: {key}", before=scaled.pop(key), after=None))
    return scaled, tuple(changes)
