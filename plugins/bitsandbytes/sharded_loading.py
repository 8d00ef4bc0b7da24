"""Loading of 4-bit weights that FSDP2 and ZeRO-3 divide: into host memory, so that no accelerator holds all of them.

Seen with transformers 5.17.0, accelerate 1.15.0, deepspeed 0.19.8 and bitsandbytes 0.50.2: weights become 4-bit on the
accelerator, all of them on each, since `zero.Init` is left out for quantized models (modeling_utils.py:1440) and
`cpu_ram_efficient_loading` for 4-bit ones (accelerate/utils/fsdp_utils.py:830). From host memory FSDP2 moves one unit
at a time (torch 2.13.0, `_fsdp_init.py`, `_move_states_to_device`), and `zero.Init(module=...)` one parameter
(partition_parameters.py:1214); without it the engine would move the whole model first (engine.py:2094). The scales of a
weight (`quant_state`) are no parameters: every rank keeps all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def is_divided(engine: str | None) -> bool:
    """Return whether an engine (`deepspeed`, `fsdp2`, ...) divides the weights of this run: FSDP2, or ZeRO-3."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    return engine == "fsdp2" or is_deepspeed_zero3_enabled()


@contextmanager
def on_host() -> Iterator[dict[str, Any]]:
    """Yield the arguments of `from_pretrained` that load a 4-bit model into host memory.

    Transformers refuses any `device_map` under ZeRO-3 (integrations/accelerate.py:135), which otherwise decides nothing
    about how a quantized model is loaded: meanwhile it is not told.
    """
    from transformers.integrations import deepspeed

    reference = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield {"device_map": {"": "cpu"}}
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = reference


def place_for_division(model: Any) -> Any:
    """Return a 4-bit model that was loaded into host memory, ready for the engine that divides it.

    Under ZeRO-3 its weights are partitioned here, as those of other models are while they are made.
    """
    from transformers.integrations import deepspeed_config, is_deepspeed_zero3_enabled

    # Accelerate refuses a 4-bit model on another device than the one it trains on (accelerator.py:1861).
    model.__dict__.pop("hf_device_map", None)
    if is_deepspeed_zero3_enabled():
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        deepspeed.zero.Init(module=model, config_dict_or_path=deepspeed_config())
        for parameter in model.parameters():
            if (scales := getattr(parameter, "quant_state", None)) is not None:
                scales.to(get_accelerator().current_device_name())
    return model
