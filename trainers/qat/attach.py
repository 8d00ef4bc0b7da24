"""Adds fake quantization to a model: changes the class of its linear layers and experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ...ds_configs.legality.model_classes import model_class_errors
from ...ds_configs.quantization.layers import (
    DEFAULT_IGNORE,
    LinearLayer,
    expert_scheme,
    scheme_errors,
    selected_layers,
    unloadable_expert_errors,
    with_default_ignore,
)
from ...ds_configs.quantization.scheme import QuantizationScheme, WeightQuantization
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins import patches
from ...plugins.compressed_tensors import code_range, sharing, weight_scale_and_zero_point
from ...plugins.transformers.meta_model import linear_layer, router_names
from .experts import expert_linear_layers, experts_errors, fake_quantize_experts, is_fused_experts
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
            yield from module.quantizers.values()

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

    Raises:
        UsageError: the scheme does not fit the model; all errors together.
    """
    if any(isinstance(module, FakeQuantizedLinear) for module in model.modules()):
        rule, fix = "rounds already", "attach once, and add no adapters"
        raise UsageError(ConfigError(where="model", value=type(model).__name__, rule=rule, fix=fix))
    if hasattr(model, "peft_config"):
        rule, fix = "has PEFT adapters", "merge them first, with shardwright merge or model.merge_and_unload()"
        raise UsageError(ConfigError(where="model", value=type(model).__name__, rule=rule, fix=fix))
    # Modules that can round, each with its matrices.
    candidates: dict[str, tuple[LinearLayer, ...]] = {}
    for name, module in model.named_modules():
        if is_fused_experts(module):
            candidates[name] = expert_linear_layers(model, name)
        elif type(module) is torch.nn.Linear:
            candidates[name] = (linear_layer(model, checkpoint_name(name), module),)
    layers = tuple(layer for layers in candidates.values() for layer in layers)
    if errors := list(config.errors()):
        raise UsageError(errors)
    scheme = config.rounded_scheme
    if scheme.ignore == DEFAULT_IGNORE:
        # Without an explicit list of the user, the output head and routers stay dense under any name.
        heads = [layer.name for layer in layers if layer.is_head]
        scheme = with_default_ignore(scheme, (*heads, *map(checkpoint_name, router_names(model, linear=True))), layers)
    selected = selected_layers(scheme, layers)
    if errors := _model_errors(config, scheme, selected, candidates, model):
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
    names, modules = {layer.name for layer in selected}, dict(model.named_modules())
    common: dict[str, Any] = {
        "scheme": attachment.scheme,
        "stored_dtype": attachment.stored_dtype,
        "state": attachment.state,
    }
    for module_name, matrices in candidates.items():
        quantizers = {each.name: LayerQuantizer(name=each.name, **common) for each in matrices if each.name in names}
        if not quantizers:
            continue
        module = modules[module_name]
        attachment.modules[module_name] = module
        if is_fused_experts(module):
            # Loaders round no inputs of experts by stored ranges.
            fake_quantize_experts(module, module_name, quantizers)
            continue
        (quantizer,) = quantizers.values()
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


def _model_errors(
    config: QATConfig,
    scheme: QuantizationScheme,
    selected: tuple[LinearLayer, ...],
    candidates: Mapping[str, tuple[LinearLayer, ...]],
    model: Any,
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
    layers = [layer for layers in candidates.values() for layer in layers]
    if not layers:
        rule = "has no linear layers (quantized layers cannot be trained)"
        return [ConfigError(where="model", value=type(model).__name__, rule=rule)]
    errors = scheme_errors(scheme, layers, selected)
    errors += unloadable_expert_errors(expert_scheme(scheme), selected, layers)
    if config.learns_scales and any(layer.is_expert for layer in selected):
        rule = "scales of fused experts cannot be learned"
        errors.append(ConfigError(where="weight_rule", value="learned", rule=rule, fix="use minmax"))
    return errors + experts_errors(model)


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
