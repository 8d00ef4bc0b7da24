"""Cuts channels and heads out of a teacher's tensors, the same ones wherever they occur.

Norms see fewer channels: their mean square over what is left differs from that over all. Each gain is multiplied by
√((Σ_kept e / H') / (Σ e / H)), e being a channel's mean square before the norm, so that what stays has the size it had.
Channels that are zero everywhere can thus be cut without any change of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .families import Axis, WidthFamily
from .importance import Scores
from .layers import LayerStack
from .request import Widths

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class KeptWidths:
    """Kept channels and heads of every width, as ascending indices."""

    hidden: torch.Tensor
    """Channels of the residual stream."""
    intermediate: dict[int, torch.Tensor]
    """Channels of each layer's MLP, by the teacher's number of the layer."""
    heads: dict[int, torch.Tensor]
    """Query heads of each layer; those of one key/value head stand together."""
    key_value_heads: dict[int, torch.Tensor]
    """Key/value heads of each layer."""


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` largest scores, ascending; the lower index wins a tie."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def kept_widths(scores: Scores, teacher: Widths, student: Widths) -> KeptWidths:
    """Choose what stays: in each layer the key/value heads with the best query heads, and of those the best ones."""
    import torch

    group, kept_group = (w.heads // w.key_value_heads for w in (teacher, student))
    heads, key_value_heads = {}, {}
    for layer, scores_A in scores.heads.items():
        grouped = scores_A.view(teacher.key_value_heads, group)
        members = [best(row, kept_group) for row in grouped]
        together = torch.stack([row[kept].sum() for row, kept in zip(grouped, members, strict=True)])
        groups = best(together, student.key_value_heads)
        key_value_heads[layer] = groups
        heads[layer] = torch.cat([int(g) * group + members[int(g)] for g in groups])
    return KeptWidths(
        hidden=best(scores.hidden_H, student.hidden_size),
        intermediate={n: best(scores_I, student.intermediate_size) for n, scores_I in scores.intermediate.items()},
        heads=heads,
        key_value_heads=key_value_heads,
    )


@dataclass(frozen=True, kw_only=True)
class WidthCutter:
    """Cuts tensors by name."""

    family: WidthFamily
    stack: LayerStack
    teacher: Widths
    kept: KeptWidths
    scores: Scores

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the teacher with the student's widths, and with its gain corrected if it is a norm's."""
        rule = self.family.rule(name)
        assert rule is not None, "names are checked before anything is cut"
        layer = self.stack.layer_of(name)
        for axis, meaning in enumerate(rule.axes[: tensor.dim()]):
            indices = self._indices(meaning, layer)
            if indices is not None:
                tensor = tensor.index_select(axis, indices)
        if rule.side == "norm" and name.endswith((".weight", ".gamma")):
            tensor = (tensor.double() * self._gain(name.rpartition(".")[0])).to(tensor.dtype)
        return tensor

    def _indices(self, meaning: Axis, layer: int | None) -> torch.Tensor | None:
        import torch

        if meaning == "hidden":
            return self.kept.hidden
        if meaning == "other":
            return None
        assert layer is not None, "only layers have channels and heads"
        if meaning == "intermediate":
            return self.kept.intermediate[layer]
        if meaning == "query":
            return _channels_of(self.kept.heads[layer], self.teacher.head_dim)
        if meaning in ("key", "value"):
            return _channels_of(self.kept.key_value_heads[layer], self.teacher.head_dim)
        heads = self.kept.heads[layer]
        parts = [heads + part * self.teacher.heads for part in range(3)]
        return _channels_of(torch.cat(parts), self.teacher.head_dim)

    def _gain(self, norm: str) -> float:
        energy_H = self.scores.energies.get(self.stack.canonical(norm), self.scores.residual_energy_H)
        whole = float(energy_H.mean())
        return (float(energy_H[self.kept.hidden].mean()) / whole) ** 0.5 if whole > 0 else 1.0


def _channels_of(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    import torch

    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()
