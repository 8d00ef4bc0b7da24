"""Feature terms: match hidden states and attention of a student with those of a teacher, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins.safetensors.reading import load_tensors
from ...plugins.safetensors.writing import save_tensors
from ...plugins.transformers.attention_capture import AttentionTensor, LayerAttention, captured_attention
from ..losses.features import (
    HiddenStateKind,
    LayerMapKind,
    LayerMatch,
    LayerPairs,
    hidden_state_sum,
    layer_map,
    pair_errors,
    paired_layers,
    projectors,
    relation_sum,
    score_sum,
    visibility,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

Captured = Mapping[int, LayerAttention]


@dataclass(frozen=True, kw_only=True)
class HiddenStateTerm:
    """Match hidden states; if widths differ, linear projectors map the student's to the teacher's width."""

    weight: float = 1.0
    """Weight of the mean distance, above 0."""
    kind: HiddenStateKind = "mse"
    """`mse`: mean squared error over the width; `cosine`: 1 - cosine similarity."""
    layers: LayerMapKind | LayerPairs = "uniform"
    """`uniform`: every student layer with the teacher layer of the nearest relative depth; `interpolate`: with a mean
    of two; or pairs of (student layer, teacher layer), where 0 is the embedding and l the output of block l."""
    normalize: bool = True
    """`mse`: divide each token's squared error by the mean square of its teacher vector."""

    def __post_init__(self) -> None:
        """Raise a `UsageError` with all errors."""
        if errors := _term_errors("hidden_states", self, {"kind": HiddenStateKind}, get_args(LayerMapKind)):
            raise UsageError(errors)


@dataclass(frozen=True, kw_only=True)
class AttentionTerm:
    """Match attention; both models keep their attention kernels."""

    weight: float = 1.0
    """Weight of the mean distance, above 0."""
    kind: Literal["relations", "scores"] = "relations"
    """MiniLM's relations among queries, keys and values, or TinyBERT's scores of queries with keys, where the teacher's
    heads are interpolated if their numbers differ."""
    relations: tuple[AttentionTensor, ...] = ("query", "key", "value")
    """`relations`: tensors to relate with themselves; the loss is the mean over them."""
    relation_heads: int | None = None
    """`relations`: heads that the joined width is split into; `None`: the teacher's heads, or their greatest divisor
    that divides the student's width."""
    layers: Literal["last", "uniform"] | LayerPairs = "last"
    """The last layer of each; every student layer with the teacher layer of the nearest relative depth; or pairs of
    (student layer, teacher layer), counted from 1."""

    def __post_init__(self) -> None:
        """Raise a `UsageError` with all errors."""
        errors = _term_errors("attention", self, {"kind": Literal["relations", "scores"]}, ("last", "uniform"))
        tensors, relations = get_args(AttentionTensor), self.relations
        is_set = isinstance(relations, tuple) and relations and len({*relations}) == len(relations)
        if not is_set or not {*relations} <= {*tensors}:
            rule = f"must be a tuple of one or more of {', '.join(tensors)}, each once"
            errors.append(ConfigError(where="attention.relations", value=relations, rule=rule))
        if self.relation_heads is not None and self.relation_heads < 1:
            rule = "must be at least 1"
            errors.append(ConfigError(where="attention.relation_heads", value=self.relation_heads, rule=rule))
        if errors:
            raise UsageError(errors)

    @property
    def tensors(self) -> tuple[AttentionTensor, ...]:
        return self.relations if self.kind == "relations" else ("query", "key")


class FeatureMatching:
    """The feature terms of one student and one teacher, each a sum over tokens and a mean over matched layers.

    Raises:
        UsageError: layers that do not exist, or encoder-decoder models; all errors together.
    """

    def __init__(
        self,
        student_config: PreTrainedConfig,
        teacher_config: PreTrainedConfig,
        hidden_term: HiddenStateTerm | None,
        attention_term: AttentionTerm | None,
    ) -> None:
        self.hidden_term, self.attention_term = hidden_term, attention_term
        self.projectors: torch.nn.ModuleList | None = None
        """A projector for each match, or `None` if widths are equal."""
        depths, errors = [], []
        for side, config in (("student", student_config), ("teacher", teacher_config)):
            depth = getattr(config.get_text_config(), "num_hidden_layers", None)
            depths.append(depth if isinstance(depth, int) else 0)
            if config.is_encoder_decoder:
                rule = "layers of encoder-decoder models cannot be matched, because they have two stacks"
                fix = "omit hidden_states and attention"
                errors.append(ConfigError(where=side, value=config.model_type, rule=rule, fix=fix))
            elif not isinstance(depth, int):
                rule = "its configuration has no num_hidden_layers"
                errors.append(ConfigError(where=f"{side} {config.model_type}", rule=rule))
        if errors:
            raise UsageError(errors)
        self._depths = student_depth, teacher_depth = depths[0], depths[1]
        self._hidden_matches: tuple[LayerMatch, ...] = ()
        self._attention_matches: tuple[LayerMatch, ...] = ()
        if attention_term is not None:
            pairs, where = attention_term.layers, "attention.layers"
            if pairs == "last":
                pairs = ((student_depth, teacher_depth),)
            elif pairs == "uniform":
                matches = layer_map(student_depth, teacher_depth)[1:]
                pairs = tuple((match.student, max(1, match.teacher[0][0])) for match in matches)
            self._attention_matches = paired_layers(pairs, student_depth, teacher_depth, first=1, where=where)
        if hidden_term is not None:
            if isinstance(hidden_term.layers, tuple):
                where = "hidden_states.layers"
                self._hidden_matches = paired_layers(hidden_term.layers, student_depth, teacher_depth, where=where)
            else:
                self._hidden_matches = layer_map(student_depth, teacher_depth, hidden_term.layers)
            own, taught = (config.get_text_config().hidden_size for config in (student_config, teacher_config))
            if own != taught:
                self.projectors = projectors(own, taught, len(self._hidden_matches))

    def capture_student(self, model: Any) -> AbstractContextManager[Captured | None]:
        """Record the student's attention, with its graph; gives `None` without an attention term."""
        return self._capture(model, {match.student for match in self._attention_matches}, with_graph=True)

    def capture_teacher(self, model: Any) -> AbstractContextManager[Captured | None]:
        """Record the teacher's attention; gives `None` without an attention term."""
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
            UsageError: the models returned other numbers of layers or positions than their configurations.
        """
        import torch

        term = self.hidden_term
        assert term is not None
        for side, states, depth in zip(("student", "teacher"), (student, teacher), self._depths, strict=True):
            if len(states) != depth + 1:
                rule = f"its forward must return {depth + 1} hidden states"
                raise UsageError(ConfigError(where=f"hidden states of the {side}", value=len(states), rule=rule))
        _check_positions(student[0].shape[:2], teacher[0].shape[:2])
        weights = row_weights_BS.reshape(-1)
        rows = weights.nonzero().squeeze(1)
        distances = []
        for index, match in enumerate(self._hidden_matches):
            own = student[match.student].flatten(0, 1).index_select(0, rows)
            taught: Any = sum(
                share * teacher[layer].detach().flatten(0, 1).index_select(0, rows).float()
                for layer, share in match.teacher
            )
            if self.projectors is not None:
                own = self.projectors[index](own)
            distances.append(hidden_state_sum(own, taught, weights[rows], kind=term.kind, normalize=term.normalize))
        return torch.stack(distances).mean()

    def attention_sum(
        self, student: Captured, teacher: Captured, row_weights_BS: torch.Tensor, inputs: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return the weighted sum over query positions of attention's mean distance, an fp32 scalar.

        The attention mask and position ids in the models' `inputs` determine which positions are visible.

        Raises:
            UsageError: the models read different positions, or `relation_heads` does not divide the widths.
        """
        import torch

        term = self.attention_term
        assert term is not None
        distances = []
        for match in self._attention_matches:
            own, taught = student[match.student], teacher[match.teacher[0][0]]
            shapes = [layer.tensor(term.tensors[0]).shape for layer in (own, taught)]
            _check_positions((shapes[0][0], shapes[0][2]), (shapes[1][0], shapes[1][2]))
            windows = [layer.window for layer in (own, taught) if layer.window is not None]
            causal, window = own.causal or taught.causal, min(windows, default=None)
            visible = visibility(inputs, shapes[0][2], causal=causal, window=window)
            if term.kind == "scores":
                distances.append(score_sum(own, taught, row_weights_BS, visible))
                continue
            for name in term.relations:
                pair, heads = (own.tensor(name), taught.tensor(name)), term.relation_heads
                distances.append(relation_sum(*pair, row_weights_BS, visible, relation_heads=heads))
        return torch.stack(distances).mean()


def _check_positions(student: Sequence[int], teacher: Sequence[int]) -> None:
    if tuple(student) != tuple(teacher):
        rule = f"student and teacher must read the same batch, not {tuple(student)} and {tuple(teacher)} positions"
        raise UsageError(ConfigError(where="feature terms", rule=rule, fix="pass full sequences to both"))


def _term_errors(
    name: str, term: HiddenStateTerm | AttentionTerm, choices: dict[str, Any], layer_kinds: tuple[str, ...]
) -> list[ConfigError]:
    errors = []
    if not 0 < term.weight < math.inf:
        errors.append(ConfigError(where=f"{name}.weight", value=term.weight, rule="must be above 0"))
    for field, choice in choices.items():
        value, allowed = getattr(term, field), get_args(choice)
        if value not in allowed:
            rule = f"must be one of {', '.join(allowed)}"
            errors.append(ConfigError(where=f"{name}.{field}", value=value, rule=rule))
    if not isinstance(term.layers, str):
        errors += pair_errors(f"{name}.layers", term.layers)
    elif term.layers not in layer_kinds:
        rule = f"must be {', '.join(layer_kinds)}, or pairs of layers"
        errors.append(ConfigError(where=f"{name}.layers", value=term.layers, rule=rule))
    return errors


FILE_NAME = "distillation_projectors.safetensors"


def save_projectors(state_dict: dict[str, torch.Tensor], prefix: str, directory: str) -> None:
    """Write the projectors into a checkpoint; the directory of a finished model gets only the student."""
    target = Path(directory)
    if not target.name.startswith("checkpoint-"):
        return
    marker = prefix + "."
    own = {name.split(marker, 1)[1]: value for name, value in state_dict.items() if marker in name}
    if own:
        save_tensors(own, target / FILE_NAME)


def load_projectors(projectors: torch.nn.Module, directory: str) -> None:
    file = Path(directory) / FILE_NAME
    if file.is_file():
        projectors.load_state_dict(load_tensors(file))
