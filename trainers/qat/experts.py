"""Fake quantization of the fused experts of Transformers.

Transformers 5.17 stores the experts of a layer in parameters of three dimensions and decorates their class with
`use_experts_implementation` (`integrations/moe.py`). A checkpoint has one matrix per expert and projection, with names
that depend on the model family; the conversion of Transformers maps them.

Shapes: E experts, N tokens, K experts per token, S = N · K rows, H hidden channels, F channels inside an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ...ds_configs.quantization.layers import LinearLayer, expert_scheme
from ...ds_configs.specs.errors import ConfigError
from ...plugins import patches
from ...plugins.compressed_tensors import RoundedWeight
from .layers import LayerQuantizer, some_names
from .rounding import Rounding, round_weight

if TYPE_CHECKING:
    from torch import Tensor

_Matrices = Mapping[str, tuple[str, ...]]
_GATED: _Matrices = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_PLAIN: _Matrices = {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}
"""Parameters of experts with and without a gate: the matrices of the checkpoint that each concatenates along O."""


def is_fused_experts(module: Any) -> bool:
    """Return whether a module stores the experts of a layer in parameters of three dimensions."""
    return all(hasattr(module, name) for name in ("is_transposed", "is_concatenated", "has_gate", "_apply_gate"))


def expert_linear_layers(model: Any, name: str) -> tuple[LinearLayer, ...]:
    """Return the matrices of a fused experts module by their names in the checkpoint, if it can be rounded."""
    module, names, layers = model.get_submodule(name), _checkpoint_names(model, name), []
    for parameter, matrices in _matrices(module).items() if not _unfit(module, names) else ():
        weight = getattr(module, parameter)
        # `zero.Init` partitions the parameter.
        experts, rows, columns = getattr(weight, "ds_shape", weight.shape)
        layers += [
            LinearLayer(
                name=names[f"{expert}.{matrix}"],
                out_features=rows // len(matrices),
                in_features=columns,
                is_expert=True,
            )
            for expert in range(experts)
            for matrix in matrices
        ]
    return tuple(layers)


def experts_errors(model: Any) -> list[ConfigError]:
    """Return why the experts of a model cannot be rounded, all errors together."""
    unfit: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if is_fused_experts(module) and (reason := _unfit(module, _checkpoint_names(model, name))):
            unfit.setdefault(f"{type(module).__name__} {reason}", []).append(name)
    fix = "train without rounding, and quantize the result"
    return [
        ConfigError(where="experts", value=some_names(modules), rule=rule, fix=fix) for rule, modules in unfit.items()
    ]


def fake_quantize_experts(module: Any, name: str, quantizers: Mapping[str, LayerQuantizer]) -> None:
    """Change the class of a fused experts module so that it rounds each of its matrices, in their order.

    Inputs of experts are never rounded, because no loader rounds them (`expert_scheme`).
    """
    relative = _relative_names(module)
    assert len(quantizers) == len(relative), f"{len(quantizers)} of {len(relative)} matrices of {name} are targeted"
    for quantizer in quantizers.values():
        quantizer.scheme, quantizer.input_range = expert_scheme(quantizer.scheme), None
    experts: type = type(module)
    patches.swap_class("qat-experts", module, _fake_quantized_class(experts))
    module.quantizers = dict(zip(relative, quantizers.values(), strict=True))


class FakeQuantizedExperts:
    """Fused experts whose forward pass computes with the numbers of the checkpoint."""

    quantizers: dict[str, LayerQuantizer]
    num_experts: int
    has_gate: bool
    act_fn: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]

    @property
    def consumed(self) -> tuple[str, ...]:
        """Parameters that the packed form replaces."""
        return tuple(_matrices(self))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts [N, H]; without rounding before `start_step`.

        The order of summation is that of `experts_implementation="eager"`, so results are equal bit for bit.
        """
        quantizer = next(iter(self.quantizers.values()))
        if not quantizer.state.enabled:
            plain: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)  # type: ignore[misc]
            return plain
        (into, matrices), (out_of, _) = _matrices(self).items()
        into_weight, out_weight = getattr(self, into), getattr(self, out_of)
        if quantizer.forward_dtype != into_weight.dtype:
            for matrix_quantizer in self.quantizers.values():
                matrix_quantizer.forward_dtype = into_weight.dtype
        rounding = quantizer.rounding()
        # Rows sorted by expert, then choice, then token; indices after the last expert denote those of other ranks.
        chosen_S = top_k_index.t().reshape(-1)
        ends = tuple(torch.bincount(chosen_S, minlength=self.num_experts)[: self.num_experts].cumsum(0).tolist())
        order_S = torch.argsort(chosen_S, stable=True)[: ends[-1]]
        tokens_S, choices_S = order_S % len(top_k_index), order_S // len(top_k_index)
        weights_S = top_k_weights[tokens_S, choices_S]
        sizes = [last - first for first, last in zip((0, *ends), ends, strict=False)]
        inner_SF = _grouped_linear(hidden_states[tokens_S], ends, into_weight, rounding, matrices=len(matrices))
        activate = self._apply_gate if self.has_gate else self.act_fn
        # Activating all rows together changes last bits: other instructions compute the tail of a vector.
        active_SF = torch.cat([activate(part) for part in inner_SF.split(sizes)])
        outputs_SH = _grouped_linear(active_SF, ends, out_weight, rounding)
        # Only Nemotron-H has no gate, and it sums in the dtype of the weights.
        summed_NH = torch.zeros_like(hidden_states, dtype=None if self.has_gate else top_k_weights.dtype)
        outputs_SH = (outputs_SH * weights_S[:, None]).to(summed_NH.dtype)
        # One expert at a time: a token uses each expert once, so the order of sums is the same on every device.
        for tokens, outputs in zip(tokens_S.split(sizes), outputs_SH.split(sizes), strict=True):
            if len(tokens):
                summed_NH.index_add_(0, tokens, outputs)
        return summed_NH.to(hidden_states.dtype)

    def stored_layers(self, parameters: Mapping[str, Tensor]) -> dict[str, RoundedWeight]:
        """Return the stored form of the parameters, per expert and matrix."""
        stored = {}
        for parameter, matrices in _matrices(self).items():
            for expert, full in enumerate(parameters[parameter]):
                for matrix, part in zip(matrices, full.chunk(len(matrices)), strict=True):
                    name = f"{expert}.{matrix}"
                    quantizer = self.quantizers[name]
                    seen = part if quantizer.forward_dtype is None else part.to(quantizer.forward_dtype)
                    stored[name] = quantizer.stored_layer(seen, parameters)
        return stored


def _grouped_linear(
    rows: Tensor, ends: Sequence[int], weight: Tensor, rounding: Rounding, *, matrices: int = 1
) -> Tensor:
    """Return ``x_e · round(W_e)ᵀ`` [T, O] for the rows of every expert e, with straight-through gradients.

    The gradient of the parameter is ``dL/dW_e = dL/dy_eᵀ · x_e``, and zero for experts without rows. Like a plain
    layer, it computes in the autocast dtype, or in the dtype of the rows without autocast.

    Args:
        rows: [T, I], sorted by expert.
        ends: Index after the last row of each expert.
        matrices: Matrices of the checkpoint that are concatenated along O: two for gate and up.
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        rows = rows.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        output: Tensor = _GroupedLinear.apply(rows, weight, tuple(ends), rounding, matrices)
    return output


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, ends: tuple[int, ...], rounding: Rounding, matrices: int
    ) -> Tensor:
        def rounded_expert(weight_OI: Tensor) -> Tensor:
            # Each matrix of the checkpoint is rounded separately.
            parts = [round_weight(part, rounding).value(rounding.quantization) for part in weight_OI.chunk(matrices)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        ctx.ends, ctx.rounded = ends, rounded_expert
        # Like plain layers, frozen experts do not need their inputs in the backward pass.
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
        output = rows.new_zeros(len(rows), weight.shape[1])
        for expert, first, last in _occupied(ends):
            rounded = ctx.rounded(weight[expert]).to(rows.dtype)
            # DeepSpeed's ZeRO-3 replaces `torch.nn.functional.linear` with a function that saves its weight.
            output[first:last] = torch.ops.aten.linear.default(rows[first:last], rounded)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        by_rows = gradient.new_zeros(len(gradient), weight.shape[2]) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for expert, first, last in _occupied(ctx.ends):
            part = gradient[first:last]
            if by_rows is not None:
                by_rows[first:last] = part @ ctx.rounded(weight[expert]).to(part.dtype)
            if by_weight is not None:
                by_weight[expert] = part.t() @ rows[first:last]
        return by_rows, by_weight, None, None, None


def _occupied(ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, first row, row after the last) for experts with rows."""
    first = 0
    for expert, last in enumerate(ends):
        if last > first:
            yield expert, first, last
        first = last


def _matrices(module: Any) -> _Matrices:
    return _GATED if module.has_gate else _PLAIN


def _relative_names(module: Any) -> list[str]:
    return [
        f"{expert}.{matrix}"
        for matrices in _matrices(module).values()
        for expert in range(module.num_experts)
        for matrix in matrices
    ]


def _unfit(module: Any, names: Mapping[str, str]) -> str:
    """Return why the experts of a layer cannot be rounded; empty if they can."""
    flags = (
        ("has biases", module.has_bias),
        ("stores its matrices transposed", module.is_transposed),
        ("interleaves gate and up", not module.is_concatenated),
        ("has no single matrices in the checkpoints of its family", not names),
    )
    return ", ".join(reason for reason, is_so in flags if is_so)


@cache
def _fake_quantized_class(experts: type) -> type:
    return type(f"FakeQuantized{experts.__name__}", (FakeQuantizedExperts, experts), {})


def _checkpoint_names(model: Any, name: str) -> dict[str, str]:
    """Return the checkpoint names of single matrices by their relative names; empty if the checkpoint has none.

    The conversion that saving applies to weights is applied to numbers: its output shows which matrix has which name.
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    roots = ((path, root) for path, root in model.named_modules() if isinstance(root, PreTrainedModel))
    root_name, root = next(roots, ("", None))
    if root is None:
        return {}
    module = model.get_submodule(name)
    inside = name.removeprefix(f"{root_name}." if root_name else "")
    relative, probes = _relative_names(module), {}
    rest = torch.arange(len(relative))
    for parameter, matrices in _matrices(module).items():
        count = module.num_experts * len(matrices)
        probes[f"{inside}.{parameter}"] = rest[:count].reshape(module.num_experts, len(matrices), 1)
        rest = rest[count:]
    converted = revert_weight_conversion(root, probes)
    if len(converted) != len(relative) or any(probe.numel() != 1 for probe in converted.values()):
        return {}
    return {relative[int(probe)]: full.removesuffix(".weight") for full, probe in converted.items()}
