"""Mixtures of experts under quantization-aware training: rounding in the fused experts of Transformers.

Transformers 5.17 holds the experts of a layer in parameters of three dimensions and decorates their class with
`use_experts_implementation` (`integrations/moe.py`). A checkpoint has one matrix for each expert and projection, under
names that a family chooses; the library's own conversion tells which.

Shapes: E experts, N tokens, K experts a token, S = N · K rows, H hidden channels, F channels inside an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ....ds_configs.quantization.layers import LinearLayer, selected_layers
from ....ds_configs.quantization.mixtures import expert_scheme
from ....ds_configs.quantization.scheme import QuantizationScheme
from ....ds_configs.specs.errors import Fault
from ....plugins.compressed_tensors.codes import StoredLayer
from .grouped_linear import GroupedRounding, grouped_fake_quantized_linear
from .layers import LayerQuantizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_Matrices = Mapping[str, tuple[str, ...]]
_GATED: _Matrices = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_PLAIN: _Matrices = {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}
"""Parameters of experts with and without a gate, and the matrices of a checkpoint that make up each, row below row."""


def is_fused_experts(module: Any) -> bool:
    """Tell whether a module holds the experts of a layer in parameters of three dimensions."""
    return all(hasattr(module, name) for name in ("is_transposed", "is_concatenated", "has_gate", "_apply_gate"))


def expert_linear_layers(model: Any, name: str) -> tuple[LinearLayer, ...]:
    """Return the matrices of a fused experts module, under the names that its checkpoint has.

    Experts that cannot be rounded stand there by the names of their parameters, so that a scheme can leave them out.

    Args:
        model: Transformers model, with PEFT around it or not.
        name: Of the module in the model.
    """
    module, names = model.get_submodule(name), _checkpoint_names(model, name)
    if _unfit(module, name, names):
        shapes = {each: _shape(parameter) for each, parameter in module.named_parameters(recurse=False)}
        return tuple(
            _layer(f"{name}.{each}", *(reversed(shape[1:]) if module.is_transposed else shape[1:]))
            for each, shape in shapes.items()
            if len(shape) == 3
        )
    layers = []
    for parameter, matrices in _matrices(module).items():
        experts, rows, columns = _shape(getattr(module, parameter))
        layers += [
            _layer(names[f"{expert}.{matrix}"], rows // len(matrices), columns)
            for expert in range(experts)
            for matrix in matrices
        ]
    return tuple(layers)


def experts_faults(model: Any, scheme: QuantizationScheme) -> list[Fault]:
    """Return why the experts of a model cannot be trained with the numbers of a scheme, all together."""
    unfit: dict[tuple[str, str], list[str]] = {}
    partial = []
    for name, module in model.named_modules():
        if not is_fused_experts(module):
            continue
        names, layers = _checkpoint_names(model, name), expert_linear_layers(model, name)
        chosen = selected_layers(scheme, layers)
        reason = _unfit(module, name, names)
        if reason and (chosen or names):
            unfit.setdefault((f"{type(module).__name__} {reason}", _way_out(name, names)), []).append(name)
        elif not reason and len(chosen) < len(layers):
            partial.append(name)
    faults = [Fault(where="experts", value=_shown(places), rule=rule, fix=fix) for (rule, fix), places in unfit.items()]
    if partial:
        rule = (
            "are left out, wholly or in part: Transformers 5.17 finds no dense experts in a packed checkpoint, and "
            "runs with random ones"
        )
        fix = "leave no matrix of an expert out"
        faults.append(Fault(where="ignore", value=_shown(partial), rule=rule, fix=fix))
    return faults


def fake_quantize_experts(module: Any, name: str, quantizers: Mapping[str, LayerQuantizer]) -> None:
    """Change the class of a fused experts module so that each of its matrices is rounded.

    Their inputs are not, whatever the scheme says, because no loader rounds them (`expert_scheme`).

    Args:
        module: As `is_fused_experts` knows it, without faults.
        name: Of the module in the model.
        quantizers: How each matrix is rounded, in the order of `expert_linear_layers`.
    """
    relative = list(_relative_names(module))
    assert len(quantizers) == len(relative), f"{len(quantizers)} of {len(relative)} matrices of {name} are targeted"
    for quantizer in quantizers.values():
        quantizer.scheme, quantizer.input_range = expert_scheme(quantizer.scheme), None
    original: Any = type(module)
    module.__class__ = _fake_quantized_class(original)
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
        """Own parameters that the packed form takes the place of."""
        return tuple(_matrices(self))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of every token's experts [N, H]; plain where rounding has not begun.

        The order of sums is that of `experts_implementation="eager"`, to the bit.

        Args:
            hidden_states: [N, H].
            top_k_index: Experts of each token [N, K].
            top_k_weights: Their weights [N, K].
        """

        import torch

        quantizer = next(iter(self.quantizers.values()))
        if not quantizer.state.enabled:
            plain: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)  # type: ignore[misc]
            return plain
        (into, matrices), (out_of, _) = _matrices(self).items()
        into_weight, out_weight = getattr(self, into), getattr(self, out_of)
        self._note_dtype(into_weight.dtype)
        weight = quantizer.rounding().weight
        tokens_S, weights_S, ends = _by_expert(top_k_index, top_k_weights, self.num_experts)
        sizes = [last - first for first, last in zip((0, *ends), ends, strict=False)]
        inner = GroupedRounding(weight=weight, matrices=len(matrices))
        inner_SF = grouped_fake_quantized_linear(hidden_states[tokens_S], ends, into_weight, inner)
        activate = self._apply_gate if self.has_gate else self.act_fn
        # Tails of vectors are computed by other instructions: activating all rows at once would change last bits.
        active_SF = torch.cat([activate(part) for part in inner_SF.split(sizes)])
        answers_SH = grouped_fake_quantized_linear(active_SF, ends, out_weight, GroupedRounding(weight=weight))
        # Nemotron-H alone has no gate, and sums in the type of the weights.
        summed_NH = torch.zeros_like(hidden_states, dtype=None if self.has_gate else top_k_weights.dtype)
        answers_SH = (answers_SH * weights_S[:, None]).to(summed_NH.dtype)
        # One expert after another: a token has each expert once, so that sums have one order on every device.
        for tokens, answers in zip(tokens_S.split(sizes), answers_SH.split(sizes), strict=True):
            if len(tokens):
                summed_NH.index_add_(0, tokens, answers)
        return summed_NH.to(hidden_states.dtype)

    def stored_layers(self, parameters: Mapping[str, Tensor]) -> dict[str, StoredLayer]:
        """Return what the checkpoint holds in place of the parameters, for each expert and matrix."""
        found = {}
        for parameter, matrices in _matrices(self).items():
            for expert, whole in enumerate(parameters[parameter]):
                for matrix, part in zip(matrices, whole.chunk(len(matrices)), strict=True):
                    name = f"{expert}.{matrix}"
                    quantizer = self.quantizers[name]
                    seen = part if quantizer.forward_dtype is None else part.to(quantizer.forward_dtype)
                    found[name] = quantizer.stored_layer(seen)
        return found

    def _note_dtype(self, dtype: torch.dtype) -> None:
        if next(iter(self.quantizers.values())).forward_dtype != dtype:
            for quantizer in self.quantizers.values():
                quantizer.forward_dtype = dtype


def _by_expert(top_k_index: Tensor, top_k_weights: Tensor, experts: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return tokens [S] and weights [S] sorted by expert, then choice, then token, and where each expert's rows end.

    Indices beyond the last expert stand for experts of other ranks, and are left out.
    """

    import torch

    chosen_S = top_k_index.t().reshape(-1)
    order_S = torch.argsort(chosen_S, stable=True)
    counts = torch.bincount(chosen_S, minlength=experts)[:experts]
    ends = tuple(counts.cumsum(0).tolist())
    order_S = order_S[: ends[-1]]
    tokens_S = order_S % len(top_k_index)
    return tokens_S, top_k_weights[tokens_S, order_S // len(top_k_index)], ends


def _matrices(module: Any) -> _Matrices:
    return _GATED if module.has_gate else _PLAIN


def _relative_names(module: Any) -> Iterator[str]:
    for matrices in _matrices(module).values():
        for expert in range(module.num_experts):
            for matrix in matrices:
                yield f"{expert}.{matrix}"


def _layer(name: str, out_features: int, in_features: int) -> LinearLayer:
    return LinearLayer(name=name, out_features=out_features, in_features=in_features, is_expert=True)


def _shape(parameter: Any) -> tuple[int, ...]:
    """Return [E, O, I] also of a parameter that `zero.Init` has divided."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _shown(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _unfit(module: Any, name: str, names: Mapping[str, str]) -> str:
    """Return why the experts of a layer cannot be rounded; empty if they can."""
    if _is_adapted(name):
        return "carries PEFT's adapters, which are not merged before rounding"
    flags = (
        ("has biases", module.has_bias),
        ("stores its matrices transposed", module.is_transposed),
        ("interleaves gate and up", not module.is_concatenated),
        ("has no single matrices in the checkpoints of its family", not names),
    )
    return ", ".join(reason for reason, is_so in flags if is_so)


def _way_out(name: str, names: Mapping[str, str]) -> str:
    if _is_adapted(name):
        return "adapt other layers, such as those of attention"
    return "" if names else "add re:.*experts to ignore: they stay dense"


def _is_adapted(name: str) -> bool:
    return ".base_layer" in name


@cache
def _fake_quantized_class(experts: type) -> type:
    return type(f"FakeQuantized{experts.__name__}", (FakeQuantizedExperts, experts), {})


def _checkpoint_names(model: Any, name: str) -> dict[str, str]:
    """Return the names of single matrices in a checkpoint by their relative names; empty if it has none.

    Numbers are sent through the conversion that saving does in place of weights; where they come out says which matrix
    a name means.
    """

    import torch
    from transformers.core_model_loading import revert_weight_conversion

    root, prefix = _pretrained(model)
    if root is None:
        return {}
    module, inside = model.get_submodule(name), name.removeprefix(prefix).replace(".base_layer", "")
    relative, probes = list(_relative_names(module)), {}
    rest = torch.arange(len(relative))
    for parameter, matrices in _matrices(module).items():
        count = module.num_experts * len(matrices)
        probes[f"{inside}.{parameter}"] = rest[:count].reshape(module.num_experts, len(matrices), 1)
        rest = rest[count:]
    found = revert_weight_conversion(root, probes)
    if len(found) != len(relative) or any(probe.numel() != 1 for probe in found.values()):
        return {}
    return {relative[int(probe)]: full.removesuffix(".weight") for full, probe in found.items()}


def _pretrained(model: Any) -> tuple[Any | None, str]:
    from transformers import PreTrainedModel

    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            return module, f"{name}." if name else ""
    return None, ""
