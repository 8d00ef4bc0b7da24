"""Parameters for scales that training finds: registered before the optimizer is made, with useful first values.

Symmetric weights start at ``s = 2 · mean |w| / √(2^(b-1) - 1)`` (LSQ, Esser et al., arXiv 1902.08153, section 2.1),
others at the scale and zero point of their own range, inputs at their calibrated range.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ....plugins.compressed_tensors.codes import code_range, weight_scale_and_zero_point
from .layers import INPUT_SCALE, INPUT_ZERO_POINT, WEIGHT_SCALE, WEIGHT_ZERO_POINT, LayerQuantizer
from .lora import is_lora_linear
from .rounding import sharing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .attachment import Attachment


def add_learned_scales(attachment: Attachment) -> None:
    """Register the parameters of a configuration that learns scales; nothing is added by others."""
    import torch

    config = attachment.config
    if not config.learns_scales:
        return
    for module in attachment.modules.values():
        weight = (module.get_base_layer() if is_lora_linear(module) else module).weight
        quantizer: LayerQuantizer = module.quantizer
        if config.weight_rule == "learned":
            with _whole([weight]):
                scale, zero_point = _first_scale(weight.detach(), quantizer)
            _register(module, WEIGHT_SCALE, scale, weight)
            _register(module, WEIGHT_ZERO_POINT, zero_point, weight)
        if config.ranges == "learned" and quantizer.scheme.activations_are_static:
            activations = quantizer.scheme.activations
            assert activations is not None, "learned ranges are of rounded inputs"
            one = torch.ones(1, device=weight.device)
            _register(module, INPUT_SCALE, one, weight)
            _register(module, INPUT_ZERO_POINT, None if activations.symmetric else one * 0, weight)


def start_from_ranges(attachment: Attachment) -> None:
    """Give learned ranges of inputs the values that calibration found."""
    import torch

    for module in attachment.modules.values():
        values = module.quantizer.input_range.initial_values()
        for name, value in zip((INPUT_SCALE, INPUT_ZERO_POINT), values, strict=True):
            if value is not None:
                with torch.no_grad():
                    getattr(module, name).copy_(value)


def _first_scale(weight: Tensor, quantizer: LayerQuantizer) -> tuple[Tensor, Tensor | None]:
    quantization = quantizer.scheme.weights
    if not quantization.symmetric:
        return weight_scale_and_zero_point(weight, quantization)
    largest = code_range(quantization.bits)[1]
    scale: Tensor = 2 * sharing(weight, quantization).abs().mean(-1) / largest**0.5
    return scale, None


def _register(module: Any, name: str, value: Tensor | None, like: Tensor) -> None:
    import torch

    if value is not None:
        # FSDP2 shards parameters of one type together.
        module.register_parameter(name, torch.nn.Parameter(value.detach().clone().to(like.device, like.dtype)))


@contextmanager
def _whole(parameters: Sequence[Any]) -> Iterator[None]:
    """Show parameters whole that `zero.Init` has divided."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters)):
        yield
