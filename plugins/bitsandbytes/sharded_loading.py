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
        read_weights_in_backward(model)
    return model


def read_weights_in_backward(model: Any) -> None:
    """Let the backward pass of each 4-bit layer read the weight that ZeRO-3 gathers for it.

    bitsandbytes 0.50.2 keeps a view of the weight on the node of its product (autograd/_functions.py:358, `MatMul4Bit`)
    and not among the saved tensors: neither ZeRO-3's release nor checkpointing drops it, and every rank would hold all
    4-bit weights from the forward pass to the end of the step. FSDP2 empties the storage itself.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            # Before DeepSpeed's hooks, which put nodes of their own behind what the layer returns.
            module.register_forward_hook(_replace_kept_weight, prepend=True)


def _replace_kept_weight(module: Any, _: Any, output: Any) -> None:
    node = output.grad_fn
    # The layer casts what it returns where its input has another dtype than its products.
    for product in () if node is None else (node, *(before for before, _ in node.next_functions)):
        if type(product).__name__ == "MatMul4BitBackward":
            product.tensors = _WeightInBackward(module)


class _WeightInBackward:
    """Stands in for the pair that `MatMul4Bit.backward` unpacks: nothing, and the packed weight as a column."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __iter__(self) -> Iterator[Any]:
        return iter((None, self._module.weight.data.view(-1, 1)))
