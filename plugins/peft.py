"""LoRA and QLoRA through peft and bitsandbytes.

Seen with peft 0.21.2 and bitsandbytes 0.50.2: FSDP2 shards 4-bit weights only when their storage dtype is a floating
one (uint8 storage is replicated with a warning, accelerate/utils/fsdp_utils.py:789), so the storage follows the
compute dtype. PEFT makes adapters fp32; under `zero.Init` DeepSpeed 0.19.8 leaves them so and runs without autocast,
and each adapted layer then keeps an fp32 copy of its input (seen on two CPU ranks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..ds_configs.specs.errors import ConfigError, UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# What `TrainingJob.lora_rank` plans with.
DEFAULT_RANK = 16
ALL_LINEAR = "all-linear"


def add_lora(model: PreTrainedModel, *, rank: int | None, targets: str | None, fp32_adapters: bool) -> Any:
    """Freeze the model and add trainable low-rank adapters (Hu et al. 2021, arXiv:2106.09685), scale 2.

    `targets` names modules separated by commas, or `all-linear`. `fp32_adapters` is for engines that keep no other
    fp32 copy of them; DeepSpeed keeps one in its optimizer.

    Raises:
        UsageError: no module has one of the names.
    """
    from peft import LoraConfig, get_peft_model

    chosen_rank, chosen_targets = rank or DEFAULT_RANK, targets or ALL_LINEAR
    modules = chosen_targets if chosen_targets == ALL_LINEAR else [name.strip() for name in chosen_targets.split(",")]
    # PEFT's class for causal language models asks for `prepare_inputs_for_generation`, which encoders lack.
    task = "CAUSAL_LM" if model.can_generate() and not model.config.is_encoder_decoder else None
    lora = LoraConfig(r=chosen_rank, lora_alpha=2 * chosen_rank, target_modules=modules, task_type=task)
    try:
        return get_peft_model(model, lora, autocast_adapter_dtype=fp32_adapters)
    except ValueError as error:
        known = {name.rpartition(".")[2] for name, module in model.named_modules() if type(module).__name__ == "Linear"}
        if chosen_targets == ALL_LINEAR or known & set(modules):
            raise
        rule, fix = "is not a module of the model", f"use {', '.join(sorted(known))}, or {ALL_LINEAR}"
        raise UsageError(ConfigError(where="lora_targets", value=chosen_targets, rule=rule, fix=fix)) from error


def four_bit_loading(dtype: torch.dtype) -> Any:
    """Return the quantization config of QLoRA: NF4 with double quantization (arXiv:2305.14314).

    `dtype` is the dtype of computations, and of the storage that packs the 4-bit values.
    """
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )
