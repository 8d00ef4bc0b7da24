"""Matches hidden states and attention of a student with those of a teacher, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ...ds_configs.specs.errors import Fault, UsageError
from ...plugins.transformers.attention_capture import AttentionTensor, LayerAttention, captured_attention
from ..losses.attention_relations import Visibility, relation_sum, visibility
from ..losses.attention_scores import HeadMatching, score_sum
from ..losses.hidden_states import HiddenStateKind, hidden_state_sum, projectors
from ..losses.layer_map import LayerMapKind, LayerMatch, LayerPairs, layer_map, pair_faults, paired_layers

if TYPE_CHECKING:
    import torch

Captured = Mapping[int, LayerAttention]


@dataclass(frozen=True, kw_only=True)
class HiddenStateTerm:
    """Matches hidden states; a linear projector joins the student where widths differ."""

    weight: float = 1.0
    """Multiplies the mean distance, above 0."""
    kind: HiddenStateKind = "mse"
    """`mse` over the width, or 1 - `cosine`."""
    layers: LayerMapKind | LayerPairs = "uniform"
    """Every student layer with the nearest teacher layer in relative depth, with an `interpolate`d one between two, or
    pairs of (student layer, teacher layer); 0 is the embedding, l the output of block l."""
    normalize: bool = True
    """Divides each token's squared error by the mean square of its teacher vector; the cosine needs none."""
    projector_learning_rate: float | None = None
    """Learning rate of the projectors; `None`: that of the student."""

    def __post_init__(self) -> None:
        """Check all values together.

        Raises:
            UsageError: all faults.
        """
        name = "hidden_states"
        faults = _weight_faults(name, self.weight) + _choice_faults(f"{name}.kind", self.kind, HiddenStateKind)
        faults += _layer_faults(f"{name}.layers", self.layers, get_args(LayerMapKind))
        rate = self.projector_learning_rate
        if rate is not None and not 0 < rate < math.inf:
            faults.append(Fault(where=f"{name}.projector_learning_rate", value=rate, rule="above 0"))
        if faults:
            raise UsageError(faults)


@dataclass(frozen=True, kw_only=True)
class AttentionTerm:
    """Matches attention; both models keep their attention kernels."""

    weight: float = 1.0
    """Multiplies the mean distance, above 0."""
    kind: Literal["relations", "scores"] = "relations"
    """MiniLM's relations among queries, keys and values, or TinyBERT's scores of queries with keys."""
    relations: tuple[AttentionTensor, ...] = ("query", "key", "value")
    """`relations`: what to relate with itself; the mean over them counts."""
    relation_heads: int | None = None
    """`relations`: heads that the joined width is split into; `None`: the teacher's heads, or the greatest divisor of
    them that divides the student's width."""
    heads: HeadMatching = "interpolate"
    """`scores`: how unequal numbers of heads are matched: the teacher's interpolated, or both averaged."""
    layers: Literal["last", "uniform"] | LayerPairs = "last"
    """The last layer of each, every student layer with the nearest teacher layer in relative depth, or pairs of
    (student layer, teacher layer), counted from 1."""

    def __post_init__(self) -> None:
        """Check all values together.

        Raises:
            UsageError: all faults.
        """
        name = "attention"
        faults = _weight_faults(name, self.weight)
        for field, choices in (("kind", Literal["relations", "scores"]), ("heads", HeadMatching)):
            faults += _choice_faults(f"{name}.{field}", getattr(self, field), choices)
        known = get_args(AttentionTensor)
        chosen = self.relations
        if not isinstance(chosen, tuple) or not chosen or not set(chosen) <= set(known) or len({*chosen}) < len(chosen):
            rule = f"one or more of {', '.join(known)}, as a tuple, each once"
            faults.append(Fault(where=f"{name}.relations", value=chosen, rule=rule))
        if self.relation_heads is not None and self.relation_heads < 1:
            faults.append(Fault(where=f"{name}.relation_heads", value=self.relation_heads, rule="at least 1"))
        faults += _layer_faults(f"{name}.layers", self.layers, ("last", "uniform"))
        if faults:
            raise UsageError(faults)

    @property
    def tensors(self) -> tuple[AttentionTensor, ...]:
        """Tensors that have to be captured."""
        return self.relations if self.kind == "relations" else ("query", "key")


class FeatureMatching:
    """The feature terms of one student and one teacher, each a sum over tokens and a mean over matched layers.

    Raises:
        UsageError: layers that do not exist, or encoder-decoder models; all faults at once.
    """

    def __init__(
        self,
        student_config: Any,
        teacher_config: Any,
        hidden_term: HiddenStateTerm | None,
        attention_term: AttentionTerm | None,
    ) -> None:
        self.hidden_term, self.attention_term = hidden_term, attention_term
        self.projectors: Any = None
        """ModuleList with a projector for each match, or `None` where widths are equal."""
        self._depths = tuple(_depth(side, config) for side, config in _sides(student_config, teacher_config))
        self._hidden_matches = () if hidden_term is None else _hidden_matches(hidden_term, *self._depths)
        self._attention_matches = () if attention_term is None else _attention_matches(attention_term, *self._depths)
        if hidden_term is not None:
            own, taught = (config.get_text_config().hidden_size for config in (student_config, teacher_config))
            if own != taught:
                self.projectors = projectors(own, taught, len(self._hidden_matches))

    def capture_student(self, model: Any) -> AbstractContextManager[Captured | None]:
        """Record the student's attention, with its graph; gives `None` where no term reads it."""
        return self._capture(model, {match.student for match in self._attention_matches}, with_graph=True)

    def capture_teacher(self, model: Any) -> AbstractContextManager[Captured | None]:
        """Record the teacher's attention; gives `None` where no term reads it."""
        layers = {layer for match in self._attention_matches for layer, _ in match.teacher}
        return self._capture(model, layers, with_graph=False)

    def _capture(self, model: Any, layers: set[int], *, with_graph: bool) -> AbstractContextManager[Captured | None]:
        if self.attention_term is None:
            return nullcontext()
        return captured_attention(model, sorted(layers), self.attention_term.tensors, with_graph=with_graph)

    def hidden_sum(
        self, student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor], row_weights_BS: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum over tokens of the hidden states' mean distance, an fp32 scalar.

        Takes the embedding and the output of each block of both models, [B, S, width].

        Raises:
            UsageError: other numbers of layers or positions than the configurations tell.
        """
        import torch

        term = self.hidden_term
        assert term is not None
        for side, states, depth in zip(("student", "teacher"), (student, teacher), self._depths, strict=True):
            if len(states) != depth + 1:
                rule = f"its forward must return {depth + 1} hidden states"
                raise UsageError(Fault(where=f"hidden states of the {side}", value=len(states), rule=rule))
        _check_positions(student[0].shape[:2], teacher[0].shape[:2])
        weights = row_weights_BS.reshape(-1)
        rows = weights.nonzero().squeeze(1)
        distances = []
        for index, match in enumerate(self._hidden_matches):
            own = student[match.student].flatten(0, 1).index_select(0, rows)
            taught = sum(share * _rows(teacher[layer].detach(), rows) for layer, share in match.teacher)
            if self.projectors is not None:
                own = self.projectors[index](own)
            distances.append(hidden_state_sum(own, taught, weights[rows], kind=term.kind, normalize=term.normalize))
        return torch.stack(distances).mean()

    def attention_sum(
        self, student: Captured, teacher: Captured, row_weights_BS: torch.Tensor, inputs: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return the weighted sum over query positions of attention's mean distance, an fp32 scalar.

        `inputs` are the models' inputs, whose attention mask and position ids tell what positions see.

        Raises:
            UsageError: the models saw different positions, or `relation_heads` does not divide the widths.
        """
        import torch

        assert self.attention_term is not None
        distances = []
        for match in self._attention_matches:
            own, taught = student[match.student], teacher[match.teacher[0][0]]
            shapes = [layer.tensor(self.attention_term.tensors[0]).shape for layer in (own, taught)]
            _check_positions((shapes[0][0], shapes[0][2]), (shapes[1][0], shapes[1][2]))
            windows = [layer.window for layer in (own, taught) if layer.window is not None]
            causal, window = own.causal or taught.causal, min(windows, default=None)
            visible = visibility(inputs, shapes[0][2], causal=causal, window=window)
            distances += self._layer_sums(own, taught, row_weights_BS, visible)
        return torch.stack(distances).mean()

    def _layer_sums(
        self, own: LayerAttention, taught: LayerAttention, weights_BS: torch.Tensor, visible: Visibility
    ) -> list[torch.Tensor]:
        term = self.attention_term
        assert term is not None
        if term.kind == "scores":
            return [score_sum(own, taught, weights_BS, visible, heads=term.heads)]
        return [
            relation_sum(own.tensor(name), taught.tensor(name), weights_BS, visible, relation_heads=term.relation_heads)
            for name in term.relations
        ]


def _rows(states_BSD: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return states_BSD.flatten(0, 1).index_select(0, rows).float()


def _hidden_matches(term: HiddenStateTerm, student: int, teacher: int) -> tuple[LayerMatch, ...]:
    if isinstance(term.layers, tuple):
        return paired_layers(term.layers, student, teacher, where="hidden_states.layers")
    return layer_map(student, teacher, term.layers)


def _attention_matches(term: AttentionTerm, student: int, teacher: int) -> tuple[LayerMatch, ...]:
    if term.layers == "last":
        return paired_layers(((student, teacher),), student, teacher, first=1)
    if term.layers == "uniform":
        pairs = [(match.student, max(1, match.teacher[0][0])) for match in layer_map(student, teacher)[1:]]
        return paired_layers(pairs, student, teacher, first=1)
    return paired_layers(term.layers, student, teacher, first=1, where="attention.layers")


def _sides(student: Any, teacher: Any) -> list[tuple[str, Any]]:
    sides = [("student", student), ("teacher", teacher)]
    rule = "encoder-decoder models have two stacks of layers, which cannot be told apart here"
    faults = [
        Fault(where=side, value=config.model_type, rule=rule, fix="leave hidden_states and attention out")
        for side, config in sides
        if config.is_encoder_decoder
    ]
    if faults:
        raise UsageError(faults)
    return sides


def _depth(side: str, config: Any) -> int:
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(depth, int):
        raise UsageError(Fault(where=f"{side} {config.model_type}", rule="its configuration has no num_hidden_layers"))
    return depth


def _check_positions(student: Sequence[int], teacher: Sequence[int]) -> None:
    if tuple(student) != tuple(teacher):
        rule = (
            f"student and teacher must read the same batch; they read {tuple(student)} and {tuple(teacher)} positions"
        )
        raise UsageError(Fault(where="feature terms", rule=rule, fix="give both whole sequences"))


def _weight_faults(name: str, weight: float) -> list[Fault]:
    return [] if 0 < weight < math.inf else [Fault(where=f"{name}.weight", value=weight, rule="above 0")]


def _choice_faults(where: str, value: object, choices: Any) -> list[Fault]:
    allowed = get_args(choices)
    return [] if value in allowed else [Fault(where=where, value=value, rule=f"one of {', '.join(allowed)}")]


def _layer_faults(where: str, layers: object, names: tuple[str, ...]) -> list[Fault]:
    if isinstance(layers, str):
        rule = f"{', '.join(names)}, or pairs of layers"
        return [] if layers in names else [Fault(where=where, value=layers, rule=rule)]
    return pair_faults(where, layers)
