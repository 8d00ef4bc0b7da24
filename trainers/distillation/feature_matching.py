"""Feature terms: match hidden states and attention of a student with those of a teacher, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins.safetensors import load_tensors, save_tensors
from ...plugins.transformers.attention import AttentionTensor, LayerAttention, captured_attention
from ..losses.objective import divergence_and_gradient

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Captured = Mapping[int, LayerAttention]
LayerPairs = tuple[tuple[int, int], ...]
RELATION_TENSORS: tuple[AttentionTensor, ...] = ("query", "key", "value")
BLOCK_ELEMENTS = 2**24
"""Elements of the largest tensor of one block; about eight such fp32 tensors exist at the same time."""
_INVISIBLE = -1e9
"""Logit of a masked position: its probability is 0 in fp32, and its differences are finite."""
_LEAST_POWER = 1e-12
"""Lower limit of the mean square of a teacher's vector, a divisor."""


@dataclass(frozen=True, kw_only=True)
class HiddenStateTerm:
    """Match hidden states; if widths differ, linear projectors map the student's to the teacher's width."""

    weight: float = 1.0
    """Weight of the mean distance, above 0."""
    layers: Literal["uniform"] | LayerPairs = "uniform"
    """Every student layer with the teacher layer of the nearest relative depth; or pairs of (student layer, teacher
    layer), where 0 is the embedding and l the output of block l."""

    def __post_init__(self) -> None:
        """Raise a `UsageError` with all errors."""
        errors = _term_errors("hidden_states", self, ("uniform",))
        if errors:
            raise UsageError(errors)


@dataclass(frozen=True, kw_only=True)
class AttentionTerm:
    """Match MiniLM's relations among queries, keys and values; both models keep their attention kernels."""

    weight: float = 1.0
    """Weight of the mean distance, above 0."""
    layers: Literal["last", "uniform"] | LayerPairs = "last"
    """The last layer of each; every student layer with the teacher layer of the nearest relative depth; or pairs of
    (student layer, teacher layer), counted from 1."""

    def __post_init__(self) -> None:
        """Raise a `UsageError` with all errors."""
        errors = _term_errors("attention", self, ("last", "uniform"))
        if errors:
            raise UsageError(errors)


def _term_errors(name: str, term: HiddenStateTerm | AttentionTerm, layer_kinds: tuple[str, ...]) -> list[ConfigError]:
    errors = []
    if not 0 < term.weight < math.inf:
        errors.append(ConfigError(where=f"{name}.weight", value=term.weight, rule="must be above 0"))
    pairs: Any = term.layers
    if isinstance(pairs, str):
        if pairs not in layer_kinds:
            rule = f"must be {', '.join(layer_kinds)}, or pairs of layers"
            errors.append(ConfigError(where=f"{name}.layers", value=pairs, rule=rule))
        return errors
    # `type`, because `isinstance` accepts booleans as integers.
    valid = isinstance(pairs, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and all(type(number) is int for number in pair) for pair in pairs
    )
    if not valid or not pairs or len({*pairs}) < len(pairs):
        rule = "must be a tuple of pairs (student layer, teacher layer), each once"
        errors.append(ConfigError(where=f"{name}.layers", value=pairs, rule=rule))
    return errors


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
            elif depths[-1] < 1:
                rule = f"has num_hidden_layers = {depth}; matching needs at least one layer"
                errors.append(ConfigError(where=f"{side} {config.model_type}", rule=rule))
        if errors:
            raise UsageError(errors)
        self._depths = student_depth, teacher_depth = depths[0], depths[1]
        self._hidden_pairs: LayerPairs = ()
        self._attention_pairs: LayerPairs = ()
        uniform = uniform_pairs(student_depth, teacher_depth)
        if attention_term is not None:
            pairs = attention_term.layers
            if pairs == "last":
                pairs = ((student_depth, teacher_depth),)
            elif pairs == "uniform":
                pairs = tuple((student, max(1, teacher)) for student, teacher in uniform[1:])
            errors += self._pair_errors("attention.layers", pairs, first=1)
            self._attention_pairs = pairs
        if hidden_term is not None:
            self._hidden_pairs = uniform if hidden_term.layers == "uniform" else hidden_term.layers
            errors += self._pair_errors("hidden_states.layers", self._hidden_pairs, first=0)
            own, taught = (config.get_text_config().hidden_size for config in (student_config, teacher_config))
            if own != taught:
                self.projectors = projectors(own, taught, len(self._hidden_pairs))
        if errors:
            raise UsageError(errors)

    def _pair_errors(self, where: str, pairs: LayerPairs, *, first: int) -> list[ConfigError]:
        return [
            ConfigError(where=where, value=pair, rule=f"{side} layers are {first} to {depth}")
            for pair in pairs
            for side, number, depth in zip(("student", "teacher"), pair, self._depths, strict=True)
            if not first <= number <= depth
        ]

    def capture(self, model: Any, *, is_student: bool) -> AbstractContextManager[Captured | None]:
        """Record the attention of the matched layers, of a student with its graph; `None` without an attention term."""
        if self.attention_term is None:
            return nullcontext()
        layers = sorted({pair[0 if is_student else 1] for pair in self._attention_pairs})
        return captured_attention(model, layers, with_graph=is_student)

    def hidden_sum(
        self, student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor], row_weights_BS: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum over tokens of the hidden states' mean distance, an fp32 scalar.

        Takes the embedding and the output of each block of both models, [B, S, width].

        Raises:
            UsageError: the models returned other numbers of layers or positions than their configurations.
        """
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
        for index, (layer, other) in enumerate(self._hidden_pairs):
            own, taught = (states.flatten(0, 1).index_select(0, rows) for states in (student[layer], teacher[other]))
            if self.projectors is not None:
                own = self.projectors[index](own)
            distances.append(hidden_state_sum(own, taught, weights[rows]))
        return torch.stack(distances).mean()

    def attention_sum(
        self, student: Captured, teacher: Captured, row_weights_BS: torch.Tensor, inputs: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return the weighted sum over query positions of attention's mean distance, an fp32 scalar.

        The attention mask and position ids in the models' `inputs` determine which positions are visible.

        Raises:
            UsageError: the models read different positions.
        """
        distances = []
        for layer, other in self._attention_pairs:
            own, taught = student[layer], teacher[other]
            shapes = [each.tensor("query").shape for each in (own, taught)]
            _check_positions((shapes[0][0], shapes[0][2]), (shapes[1][0], shapes[1][2]))
            windows = [each.window for each in (own, taught) if each.window is not None]
            causal, window = own.causal or taught.causal, min(windows, default=None)
            visible = visibility(inputs, shapes[0][2], causal=causal, window=window)
            for name in RELATION_TENSORS:
                distances.append(relation_sum(own.tensor(name), taught.tensor(name), row_weights_BS, visible))
        return torch.stack(distances).mean()


def _check_positions(student: Sequence[int], teacher: Sequence[int]) -> None:
    if tuple(student) != tuple(teacher):
        rule = f"student and teacher must read the same batch, not {tuple(student)} and {tuple(teacher)} positions"
        raise UsageError(ConfigError(where="feature terms", rule=rule, fix="pass full sequences to both"))


def uniform_pairs(student_layers: int, teacher_layers: int) -> LayerPairs:
    """Match layers 0 to L_s of a student with those of a teacher: ``round(l · L_t / L_s)``, halves rounded up."""
    return tuple(
        (layer, (2 * layer * teacher_layers + student_layers) // (2 * student_layers))
        for layer in range(student_layers + 1)
    )


def hidden_state_sum(student_TD: torch.Tensor, teacher_TD: torch.Tensor, weights_T: torch.Tensor) -> torch.Tensor:
    """Return ``Σ_t w_t · |h_s - h_t|² / |h_t|²``, an fp32 scalar (FitNets, arXiv 1412.6550; TinyBERT, 1909.10351).

    Each token's squared error is divided by the square of its teacher vector, so that the huge activations of some
    tokens do not outweigh all others, and sums over parts of a batch still add up.
    """
    with torch.autocast(student_TD.device.type, enabled=False):
        student, teacher, weights = student_TD.float(), teacher_TD.detach().float(), weights_T.float()
        power_T = teacher.square().mean(dim=-1).clamp(min=_LEAST_POWER)
        return (weights * (student - teacher).square().mean(dim=-1) / power_T).sum()


def projectors(student_width: int, teacher_width: int, count: int) -> torch.nn.ModuleList:
    """Return `count` linear maps without bias from the student's width to the teacher's, as a ModuleList in fp32.

    All start as the same semi-orthogonal matrix, since a residual stream has one basis for all layers, scaled so that
    a random vector keeps its root mean square. The matrix has a fixed seed; the global seed is not changed.
    """
    weight_DH = torch.empty(teacher_width, student_width)
    torch.nn.init.orthogonal_(weight_DH, generator=torch.Generator().manual_seed(0))
    weight_DH *= max(1.0, teacher_width / student_width) ** 0.5
    return torch.nn.ModuleList(Projector(weight_DH.clone()) for _ in range(count))


class Projector(torch.nn.Module):
    """Linear map in fp32 for any dtype of the weight; a module, so that engines can gather it."""

    def __init__(self, weight_DH: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight_DH)

    def forward(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden_TH.device.type, enabled=False):
            return torch.nn.functional.linear(hidden_TH.float(), self.weight.float())


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


Visible = Callable[[torch.Tensor], torch.Tensor]
"""Returns the positions that rows [R] attend to, bool [B or 1, R, S]."""


def visibility(inputs: Mapping[str, Any], size: int, *, causal: bool, window: int | None = None) -> Visible:
    """Read padding from ``attention_mask``, and packed documents from the jumps in ``position_ids``.

    With a `window`, a position attends to so many positions, itself included.

    Raises:
        UsageError: the attention mask is not [B, S].
    """
    mask: Any = inputs.get("attention_mask")
    positions: Any = inputs.get("position_ids")
    if mask is not None and (not torch.is_tensor(mask) or mask.dim() != 2):
        shape = tuple(mask.shape) if torch.is_tensor(mask) else type(mask).__name__
        rule = "attention can only be matched with masks [B, S]"
        raise UsageError(ConfigError(where="attention_mask", value=shape, rule=rule))
    documents_BS: torch.Tensor | None = None
    if torch.is_tensor(positions) and positions.dim() == 2 and positions.shape[1] == size:
        jumps = positions.diff(dim=1) != 1
        documents_BS = torch.nn.functional.pad(jumps.cumsum(dim=1), (1, 0))

    def visible(rows_R: torch.Tensor) -> torch.Tensor:
        ahead_RS = torch.arange(size, device=rows_R.device) - rows_R[:, None]
        seen = (ahead_RS <= 0 if causal else torch.ones_like(ahead_RS, dtype=torch.bool))[None]
        if window is not None:
            seen = seen & (ahead_RS.abs() < window)
        if mask is not None:
            seen = seen & mask.bool()[:, None, :]
        if documents_BS is not None:
            seen = seen & (documents_BS[:, rows_R, None] == documents_BS[:, None, :])
        return seen

    return visible


def relation_sum(
    student_BHSD: torch.Tensor, teacher_BHSD: torch.Tensor, weights_BS: torch.Tensor, visible: Visible
) -> torch.Tensor:
    """Return ``Σ_t w_t · 1/A · Σ_a KL(R^T_at | R^S_at)``, an fp32 scalar, with ``R_a = softmax(M_a M_aᵀ / √d)``.

    M are queries, keys or values: their heads are joined into one width W and split again into A relation heads of
    width d = W / A, so that heads and widths of the two models may differ (MiniLMv2, arXiv 2012.15828, section 3.1).
    A is the number of the teacher's heads, or its greatest divisor that divides the student's width. The softmax is
    over visible positions. The gradient is computed here, block by block: ``∂/∂m_i = Σ_j (g_ij + g_ji) m_j`` with g
    the gradient by ``m_i · m_j``.
    """
    heads = math.gcd(student_BHSD.shape[1] * student_BHSD.shape[3], teacher_BHSD.shape[1])
    with torch.autocast(student_BHSD.device.type, enabled=False):
        # Heads joined and split into relation heads [B, A, S, d], scaled by d^-¼, so that products carry 1/√d.
        joined = (tensor.transpose(1, 2).flatten(2).float() for tensor in (student_BHSD, teacher_BHSD.detach()))
        split = (tensor_BSW.unflatten(2, (heads, -1)).transpose(1, 2) for tensor_BSW in joined)
        student, teacher = (vectors_BASd * vectors_BASd.shape[-1] ** -0.25 for vectors_BASd in split)
        gradient = torch.zeros_like(student) if torch.is_grad_enabled() and student.requires_grad else None
        with torch.no_grad():
            batch, _, size, _ = student.shape
            weights_BS = weights_BS.float()
            total = weights_BS.new_zeros(())
            # Rows that have a weight in any sample.
            rows_T = weights_BS.ne(0).any(dim=0).nonzero().squeeze(1)
            for rows_R in rows_T.split(max(1, BLOCK_ELEMENTS // (batch * heads * size))) if len(rows_T) else ():
                seen = visible(rows_R)[:, None]
                products = (vectors.index_select(2, rows_R) @ vectors.transpose(2, 3) for vectors in (teacher, student))
                taught, learned = (
                    torch.log_softmax(product.masked_fill(~seen, _INVISIBLE), dim=-1) for product in products
                )
                weights_BAR = (weights_BS[:, None, rows_R] / heads).expand(batch, heads, -1)
                distance_BAR, slope_BARS = divergence_and_gradient("forward_kl", learned, taught, 0.0)
                total += (weights_BAR * distance_BAR).sum()
                if gradient is not None:
                    slope_BARS.mul_(weights_BAR[..., None])
                    gradient.index_add_(2, rows_R, slope_BARS @ student)
                    gradient += slope_BARS.transpose(2, 3) @ student.index_select(2, rows_R)
        if gradient is not None:
            product = (student * gradient).sum()
            total = total + (product - product.detach())
        return total
