"""The output head of a Transformers model as numbers: weight, bias, logit scale and soft-cap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import ConfigError, UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_MULTIPLYING_FAMILIES = ("hyperclovax",)
"""transformers 5.17.0, modeling_hyperclovax.py: multiplies by `logits_scaling`; Granite divides by it."""
_SCALED_BEFORE_THE_HEAD = ("minicpm3",)
"""transformers 5.17.0, modeling_minicpm3.py: divides the hidden states before the head."""


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """Maps hidden states to logits: ``cap · tanh(scale · (h Wᵀ + b) / cap)``; without a cap ``scale · (h Wᵀ + b)``.

    Shapes: N rows, H hidden width, V vocabulary (padding included).
    """

    weight_VH: torch.Tensor
    """The weight of the head, in the model's compute dtype; may require a gradient."""
    bias_V: torch.Tensor | None = None
    """The bias, or `None`."""
    scale: float = 1.0
    """Multiplies the logits: Cohere's `logit_scale`, Granite's `1 / logits_scaling`."""
    soft_cap: float | None = None
    """Gemma's `final_logit_softcapping`, or `None`."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits, padding included."""
        return int(self.weight_VH.shape[0])

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return logits of shape [N, V] in the dtype of the hidden states."""
        import torch

        product_NV = torch.nn.functional.linear(hidden_NH, self.weight_VH, self.bias_V)
        return shaped_logits(product_NV, self.scale, self.soft_cap)


def shaped_logits(product_NV: torch.Tensor, scale: float, soft_cap: float | None) -> torch.Tensor:
    """Apply scale and soft-cap to the result of the matrix product."""
    import torch

    if scale != 1.0:
        product_NV = product_NV * scale
    if soft_cap is not None:
        product_NV = torch.tanh(product_NV / soft_cap) * soft_cap
    return product_NV


def head_module(model: PreTrainedModel) -> Any:
    """Return the module that turns hidden states into logits.

    Raises:
        UsageError: the model has none.
    """
    module = model.get_output_embeddings()
    if module is None:
        rule = "has no output embeddings, which a fused loss needs"
        raise UsageError(ConfigError(where=type(model).__name__, rule=rule, fix="use implementation='plain'"))
    return module


def logit_shape(model: PreTrainedModel) -> tuple[float, float | None]:
    """Return the scale and the soft-cap that a model applies to its logits."""
    config = model.config.get_text_config()
    scale = 1.0
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None and config.model_type not in _SCALED_BEFORE_THE_HEAD:
        scale = float(divisor) if config.model_type in _MULTIPLYING_FAMILIES else 1.0 / float(divisor)
    for name in ("logit_scale", "output_multiplier"):
        factor = getattr(config, name, None)
        if isinstance(factor, int | float):
            scale *= float(factor)
    return scale, getattr(config, "final_logit_softcapping", None)


def output_head(model: PreTrainedModel) -> OutputHead:
    """Return the output head of a Transformers model; its tensors are the model's own.

    Raises:
        UsageError: the model has no head, or one that is not a product with a floating-point matrix.
    """
    weight_VH, bias_V = head_tensors(head_module(model))
    return shaped_head(model, weight_VH, bias_V)


def shaped_head(model: PreTrainedModel, weight_VH: torch.Tensor, bias_V: torch.Tensor | None) -> OutputHead:
    """Return a head of these tensors with the scale, the soft-cap and the additional bias of a model."""
    further_V = further_bias(model)
    if further_V is not None:
        further_V = further_V.to(weight_VH.dtype)
        bias_V = further_V if bias_V is None else bias_V + further_V
    scale, soft_cap = logit_shape(model)
    return OutputHead(weight_VH=weight_VH, bias_V=bias_V, scale=scale, soft_cap=soft_cap)


def further_bias(model: PreTrainedModel) -> torch.Tensor | None:
    """Return the bias [V] that BART and similar models add after the head; `None` in other families."""
    bias = getattr(model, "final_logits_bias", None)
    return None if bias is None else bias.detach().reshape(-1)


def head_tensors(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight and bias of a head, including its PEFT adapters.

    Raises:
        UsageError: the weight is quantized, or the module is not a linear layer.
    """
    import torch

    if hasattr(module, "modules_to_save"):
        module = module.modules_to_save[module.active_adapters[0]]
    plain = "peft" in type(module).__module__ if hasattr(module, "base_layer") else None
    if plain is False or (plain is None and type(module).forward is not torch.nn.Linear.forward):
        rule = f"is a {type(module).__name__}, but a fused loss needs a linear layer"
        raise UsageError(ConfigError(where="output head", rule=rule, fix="use implementation='plain'"))
    if hasattr(module, "base_layer"):
        weight_VH, bias_V = head_tensors(module.base_layer)
        if not module.disable_adapters:
            for adapter in module.active_adapters:
                weight_VH = weight_VH + module.get_delta_weight(adapter).to(weight_VH.dtype)
        return weight_VH, bias_V
    weight_VH = module.weight
    if not weight_VH.is_floating_point():
        rule = f"its weight is {weight_VH.dtype}, but a fused loss needs floating-point numbers"
        raise UsageError(ConfigError(where="output head", rule=rule, fix="use implementation='plain'"))
    return weight_VH, getattr(module, "bias", None)


def has_plain_head(model: PreTrainedModel) -> bool:
    """Return whether the logits are a product with a weight that the fused loss can read."""
    try:
        head_tensors(head_module(model))
    except UsageError:
        return False
    return True


def base_model(model: Any) -> Any:
    """Return the Transformers model inside a PEFT model."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def accepts_shifted_labels(inner: PreTrainedModel) -> bool:
    """Return whether a model is a causal language model whose own loss is Transformers' cross-entropy."""
    from inspect import Parameter, signature

    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    if inner.config.is_encoder_decoder or LOSS_MAPPING.get(getattr(inner, "loss_type", None)) is not ForCausalLMLoss:
        return False
    parameters = signature(type(inner).forward).parameters
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_any and "position_ids" in parameters
