"""Losses between models with different tokenizers, where their tokens begin or cover the same text.

Shapes: B samples, S and T positions of student and teacher, V and W their vocabularies, A spans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from ...ds_configs.specs.errors import Fault, UsageError
from ..data.chat import IGNORED_LABEL
from ..data.text_alignment import Span, aligned_spans, boundaries, shared_vocabulary, token_offsets
from .divergences import divergence_rows

if TYPE_CHECKING:
    import torch

TEACHER_IDS, TEACHER_MASK, SPANS = "teacher_input_ids", "teacher_attention_mask", "alignment_spans"
# Distributions of both models live for so many rows at once, and are made again in the backward pass.
_CHUNK_ROWS = 256


class CrossTokenizerCollator:
    """Adds to a batch the teacher's own tokens of the same texts, and the spans that both begin and end together.

    Raises:
        UsageError: a tokenizer gives no offsets; when called, `collate` gave other tokens than the sample's.
    """

    def __init__(
        self, student_tokenizer: Any, teacher_tokenizer: Any, collate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    ) -> None:
        for side, tokenizer in (("student", student_tokenizer), ("teacher", teacher_tokenizer)):
            if not getattr(tokenizer, "is_fast", False):
                rule = "gives no character offsets, which aligning needs"
                raise UsageError(Fault(where=f"tokenizer of the {side}", rule=rule, fix="use its fast version"))
        self._student, self._teacher, self._collate = student_tokenizer, teacher_tokenizer, collate

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the student's batch with `teacher_input_ids`, `teacher_attention_mask` and `alignment_spans`."""
        import torch

        batch = self._collate(samples)
        ids, spans = [], []
        for index, sample in enumerate(samples):
            own = sample["input_ids"]
            own_ids = own.tolist() if hasattr(own, "tolist") else list(own)
            taught_ids, aligned = self._aligned(own_ids)
            skipped = _padding_before(own_ids, batch["input_ids"], index)
            ids.append(taught_ids)
            spans.append([(first + skipped, end + skipped, *taught) for first, end, *taught in aligned])
        longest, most = max(map(len, ids)), max(1, *map(len, spans))
        batch[TEACHER_IDS] = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        batch[TEACHER_MASK] = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
        nothing = (-1, -1, -1, -1)
        batch[SPANS] = torch.tensor([[*row, *([nothing] * (most - len(row)))] for row in spans])
        return batch

    def _aligned(self, token_ids: list[int]) -> tuple[list[int], list[Span]]:
        text, offsets = token_offsets(self._student, token_ids)
        taught = self._teacher(text, return_offsets_mapping=True)
        taught_offsets = [tuple(pair) for pair in taught["offset_mapping"]]
        spans = aligned_spans(boundaries(offsets, text), boundaries(taught_offsets, text), text)
        # The first token of a sequence has no position that predicts it.
        return list(taught["input_ids"]), [span for span in spans if span[0] > 0 and span[2] > 0]


def _padding_before(ids: list[int], batch_BS: torch.Tensor, index: int) -> int:
    """Return how many positions a collator put before a sample's tokens."""
    row = batch_BS[index].tolist() if index < len(batch_BS) else []
    for skipped in (0, len(row) - len(ids)):
        if ids == row[skipped : skipped + len(ids)] and skipped >= 0:
            return skipped
    rule = f"row {index} of its batch does not hold the tokens of sample {index}, which are aligned with the teacher's"
    fix = "use one that only pads: no packing, cutting or masking of tokens"
    raise UsageError(Fault(where="data_collator", rule=rule, fix=fix))


class CrossTokenizerLoss:
    """Compares two models over the spans of a batch.

    - ``uld``: at the beginning of each span both predict what follows the same text. ``Σ_i |p_(i) - q_(i)|`` of the
      sorted probabilities, the narrower padded with zeros (Boizard et al., arXiv 2402.12030). It does not look at what
      tokens mean.
    - ``aligned``: where a span is one token of either, the forward KL over the tokens that both vocabularies have and
      one bin for all others; where it is several, the forward KL between "this text" and "any other", with the span's
      probability by the chain rule. Both are divergences of binned distributions, so lower bounds, and 0 for equal
      models.
    """

    def __init__(self, kind: Literal["uld", "aligned"], student_tokenizer: Any, teacher_tokenizer: Any) -> None:
        self._kind = kind
        import torch

        shared = shared_vocabulary(student_tokenizer, teacher_tokenizer) if kind == "aligned" else ([], [])
        self._shared = tuple(torch.tensor(ids, dtype=torch.long) for ids in shared)
        if kind == "aligned" and not len(self._shared[0]):
            rule = "the vocabularies have no token in common"
            raise UsageError(Fault(where="cross_tokenizer", value=kind, rule=rule, fix="use uld"))

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
        import torch

        spans = labelled_spans(inputs[SPANS], shifted_labels_BS)
        if not len(spans):
            return student_logits_BSV.sum().float() * 0.0
        sample, first, end, taught_first, taught_end = spans.unbind(dim=1)
        if self._kind == "uld":
            own = student_logits_BSV[sample, first - 1]
            taught = teacher_logits_BTW[sample, taught_first - 1]
            return _chunked(sorted_distance, own, taught, temperature).sum()
        single = (end - first == 1) & (taught_end - taught_first == 1)
        one = spans[single]
        total = torch.zeros((), device=student_logits_BSV.device)
        if len(one):
            own = student_logits_BSV[one[:, 0], one[:, 1] - 1]
            taught = teacher_logits_BTW[one[:, 0], one[:, 3] - 1]
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
        import torch

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
                # A model without other tokens has no bin for them: both are conditioned on the common ones.
                scaled = scaled[:, index]
            bins.append(torch.log_softmax(scaled, dim=-1))
        return divergence_rows("forward_kl", bins[0], bins[1], 0.5)


def labelled_spans(spans_BA4: torch.Tensor, shifted_labels_BS: torch.Tensor) -> torch.Tensor:
    """Return the spans [N, 5] (sample first) all of whose student tokens are labelled."""
    import torch

    valid = spans_BA4[..., 0] > 0
    sample = torch.arange(len(spans_BA4), device=spans_BA4.device)[:, None].expand_as(valid)[valid]
    spans_N4 = spans_BA4[valid]
    # Labels are shifted: row t holds token t + 1.
    labelled_BS = shifted_labels_BS.ne(IGNORED_LABEL).long()
    sums_BS = torch.nn.functional.pad(labelled_BS.cumsum(dim=1), (1, 0))
    first, end = spans_N4[:, 0] - 1, spans_N4[:, 1] - 1
    complete = sums_BS[sample, end] - sums_BS[sample, first] == end - first
    return torch.cat([sample[:, None], spans_N4], dim=1)[complete]


def sorted_distance(own_NV: torch.Tensor, taught_NW: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return ``Σ_i |p_(i) - q_(i)|`` of each row's sorted probabilities."""
    import torch

    q, p = (torch.softmax(logits.float() / temperature, dim=-1) for logits in (own_NV, taught_NW.detach()))
    width = max(q.shape[1], p.shape[1])
    q, p = (torch.nn.functional.pad(one, (0, width - one.shape[1])) for one in (q, p))
    return (p.sort(dim=-1, descending=True).values - q.sort(dim=-1, descending=True).values).abs().sum(dim=-1)


def _chunked(
    work: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
    one_N: torch.Tensor,
    other_N: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Compute some rows at a time and again in the backward pass: fp32 copies live for one chunk only."""
    import torch
    from torch.utils.checkpoint import checkpoint

    parts = [
        checkpoint(work, one, other, temperature, use_reentrant=False)
        for one, other in zip(one_N.split(_CHUNK_ROWS), other_N.split(_CHUNK_ROWS), strict=True)
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
    """Return log P(tokens of each span | what precedes it) by the chain rule; position t predicts token t + 1."""
    import torch

    lengths_N = end_N - first_N
    owner_M = torch.arange(len(first_N), device=first_N.device).repeat_interleave(lengths_N)
    begin_M = torch.cumsum(lengths_N, 0) - lengths_N
    token_M = torch.arange(len(owner_M), device=first_N.device) - begin_M[owner_M] + first_N[owner_M]
    rows_MV = logits_BSV[sample_N[owner_M], token_M - 1]
    chosen_M1 = ids_BS[sample_N[owner_M], token_M][:, None]
    log_p_M = _chunked(_chosen_log_probability, rows_MV, chosen_M1, temperature)
    return torch.zeros(len(first_N), device=log_p_M.device).index_add(0, owner_M, log_p_M)


def _chosen_log_probability(rows_NV: torch.Tensor, chosen_N1: torch.Tensor, temperature: float) -> torch.Tensor:
    import torch

    return torch.log_softmax(rows_NV.float() / temperature, dim=-1).gather(1, chosen_N1).squeeze(1)


def _with_rest(log_p_N: torch.Tensor) -> torch.Tensor:
    """Return [log P, log (1 - P)]; a certainty leaves a rest of fp32's resolution."""
    import torch

    log_p_N = log_p_N.clamp(max=-1e-7)
    return torch.stack([log_p_N, torch.log(-torch.expm1(log_p_N))], dim=1)
