"""Importance of each channel and head of a teacher, from its weights or from its activations on a text.

Shapes: N tokens, H hidden channels, I intermediate channels, A query heads, D width of a head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from .families import WidthFamily
from .layers import LayerStack
from .request import Widths

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Importance of everything that a width cut may remove; larger stays."""

    hidden_H: torch.Tensor
    """Of the channels of the residual stream, fp64."""
    intermediate: dict[int, torch.Tensor]
    """Of the channels of each layer's MLP, by the layer's number."""
    heads: dict[int, torch.Tensor]
    """Of the query heads of each layer."""
    energies: dict[str, torch.Tensor] = field(default_factory=dict)
    """Mean square of each hidden channel before each norm, by the norm's name without the base model's prefix."""
    residual_energy_H: torch.Tensor
    """The same for norms that were not measured."""


def magnitude_scores(
    tensors: Iterable[tuple[str, torch.Tensor]], family: WidthFamily, stack: LayerStack, widths: Widths, *, tied: bool
) -> Scores:
    """Return importance from the weights alone.

    A channel of the MLP: the product of the norms of the weights that make it and that read it. A head: the product of
    the Frobenius norms of its value and output weights. A channel of the residual stream: the norm of all that is
    written to it times the norm of all that reads it. What is never written or never read scores zero.
    """
    import torch

    zeros_H = torch.zeros(widths.hidden_size, dtype=torch.float64)
    written_H, read_H = zeros_H.clone(), zeros_H.clone()
    squares: dict[tuple[int, str, str], torch.Tensor | float] = defaultdict(float)
    for name, tensor in tensors:
        rule, layer = family.rule(name), stack.layer_of(name)
        if rule is None or not tensor.is_floating_point():
            continue
        for axis, meaning in enumerate(rule.axes[: tensor.dim()]):
            if meaning == "other" or (meaning == "hidden" and rule.side not in ("writes", "reads")):
                continue
            energy = _squares_along(tensor, axis)
            if meaning != "hidden":
                assert layer is not None, "only layers have channels and heads"
                squares[layer, name.rpartition(".")[0], meaning] += energy
                continue
            table = layer is None and tensor.dim() == 2
            if rule.side == "writes":
                written_H += energy / (tensor.shape[1 - axis] if table else 1)
            if rule.side == "reads" or (tied and table):
                read_H += energy / (tensor.shape[1 - axis] if table else 1)
    return Scores(
        hidden_H=(written_H * read_H).sqrt(),
        intermediate=_channel_scores(squares, stack.count),
        heads=_head_scores(squares, family, stack.count, widths),
        residual_energy_H=written_H,
    )


def _squares_along(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    squares = tensor.double().square()
    return squares.sum(dim=[other for other in range(tensor.dim()) if other != axis]) if tensor.dim() > 1 else squares


def _channel_scores(squares: dict[tuple[int, str, str], Any], layers: int) -> dict[int, torch.Tensor]:
    import torch

    scores = {}
    for layer in range(layers):
        modules = [value for (at, _, axis), value in squares.items() if at == layer and axis == "intermediate"]
        scores[layer] = torch.stack(modules).sqrt().prod(dim=0)
    return scores


def _head_scores(
    squares: dict[tuple[int, str, str], Any], family: WidthFamily, layers: int, widths: Widths
) -> dict[int, torch.Tensor]:
    scores = {}
    for (layer, _, axis), value in squares.items():
        if axis == "value":
            values_G = value.view(widths.key_value_heads, widths.head_dim).sum(1)
        elif axis == "query_key_value":
            values_G = value.view(3, widths.heads, widths.head_dim)[2].sum(1)
        else:
            continue
        values_A = values_G.repeat_interleave(widths.heads // widths.key_value_heads)
        path = next(m for at, m, a in squares if at == layer and a == "query" and m.endswith(family.attention_output))
        outputs_A = squares[layer, path, "query"].view(widths.heads, widths.head_dim).sum(1)
        scores[layer] = (values_A * outputs_A).sqrt()
    assert len(scores) == layers
    return scores


def activation_scores(
    model: Any, batches: Sequence[dict[str, torch.Tensor]], family: WidthFamily, stack: LayerStack, widths: Widths
) -> Scores:
    """Return importance from what a teacher does with token batches.

    A channel of the MLP: mean over tokens of |a| ‖w‖₂, the norm of what it adds to the residual stream, where w are the
    weights that read it. A head: mean of ‖W a‖₂, the same. A channel of the residual stream: mean |x| after every norm,
    each divided by its mean over channels, summed (Muralidharan et al. 2024, arXiv 2407.14679, §2.2).
    """
    import torch

    meter = _Meter(family=family, widths=widths)
    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            own = stack.canonical(name)
            layer = stack.layer_of(own + ".")
            for hook in meter.hooks_of(own, module, layer, stack):
                hooks.callback(hook.remove)
        model.eval()
        for batch in batches:
            model(**batch)
    means = {name: total_H / meter.tokens[name] for name, total_H in meter.outputs.items()}
    energies = {name: total_H / meter.tokens[name] for name, total_H in meter.energies.items()}
    measured = torch.stack(list(energies.values()))
    return Scores(
        hidden_H=sum((mean_H / mean_H.mean() for mean_H in means.values()), torch.zeros(widths.hidden_size).double()),
        intermediate=meter.channels,
        heads=meter.heads,
        energies=energies,
        residual_energy_H=measured.mean(dim=0),
    )


@dataclass(kw_only=True)
class _Meter:
    """Sums over the tokens that pass; dividing by their number changes no order within a layer."""

    family: WidthFamily
    widths: Widths
    channels: dict[int, Any] = field(default_factory=lambda: defaultdict(float))
    heads: dict[int, Any] = field(default_factory=lambda: defaultdict(float))
    outputs: dict[str, Any] = field(default_factory=lambda: defaultdict(float))
    energies: dict[str, Any] = field(default_factory=lambda: defaultdict(float))
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def hooks_of(self, name: str, module: Any, layer: int | None, stack: LayerStack) -> list[Any]:
        """Attach what measures a module; most need nothing."""
        if layer is not None:
            inside = name.removeprefix(f"{stack.path}.{layer}.")
            hook: Callable[..., None] | None = {
                self.family.mlp_output: partial(self._channels, layer),
                self.family.attention_output: partial(self._heads, layer),
            }.get(inside)
            if hook is not None:
                return [module.register_forward_pre_hook(hook)]
        rule = self.family.rule(f"{name}.weight")
        if rule is not None and rule.side == "norm":
            return [module.register_forward_hook(partial(self._norm, name))]
        return []

    def _channels(self, layer: int, module: Any, inputs: tuple[Any, ...]) -> None:
        activations_NI = inputs[0].flatten(0, -2)
        norms_I = _input_rows(module).float().norm(dim=1)
        self.channels[layer] += (activations_NI.float().abs().sum(dim=0) * norms_I).double().cpu()

    def _heads(self, layer: int, module: Any, inputs: tuple[Any, ...]) -> None:
        import torch

        activations_NAD = inputs[0].flatten(0, -2).float().unflatten(-1, (self.widths.heads, self.widths.head_dim))
        weight_ADH = _input_rows(module).float().unflatten(0, (self.widths.heads, self.widths.head_dim))
        added = [(activations_NAD[:, a] @ weight_ADH[a]).norm(dim=1).sum() for a in range(self.widths.heads)]
        self.heads[layer] += torch.stack(added).double().cpu()

    def _norm(self, name: str, module: Any, inputs: tuple[Any, ...], output_BSH: Any) -> None:
        stream_NH = inputs[0].flatten(0, -2).float()
        if self.family.centred:
            stream_NH = stream_NH - stream_NH.mean(dim=-1, keepdim=True)
        self.energies[name] += stream_NH.square().sum(dim=0).double().cpu()
        self.outputs[name] += output_BSH.flatten(0, -2).float().abs().sum(dim=0).double().cpu()
        self.tokens[name] += len(stream_NH)


def _input_rows(module: Any) -> torch.Tensor:
    """Return a weight as [in, out]."""
    from torch.nn import Linear

    weight: torch.Tensor = module.weight
    return weight.t() if isinstance(module, Linear) else weight
