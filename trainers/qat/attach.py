"""Adds fake quantization to a model: changes the class of its linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ...ds_configs.legality.model_classes import model_class_errors
from ...ds_configs.quantization.layers import (
    DEFAULT_IGNORE,
    LinearLayer,
    scheme_errors,
    selected_layers,
    with_default_ignore,
)
from ...ds_configs.quantization.scheme import QuantizationScheme, WeightQuantization
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins import patches
from ...plugins.compressed_tensors import code_range, sharing, weight_scale_and_zero_point
from ...plugins.transformers.meta_model import linear_layer, router_names
from .layers import (
    LEARNED,
    FakeQuantizedLinear,
    InputRange,
    LayerQuantizer,
    QuantizationState,
)
from .settings import QATConfig

if TYPE_CHECKING:
    from torch import Tensor

ATTRIBUTE = "quantization_attachment"
"""Attribute of a model that holds its `Attachment`."""


@dataclass(kw_only=True)
class Attachment:
    """Everything that `attach` added to a model."""

    config: QATConfig
    scheme: QuantizationScheme
    """Scheme of the checkpoint; `ignore` also lists what this model keeps dense."""
    stored_dtype: torch.dtype
    """Dtype of scales and unquantized tensors in the checkpoint."""
    state: QuantizationState
    modules: dict[str, Any]
    """Modules that round, by their names in the model."""
    layers: tuple[LinearLayer, ...]
    """Rounded matrices, by their names in the checkpoint."""
    dense: tuple[str, ...] = ()
    """Linear layers and routers that stay dense, by their names in the checkpoint."""

    def quantizers(self) -> Iterator[LayerQuantizer]:
        """Yield the quantizer of each matrix."""
        for module in self.modules.values():
            yield module.quantizer

    @property
    def ranges(self) -> dict[str, InputRange]:
        """Stored ranges by the name of the matrix; empty if the scheme stores none."""
        return {each.name: each.input_range for each in self.quantizers() if each.input_range is not None}

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Learned scales and zero points, which the optimizer must train."""
        learned = (getattr(module, name, None) for module in self.modules.values() for name in LEARNED)
        return [parameter for parameter in learned if parameter is not None]


def attachment_of(model: Any) -> Attachment | None:
    """Return the attachment of a model, also inside wrappers of DDP, DeepSpeed and `torch.compile`."""
    while model is not None:
        attachment: Attachment | None = getattr(model, "__dict__", {}).get(ATTRIBUTE)
        if attachment is not None:
            return attachment
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        model = inner if isinstance(inner, torch.nn.Module) else None
    return None


def checkpoint_name(name: str) -> str:
    """Return a module's name without the parts added by `torch.compile` and activation checkpointing."""
    return name.replace("._orig_mod", "").replace("._checkpoint_wrapped_module", "")


def attach(model: Any, config: QATConfig, *, stored_dtype: torch.dtype | None = None) -> Attachment:
    """Change the class of the layers that a scheme targets; they round while `state.enabled` is true.

    Parameters, hooks and state dict keys do not change, except that learned scales are added.
    """
    if any(isinstance(module, FakeQuantizedLinear) for module in model.modules()):
        rule, fix = "rounds already", "attach once, and add no adapters"
        raise UsageError(ConfigError(where="model", value=type(model).__name__, rule=rule, fix=fix))
    if hasattr(model, "peft_config"):
        rule, fix = "has PEFT adapters", "merge them first, with shardwright merge or model.merge_and_unload()"
        raise UsageError(ConfigError(where="model", value=type(model).__name__, rule=rule, fix=fix))
    modules = dict(model.named_modules())
    candidates = {
        name: linear_layer(model, checkpoint_name(name), module)
        for name, module in modules.items()
        if type(module) is torch.nn.Linear
    }
    layers = tuple(candidates.values())
    if errors := list(config.errors()):
        raise UsageError(errors)
    scheme = config.rounded_scheme
    if scheme.ignore == DEFAULT_IGNORE:
        # Without an explicit list of the user, the output head and routers stay dense under any name.
        heads = [layer.name for layer in layers if layer.is_head]
        scheme = with_default_ignore(scheme, (*heads, *map(checkpoint_name, router_names(model, linear=True))), layers)
    selected = selected_layers(scheme, layers)
    if errors := _model_errors(scheme, selected, layers, model):
        raise UsageError(errors)
    if config.stored_dtype is not None:
        stored_dtype = getattr(torch, config.stored_dtype)
    routers = tuple(map(checkpoint_name, router_names(model, linear=False)))
    attachment = Attachment(
        config=config,
        scheme=replace(scheme, ignore=(*scheme.ignore, *(name for name in routers if name not in scheme.ignore))),
        stored_dtype=stored_dtype or model.dtype,
        state=QuantizationState(rule=config.weight_rule),
        modules={},
        layers=selected,
    )
    names = {layer.name for layer in selected}
    common: dict[str, Any] = {
        "scheme": attachment.scheme,
        "stored_dtype": attachment.stored_dtype,
        "state": attachment.state,
    }
    for module_name, layer in candidates.items():
        if layer.name not in names:
            continue
        module = modules[module_name]
        attachment.modules[module_name] = module
        quantizer = LayerQuantizer(name=layer.name, **common)
        if scheme.activations_are_static:
            assert scheme.activations is not None, "stored ranges belong to rounded activations"
            quantizer.input_range = InputRange(
                scheme.activations, stored_dtype=attachment.stored_dtype, name=quantizer.name
            )
        patches.swap_class("qat-linear", module, FakeQuantizedLinear)
        module.quantizer = quantizer
        if config.learns_scales:
            _add_learned_scales(module, module.weight, scheme.weights)
    # Listed now, because an engine may rename modules later.
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    attachment.dense = (*routers, *(checkpoint_name(name) for name in linear if name not in attachment.modules))
    setattr(model, ATTRIBUTE, attachment)
    return attachment


_FUSED_EXPERTS = ("is_transposed", "is_concatenated", "has_gate", "_apply_gate")
"""Attributes of modules with the experts of a layer in parameters of three dimensions (transformers 5.17)."""


def _model_errors(
    scheme: QuantizationScheme, selected: tuple[LinearLayer, ...], layers: tuple[LinearLayer, ...], model: Any
) -> list[ConfigError]:
    from transformers.pytorch_utils import Conv1D

    modules = dict(model.named_modules())
    class_errors = model_class_errors(
        type(model).__name__,
        work="qat",
        is_causal=True,
        is_encoder_decoder=False,
        model_type=model.config.get_text_config().model_type if hasattr(model, "config") else "",
        transposed_layers=[name for name, module in modules.items() if isinstance(module, Conv1D)],
        targets=scheme.targets,
    )
    if class_errors:
        return class_errors
    if not layers:
        rule = "has no linear layers (quantized layers cannot be trained)"
        return [ConfigError(where="model", value=type(model).__name__, rule=rule)]
    errors = scheme_errors(scheme, layers, selected)
    fused = {type(each).__name__ for each in modules.values() if all(hasattr(each, name) for name in _FUSED_EXPERTS)}
    fix = "train without rounding, and quantize the result"
    rule = "are experts in one module, and only linear layers are rounded"
    errors += [ConfigError(where="model", value=name, rule=rule, fix=fix) for name in sorted(fused)]
    return errors


def _add_learned_scales(module: Any, weight: Tensor, quantization: WeightQuantization) -> None:
    """Add parameters for scales, and zero points if any, with the values of the weight before training."""
    gathering: Any = nullcontext()
    if hasattr(weight, "ds_id"):
        import deepspeed

        gathering = deepspeed.zero.GatheredParameters([weight])
    with gathering:
        full = weight.detach()
        if quantization.symmetric:
            # LSQ's initial scale, 2 · mean |w| / √largest code.
            mean_S = sharing(full, quantization).abs().mean(-1)
            values = [2 * mean_S / code_range(quantization.bits)[1] ** 0.5, None]
        else:
            values = [*weight_scale_and_zero_point(full, quantization)]
    for name, value in zip(LEARNED, values, strict=True):
        if value is not None:
            # FSDP2 shards parameters of the same dtype together.
            value = value.detach().clone().to(weight.device, weight.dtype)
            module.register_parameter(name, torch.nn.Parameter(value))
