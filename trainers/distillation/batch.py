"""One micro-batch as a distillation reads it: model inputs, shifted labels, and which rows count.

Shapes: B samples, S positions, N rows that have a label.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, UsageError
from ..data.chat import IGNORED_LABEL

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

TOKEN_WEIGHTS, TEACHER_ROWS, SHIFT_LABELS = "token_weights", "teacher_rows", "shift_labels"
EXTRA_COLUMNS = (TOKEN_WEIGHTS, TEACHER_ROWS, SHIFT_LABELS, "position_ids")


@dataclass(frozen=True, kw_only=True)
class DistillationBatch:
    """One micro-batch, split into what models read and what losses read."""

    model_inputs: dict[str, Any]
    """Everything that models take, without labels."""
    labels: torch.Tensor
    """[B, S], row t holding the token that position t predicts; [B] for the classification of sequences."""
    weights: torch.Tensor
    """fp32, shaped as the labels; 0 where there is no label."""
    rows_N: torch.Tensor
    """Flat indices of the rows with a label and a weight above 0."""
    teacher_rows_N: torch.Tensor | None = None
    """Row numbers in a teacher's cache, of the rows with a label."""
    has_token_weights: bool = False
    """Whether the user weighed tokens."""
    other_inputs: dict[str, Any] = field(default_factory=dict)
    """What belongs to other terms: a teacher's own tokens and their alignment."""

    @property
    def labels_N(self) -> torch.Tensor:
        """Labels of the rows that count."""
        return self.labels.reshape(-1)[self.rows_N]

    @property
    def weights_N(self) -> torch.Tensor:
        """Weights of the rows that count."""
        return self.weights.reshape(-1)[self.rows_N]

    def rows_of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the rows that count of [B, S, ...], as [N, ...]; of [B, ...] where sequences are classified."""
        return values.reshape(-1, values.shape[-1]).index_select(0, self.rows_N)

    def by_sample(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return fp64 sums [B] over the rows of each sample."""
        samples_N = self.rows_N // self.labels[0].numel()
        count = len(self.labels)
        return {
            name: values_N.new_zeros(count).double().index_add_(0, samples_N, values_N.double())
            for name, values_N in rows.items()
        }

    def position_weights(self) -> torch.Tensor:
        """Return the weight of every position [B, S]; a classified sequence spreads its weight over its tokens."""
        import torch

        if self.labels.dim() > 1:
            return self.weights
        mask_BS = self.model_inputs.get("attention_mask")
        mask_BS = torch.ones_like(self.model_inputs["input_ids"]).float() if mask_BS is None else mask_BS.float()
        return self.weights[:, None] * mask_BS / mask_BS.sum(dim=1, keepdim=True).clamp(min=1)


def split_batch(inputs: dict[str, Any], *, shifts: bool) -> DistillationBatch:
    """Split a batch; labels and weights move one to the left where the model predicts the next token.

    Raises:
        UsageError: the batch has no labels, labels that are no classes, or weights beside a shard's labels.
    """
    import torch

    inputs = dict(inputs)
    labels, shifted = inputs.pop("labels", None), inputs.pop(SHIFT_LABELS, None)
    if labels is None and shifted is None:
        rule = "batches need labels, which tell the positions that are distilled"
        raise UsageError(Fault(where="labels", rule=rule, fix="copy input_ids and mask what is not to be learned"))
    weights = inputs.pop(TOKEN_WEIGHTS, None)
    if weights is not None and labels is None:
        rule = "cannot be shifted like the labels across the shards of a sequence"
        raise UsageError(Fault(where=TOKEN_WEIGHTS, rule=rule, fix="leave sp_size at 1, or mask labels"))
    teacher_rows = inputs.pop(TEACHER_ROWS, None)
    moves = shifts and shifted is None
    labels = shifted if shifted is not None else labels
    if labels.is_floating_point():
        rule = "must be classes: regression and several labels at once have no distribution to distil"
        raise UsageError(Fault(where="labels", value=str(labels.dtype), rule=rule))
    if moves:
        labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL)
    if weights is not None and shifts:
        weights = torch.nn.functional.pad(weights[..., 1:], (0, 1), value=0.0)
    counted = labels.ne(IGNORED_LABEL)
    has_token_weights = weights is not None
    weights = counted.float() if weights is None else weights.float() * counted
    rows_N = weights.reshape(-1).nonzero().squeeze(1)
    return DistillationBatch(
        model_inputs={name: value for name, value in inputs.items() if not _is_other(name)},
        labels=labels,
        weights=weights,
        rows_N=rows_N,
        has_token_weights=has_token_weights,
        teacher_rows_N=None if teacher_rows is None else teacher_rows.reshape(-1)[rows_N],
        other_inputs={name: value for name, value in inputs.items() if _is_other(name)},
    )


def with_decoder_inputs(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Encoder-decoder models make their decoder's input from labels, which are kept from them here.

    Some do it inside of their forward alone (Blenderbot, SeamlessM4T): labels move one to the right, behind the start.
    """
    if not model.config.is_encoder_decoder or "decoder_input_ids" in inputs:
        return inputs
    labels = inputs["labels"]
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return {**inputs, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=labels)}
    shifted = labels.roll(1, dims=-1)
    shifted[..., 0] = model.config.decoder_start_token_id
    return {**inputs, "decoder_input_ids": shifted.masked_fill(shifted == IGNORED_LABEL, model.config.pad_token_id)}


def _is_other(name: str) -> bool:
    return name.startswith(("teacher_", "alignment"))


def global_weight(batches: list[dict[str, Any]], *, shifts: bool) -> torch.Tensor:
    """Return Σ weights over the micro-batches of one optimizer step on this rank."""
    import torch

    return torch.stack([split_batch(batch, shifts=shifts).weights.sum() for batch in batches]).sum()
