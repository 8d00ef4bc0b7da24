"""The `TrainingArguments` that a plan implies, as keyword arguments."""

from __future__ import annotations

from typing import Any

from .plan import Plan

FUSED_LOSS_ONLY = {
    "cross_entropy": False,
    "fused_linear_cross_entropy": True,
    "geglu": False,
    "layer_norm": False,
    "rms_norm": False,
    "rope": False,
    "swiglu": False,
}
"""Liger's chunked head and loss without its other kernels, whose activations were not traced."""


MAX_GRAD_NORM = 1.0
"""Norm at which gradients are clipped, as Trainer and DeepSpeed do where nobody says otherwise."""


def planned_training_arguments(plan: Plan) -> dict[str, Any]:
    """Return the keys of `TrainingArguments` that the plan decides; everything else stays the user's.

    With FSDP2 and accumulation the Trainer would leave gradients unsharded between micro-batches
    (`Accelerator.no_sync`, accelerate/accelerator.py:1167); `sync_each_batch` keeps them sharded, as planned.
    """
    strategy, job = plan.chosen.strategy, plan.job
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": strategy.micro_batch_size,
        "gradient_accumulation_steps": strategy.gradient_accumulation_steps,
        "gradient_checkpointing": strategy.gradient_checkpointing,
        "bf16": job.precision == "bf16",
        "fp16": job.precision == "fp16",
        "optim": job.optimizer,
        "max_grad_norm": MAX_GRAD_NORM,
    }
    if plan.hardware.gpu == "CPU":
        arguments["use_cpu"] = True
    if job.loss == "chunked":
        arguments["use_liger_kernel"] = True
        arguments["liger_kernel_config"] = FUSED_LOSS_ONLY
    if strategy.engine == "fsdp2":
        accelerator: dict[str, Any] = {}
        if strategy.gradient_accumulation_steps > 1:
            accelerator["gradient_accumulation_kwargs"] = {"sync_each_batch": True}
        if plan.hardware.gpu == "CPU":
            # accelerate 1.15.0 trains plain DDP here without a word. `shardwright launch` makes the state that this
            # asks for; a script that is launched without it ends with an error instead of running another layout.
            accelerator["use_configured_state"] = True
        if accelerator:
            arguments["accelerator_config"] = accelerator
    return arguments
