"""The DeepSpeed JSON of a strategy.

Values that `TrainingArguments` owns are `"auto"`, so that one place decides them. `gradient_accumulation_steps` and
`gradient_clipping` are always present: without them Accelerate writes 1 and DeepSpeed clips at 1.0 whatever the
Trainer says (accelerate/utils/dataclasses.py:1274, deepspeed/runtime/constants.py:203).
"""

from __future__ import annotations

from typing import Any

from ..specs.errors import Fault, UsageError
from ..specs.strategy import OffloadDevice, Strategy, ZeroOptions
from .plan import Plan
from .training_arguments import MAX_GRAD_NORM

GATHER_ON_SAVE = "stage3_gather_16bit_weights_on_model_save"


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a plan; integers stay integers, and no key is without effect."""
    strategy, job = plan.chosen.strategy, plan.job
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": _zero_section(strategy, plan),
    }
    if job.precision == "fp16":
        config["fp16"] = {"enabled": "auto"}
        del config["bf16"]
    if strategy.offload_optimizer != "none":
        # Accelerate would do the same unasked; written down, it is a decision: only optimizers with a CPU kernel of the
        # same arithmetic reach this point (rule offloaded_optimizer_has_cpu_kernel).
        config["zero_force_ds_cpu_optimizer"] = True
    if strategy.tp > 1 and strategy.pp > 1:
        # The stages divide their own layers; DeepSpeed's partition of what passes between them is not part of that.
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    elif strategy.tp > 1:
        # The callback divides the layers by these values; a head of the whole vocabulary leaves logits as they were.
        config["tensor_parallel"] = {"autotp_size": strategy.tp, "vocab_parallel_lm_head": False}
    if strategy.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": strategy.ep}
    if strategy.zero.gradient_accumulation_fp32:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if "nvme" in (strategy.offload_optimizer, strategy.offload_param):
        config["aio"] = {"block_size": 1048576, "queue_depth": 32, "single_submit": False, "overlap_events": True}
    return config


def resolved_deepspeed_config(plan: Plan) -> dict[str, Any]:
    """Return the configuration with numbers for `"auto"`, as `deepspeed.initialize` reads it without Accelerate.

    Raises:
        UsageError: the plan runs another engine.
    """
    strategy, precision = plan.chosen.strategy, plan.job.precision
    if strategy.engine != "deepspeed":
        rule, fix = "is not run by DeepSpeed", "plan with --strategy zero2 or another stage, or let Accelerate run it"
        raise UsageError(Fault(where="plan", value=strategy.label, rule=rule, fix=fix))
    numbers = {
        "train_batch_size": strategy.global_batch_size,
        "train_micro_batch_size_per_gpu": strategy.micro_batch_size,
        "gradient_accumulation_steps": strategy.gradient_accumulation_steps,
        "gradient_clipping": MAX_GRAD_NORM,
        "fp16" if precision == "fp16" else "bf16": {"enabled": precision != "fp32"},
    }
    return deepspeed_config(plan) | numbers


def _zero_section(strategy: Strategy, plan: Plan) -> dict[str, Any]:
    zero = strategy.zero
    section: dict[str, Any] = {"stage": strategy.zero_stage}
    if strategy.tp > 1 and strategy.pp == 1:
        # Accelerate asks for it before it saves a tensor-parallel model, at any stage (accelerator.py:4072).
        section[GATHER_ON_SAVE] = True
    if strategy.zero_stage == 0:
        return section
    section |= {
        "overlap_comm": zero.overlap_comm,
        "contiguous_gradients": True,
        "reduce_bucket_size": zero.reduce_bucket_size,
    }
    if strategy.zero_stage == 3:
        section |= _stage3_keys(zero)
    if strategy.offload_optimizer != "none":
        section["offload_optimizer"] = _offload_section(
            strategy.offload_optimizer, plan, buffer_count=zero.optimizer_buffer_count
        )
    if strategy.offload_param != "none":
        section["offload_param"] = _offload_section(
            strategy.offload_param,
            plan,
            buffer_count=zero.parameter_buffer_count,
            buffer_size=zero.parameter_buffer_elements,
        )
    return section


def _stage3_keys(zero: ZeroOptions) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "stage3_prefetch_bucket_size": zero.stage3_prefetch_bucket_size,
        "stage3_param_persistence_threshold": zero.stage3_param_persistence_threshold,
        "stage3_max_live_parameters": zero.stage3_max_live_parameters,
        "stage3_max_reuse_distance": zero.stage3_max_reuse_distance,
        GATHER_ON_SAVE: True,
        "sub_group_size": zero.sub_group_size,
    }
    if zero.hpz_partition_size > 1:
        keys["zero_hpz_partition_size"] = zero.hpz_partition_size
    if zero.quantized_weights:
        keys["zero_quantized_weights"] = True
    if zero.quantized_gradients:
        keys["zero_quantized_gradients"] = True
    return keys


def _offload_section(device: OffloadDevice, plan: Plan, **nvme_buffers: int) -> dict[str, Any]:
    section: dict[str, Any] = {"device": device, "pin_memory": True}
    if device == "nvme":
        section |= {"nvme_path": plan.hardware.nvme_path, **nvme_buffers}
    return section
