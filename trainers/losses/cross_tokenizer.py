"""Losses between models with different tokenizers, over spans where both tokenizations have boundaries.

Shapes: B samples, S and T positions of student and teacher, V and W their vocabularies, A spans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...ds_configs.specs.errors import ConfigError, UsageError
from ..data.chat import IGNORED_LABEL
from ..data.tokenizers import aligned_spans, boundaries, shared_vocabulary, token_offsets
from .objective import divergence_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEACHER_IDS, TEACHER_MASK, SPANS = "teacher_input_ids", "teacher_attention_mask", "alignment_spans"
# Rows whose distributions of both models exist at the same time; they are recomputed in the backward pass.
_CHUNK_ROWS = 256


class CrossTokenizerCollator:
    """Add the teacher's own tokens of the same texts to a batch, and the spans between common token boundaries.

    Raises:
        UsageError: a tokenizer has no offsets; when called, `collate` changed the tokens of a sample.
    """

    def __init__(
        self,
        student_tokenizer: PreTrainedTokenizerBase,
        teacher_tokenizer: PreTrainedTokenizerBase,
        collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
    ) -> None:
        for side, tokenizer in (("student", student_tokenizer), ("teacher", teacher_tokenizer)):
            if not getattr(tokenizer, "is_fast", False):
                rule = "has no character offsets, which alignment requires"
                raise UsageError(ConfigError(where=f"tokenizer of the {side}", rule=rule, fix="use its fast version"))
        self._student, self._teacher, self._collate = student_tokenizer, teacher_tokenizer, collate

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the student's batch with `teacher_input_ids`, `teacher_attention_mask` and `alignment_spans`."""
        batch = self._collate(samples)
        ids, spans = [], []
        for index, sample in enumerate(samples):
            own = sample["input_ids"]
            own_ids = own.tolist() if hasattr(own, "tolist") else list(own)
            text, offsets = token_offsets(self._student, own_ids)
            taught = self._teacher(text, return_offsets_mapping=True)
            taught_offsets = [tuple(pair) for pair in taught["offset_mapping"]]
            aligned = aligned_spans(boundaries(offsets, text), boundaries(taught_offsets, text), text)
            row = batch["input_ids"][index].tolist() if index < len(batch["input_ids"]) else []
            # The positions that the collator added before the sample's tokens.
            starts = (0, len(row) - len(own_ids))
            skipped = next((n for n in starts if n >= 0 and own_ids == row[n : n + len(own_ids)]), None)
            if skipped is None:
                rule = f"row {index} of its batch does not have the tokens of sample {index}, so they cannot be aligned"
                fix = "use a collator that only pads, without packing, truncating or masking tokens"
                raise UsageError(ConfigError(where="data_collator", rule=rule, fix=fix))
            ids.append(list(taught["input_ids"]))
            # The first token of a sequence has no position that predicts it.
            predicted = [span for span in aligned if span[0] > 0 and span[2] > 0]
            spans.append([(first + skipped, end + skipped, *rest) for first, end, *rest in predicted])
        longest, most = max(map(len, ids)), max(1, *map(len, spans))
        batch[TEACHER_IDS] = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        batch[TEACHER_MASK] = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
        nothing = (-1, -1, -1, -1)
        batch[SPANS] = torch.tensor([[*row, *([nothing] * (most - len(row)))] for row in spans])
        return batch


class CrossTokenizerLoss:
    """Compares two models over the spans of a batch.

    If a span is one token of each model: the forward KL over the tokens that both vocabularies have and one bin for all
    others. Otherwise the forward KL between "this text" and "any other", with the span's probability by the chain rule.
    Both are divergences of binned distributions, so lower bounds, and 0 for equal models.

    Raises:
        UsageError: the vocabularies have no common token.
    """

    def __init__(self, student_tokenizer: PreTrainedTokenizerBase, teacher_tokenizer: PreTrainedTokenizerBase) -> None:
        shared = shared_vocabulary(student_tokenizer, teacher_tokenizer)
        self._shared = tuple(torch.tensor(ids, dtype=torch.long) for ids in shared)
        if not len(self._shared[0]):
            rule = "requires vocabularies with common tokens, which these do not have"
            raise UsageError(ConfigError(where="cross_tokenizer", value=True, rule=rule, fix="use other tokenizers"))

    def __call__(
        self,
        student_logits_BSV: torch.Tensor,
        teacher_logits_BTW: torch.Tensor,
        inputs: dict[str, torch.Tensor],
        student_ids_BS: torch.Tensor,
        shifted_labels_BS: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        """Return the sum over the spans whose student tokens all have a label, an fp32 scalar."""
        spans = labelled_spans(inputs[SPANS], shifted_labels_BS)
        if not len(spans):
            return student_logits_BSV.sum().float() * 0.0
        _, first, end, taught_first, taught_end = spans.unbind(dim=1)
        single = (end - first == 1) & (taught_end - taught_first == 1)
        tokens = spans[single]
        total = torch.zeros((), device=student_logits_BSV.device)
        if len(tokens):
            own = student_logits_BSV[tokens[:, 0], tokens[:, 1] - 1]
            taught = teacher_logits_BTW[tokens[:, 0], tokens[:, 3] - 1]
            total = total + _chunked(self._shared_rows, own, taught, temperature).sum()
        if bool((~single).any()):
            several = spans[~single]
            log_q = _span_log_probability(
                student_logits_BSV, student_ids_BS, several[:, 0], several[:, 1], several[:, 2], temperature
            )
            taught_ids = inputs[TEACHER_IDS]
            with torch.no_grad():
                log_p = _span_log_probability(
                    teacher_logits_BTW, taught_ids, several[:, 0], several[:, 3], several[:, 4], temperature
                )
            total = total + divergence_rows("forward_kl", _with_rest(log_q), _with_rest(log_p), 0.5).sum()
        return total

    def _shared_rows(self, own_NV: torch.Tensor, taught_NW: torch.Tensor, temperature: float) -> torch.Tensor:
        bins = []
        has_rest = all(
            len(ids) < logits.shape[1] for ids, logits in zip(self._shared, (own_NV, taught_NW), strict=True)
        )
        for logits, ids in zip((own_NV, taught_NW.detach()), self._shared, strict=True):
            scaled, index = logits.float() / temperature, ids.to(logits.device)
            if has_rest:
                rest = scaled.index_fill(1, index, float("-inf")).logsumexp(dim=-1)
                scaled = torch.cat([scaled[:, index], rest[:, None]], dim=1)
            else:
                # A model without other tokens has no bin for them: both are conditioned on the common tokens.
                scaled = scaled[:, index]
            bins.append(torch.log_softmax(scaled, dim=-1))
        return divergence_rows("forward_kl", bins[0], bins[1], 0.5)


def labelled_spans(spans_BA4: torch.Tensor, shifted_labels_BS: torch.Tensor) -> torch.Tensor:
    """Return the spans [N, 5] (sample first) whose student tokens are all labelled."""
    valid = spans_BA4[..., 0] > 0
    sample = torch.arange(len(spans_BA4), device=spans_BA4.device)[:, None].expand_as(valid)[valid]
    spans_N4 = spans_BA4[valid]
    # Labels are shifted: row t holds token t + 1.
    labelled_BS = shifted_labels_BS.ne(IGNORED_LABEL).long()
    sums_BS = torch.nn.functional.pad(labelled_BS.cumsum(dim=1), (1, 0))
    first, end = spans_N4[:, 0] - 1, spans_N4[:, 1] - 1
    complete = sums_BS[sample, end] - sums_BS[sample, first] == end - first
    return torch.cat([sample[:, None], spans_N4], dim=1)[complete]


def _chunked(
    work: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
    own_N: torch.Tensor,
    other_N: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Compute some rows at a time, and again in the backward pass: fp32 copies exist for one chunk only."""
    from torch.utils.checkpoint import checkpoint

    parts = [
        checkpoint(work, own, other, temperature, use_reentrant=False)
        for own, other in zip(own_N.split(_CHUNK_ROWS), other_N.split(_CHUNK_ROWS), strict=True)
    ]
    return torch.cat(parts)


def _span_log_probability(
    logits_BSV: torch.Tensor,
    ids_BS: torch.Tensor,
    sample_N: torch.Tensor,
    first_N: torch.Tensor,
    end_N: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Return log P(tokens of each span | preceding tokens) by the chain rule; position t predicts token t + 1."""
    lengths_N = end_N - first_N
    owner_M = torch.arange(len(first_N), device=first_N.device).repeat_interleave(lengths_N)
    begin_M = torch.cumsum(lengths_N, 0) - lengths_N
    token_M = torch.arange(len(owner_M), device=first_N.device) - begin_M[owner_M] + first_N[owner_M]
    rows_MV = logits_BSV[sample_N[owner_M], token_M - 1]
    chosen_M1 = ids_BS[sample_N[owner_M], token_M][:, None]

    def chosen(rows_NV: torch.Tensor, chosen_N1: torch.Tensor, temperature: float) -> torch.Tensor:
        return torch.log_softmax(rows_NV.float() / temperature, dim=-1).gather(1, chosen_N1).squeeze(1)

    log_p_M = _chunked(chosen, rows_MV, chosen_M1, temperature)
    return torch.zeros(len(first_N), device=log_p_M.device).index_add(0, owner_M, log_p_M)


def _with_rest(log_p_N: torch.Tensor) -> torch.Tensor:
    """Return [log P, log (1 - P)]; for P = 1 the rest is fp32's resolution."""
    log_p_N = log_p_N.clamp(max=-1e-7)
    return torch.stack([log_p_N, torch.log(-torch.expm1(log_p_N))], dim=1)
