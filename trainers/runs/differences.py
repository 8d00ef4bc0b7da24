"""Differences of a run from its plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...ds_configs.plan.deepspeed_copy import DEEPSPEED_FILE, copied_configuration, differing_keys
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.settings import not_covered
from ...plugins.accelerate.cpu_ranks import engine_from_environment
from ...plugins.transformers.training_arguments import deepspeed_configuration


def argument_differences(
    plan: Plan, args: Any, model: Any, *, ranks: int, stated: Mapping[str, Any] | None = None
) -> list[str]:
    """Return a line for each value of a Trainer's run that is not the plan's.

    Args:
        plan: What was planned.
        args: The Trainer's arguments.
        model: What is trained; `None` where it is not known.
        ranks: How many run.
        stated: `seq_len` and `method`, where the script says them.
    """
    strategy, stated = plan.chosen.strategy, stated or {}
    optimizer = getattr(args.optim, "value", args.optim)
    deepspeed = deepspeed_configuration(args)
    engine = "deepspeed" if deepspeed else "fsdp2" if args.fsdp else engine_from_environment()
    stage = deepspeed.get("zero_optimization", {}).get("stage", 0) if deepspeed else None
    facts: dict[str, tuple[Any, Any]] = {
        "ranks": (ranks, plan.hardware.world_size),
        "engine": (engine, "ddp" if strategy.engine == "single" else strategy.engine),
        "zero_stage": (stage, strategy.zero_stage),
        "offload_optimizer": (_offload(deepspeed, "optimizer"), strategy.offload_optimizer),
        "offload_param": (_offload(deepspeed, "param"), strategy.offload_param),
        "per_device_train_batch_size": (args.per_device_train_batch_size, strategy.micro_batch_size),
        "gradient_accumulation_steps": (args.gradient_accumulation_steps, strategy.gradient_accumulation_steps),
        "gradient_checkpointing": (args.gradient_checkpointing, strategy.gradient_checkpointing),
        "precision": ("bf16" if args.bf16 else "fp16" if args.fp16 else "fp32", plan.job.precision),
        "optim": (optimizer, plan.job.optimizer),
        "sequence length": (stated.get("seq_len"), plan.job.seq_len_tokens),
        "method": (stated.get("method"), plan.job.method),
        "model_type": (_model_type(model, plan.model.model_type), plan.model.model_type),
    }
    found = [
        f"{name} was {ran}, the plan says {planned}"
        for name, (ran, planned) in facts.items()
        if ran is not None and ran != planned
    ]
    uncovered = {"torch_compile": args.torch_compile, "fp8": os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8"}
    return found + [f"{name} is {not_covered(name)}" for name, is_on in uncovered.items() if is_on]


def unread_edits(directory: Path) -> list[str]:
    """Return what a plan's `ds_config.json` says otherwise than the copy with which Accelerate launched this run."""
    copy = copied_configuration(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none"))
    keys = [] if copy is None else differing_keys(copy, directory)
    if not keys:
        return []
    return [f"{', '.join(keys)} of {directory / DEEPSPEED_FILE} is not read: this run has accelerate.yaml's copy"]


def _offload(deepspeed: dict[str, Any] | None, what: str) -> str | None:
    """Return the device of a DeepSpeed offload section; `None`, which compares with nothing, without DeepSpeed."""
    if deepspeed is None:
        return None
    section = deepspeed.get("zero_optimization", {}).get(f"offload_{what}") or {}
    return str(getattr(section.get("device", "none"), "value", section.get("device", "none")))


def _model_type(model: Any, planned: str) -> str | None:
    """Return the family of a model or, where that is the planned one, of the language model inside it."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    found = [part.model_type for part in (config, config.get_text_config()) if hasattr(part, "model_type")]
    return planned if planned in found else next(iter(found), None)
