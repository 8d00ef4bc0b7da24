"""Measures of a model at each evaluated token, windows of tokens, and means with their standard errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ...ds_configs.specs.units import gigabytes
from ...plugins.launching.messages import log_progress
from ...plugins.transformers.output_heads import output_head
from ..data.chat import IGNORED_LABEL, set_chat_template
from ..data.samples import load_samples
from ..data.sources import PYTHON_HELP
from ..losses.fused_loss import captured_head_input
from ..losses.objective import dense_rows

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LARGE_BYTES = 10**9
Window = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest:
    """Dataset that a model is evaluated on."""

    dataset: str = PYTHON_HELP
    """`ID[:config][#N]` of the Hub, a file or directory of rows, or `python-help`."""
    split: str = "test"
    dataset_revision: str | None = None
    chat_template: str | None = None
    """Template that renders conversations, by name or file; `None`: the tokenizer's."""
    num_samples: int | None = None
    """Windows to use, from the start of the text; `None`: all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextWindows:
    """Windows of tokens with labels; a label of -100 is read, but not judged."""

    windows: tuple[Window, ...]
    """`input_ids` and `labels` of each, in the order of the text."""
    source: str
    seq_len_tokens: int
    available_windows: int
    """Windows that the whole text has."""

    @property
    def predicted_tokens(self) -> int:
        """Tokens that are judged; the first one of a window never is, as nothing predicts it."""
        return sum(label != IGNORED_LABEL for window in self.windows for label in window["labels"][1:])


def text_windows(request: TextRequest, tokenizer: Any, *, seq_len: int, processor: Any = None) -> TextWindows:
    """Read a dataset and split it into windows of `seq_len` tokens.

    Documents of plain text are joined; an incomplete last window is dropped. Conversations make one window each, with
    labels on what the assistant says; the `processor` reads their images.

    Raises:
        UsageError: the text is missing, empty or shorter than one window.
    """
    set_chat_template(tokenizer, request.chat_template)
    samples = load_samples(
        request.dataset,
        tokenizer,
        seq_len=seq_len,
        split=request.split,
        revision=request.dataset_revision,
        evaluation_fraction=0.0,
        processor=processor,
    )
    if samples.statistics.kind == "text" and request.chat_template is not None:
        rule, fix = f"{request.dataset} has plain text, which no template renders", "omit it"
        raise UsageError(ConfigError(where="chat_template", value=request.chat_template, rule=rule, fix=fix))
    return TextWindows(
        windows=tuple(samples.train[: request.num_samples]),
        source=request.dataset,
        seq_len_tokens=seq_len,
        available_windows=len(samples.train),
    )


CHUNK_ELEMENTS = 2**23
"""Log-probabilities per model in one chunk: 32 MiB in fp32."""

Batch = dict[str, "torch.Tensor"]
Head = Callable[["torch.Tensor"], "torch.Tensor"]


Answers = tuple["torch.Tensor", Head]
"""Rows [N, D] for the N judged tokens of a batch, and what turns some of them into logits [n, V]: inputs and head."""


AnswersOf = Callable[[int], Answers]
"""Returns the answers to the batch with this number."""


def judged(batch: Batch) -> torch.Tensor:
    """Return which positions [B, S] predict a token that is judged."""
    labels_BS = batch["labels"].roll(-1, dims=1)
    labels_BS[:, -1] = IGNORED_LABEL
    return labels_BS != IGNORED_LABEL


class ModelReader:
    """A causal LM that reads batches.

    The head runs on a chunk of its kept inputs at a time, so [S, V] logits never exist. If the head cannot be
    separated, the model's logits are used.
    """

    def __init__(self, model: Any, *, name: str) -> None:
        self.name = name
        self._model = model
        self.head: Head | None = None
        """The head as a function; `None` where it cannot be taken out of the model."""
        with suppress(UsageError):
            self.head = output_head(model).logits

    def answers(self, batch: Batch, mask_BS: torch.Tensor) -> Answers:
        """Return the answers at the positions of a mask."""
        import torch

        read = {name: values.to(self._model.device) for name, values in batch.items() if name != "labels"}
        with torch.inference_mode():
            if self.head is not None:
                try:
                    replacement, inputs = captured_head_input(self._model, self.name)
                    with replacement():
                        outputs = self._model(**read, use_cache=False)
                    replacement.check_logits(outputs.logits)
                    if len(inputs) == 1:
                        (states_BSD,) = inputs
                        return states_BSD[mask_BS.to(states_BSD.device)], self.head
                except UsageError:
                    pass
                self.head = None
            logits = self._model(**read, use_cache=False).logits
            return logits[mask_BS.to(logits.device)], lambda rows: rows


def read_baseline(reader: ModelReader, batches: Sequence[Batch]) -> AnswersOf:
    """Read everything with the baseline; the model stays in memory only if its head cannot be separated.

    Otherwise the inputs of its head wait on the host.
    """
    inputs: list[torch.Tensor] = []
    device: Any = None
    for index in range(len(batches)):
        rows_ND, head = reader.answers(batches[index], judged(batches[index]))
        if reader.head is None:
            logger.info(f"{reader.name}: its output head cannot run separately, so both models stay in memory")
            return lambda index: reader.answers(batches[index], judged(batches[index]))
        inputs.append(rows_ND.cpu())
        device = rows_ND.device
        log_progress("reading by the baseline", index + 1, len(batches))
    stored_bytes = sum(states.nbytes for states in inputs)
    if stored_bytes >= _LARGE_BYTES:
        logger.info(
            f"{reader.name}: {gigabytes(stored_bytes)} GB of hidden states are kept on the host; lower --num-samples "
            "to reduce that"
        )
    return lambda index: (inputs[index].to(device), head)


@dataclass(kw_only=True)
class TokenMeasures:
    """One number for each judged token, in the order of the text."""

    loss_N: torch.Tensor
    """The model's cross-entropy in nats."""
    counts: tuple[int, ...]
    """Judged tokens of each window that has any."""
    baseline_loss_N: torch.Tensor | None = None
    """The baseline's cross-entropy in nats."""
    kl_N: torch.Tensor | None = None
    """KL(baseline | model) in nats."""
    agreement_N: torch.Tensor | None = None
    """1 where both find the same token most likely."""
    compared_vocabulary: int | None = None
    """Tokens that KL and agreement range over."""

    def window_sums(self, values_N: torch.Tensor) -> tuple[float, ...]:
        """Return the sums over each window, in fp64."""
        return tuple(float(part.double().sum()) for part in values_N.split(self.counts))


def measure_tokens(
    model: ModelReader, baseline: AnswersOf | None, batches: Sequence[Batch], *, baseline_name: str = "baseline"
) -> TokenMeasures:
    """Return loss, KL and agreement of every evaluated token, from fp32 log-probabilities.

    Raises:
        RefusedInputError: a model's outputs are not numbers; names the window and the token.
    """
    import torch

    measured: dict[str, list[torch.Tensor]] = {}
    vocabulary = None
    for index, batch in enumerate(batches):
        rows_ND, head = model.answers(batch, judged(batch))
        other_rows_ND, other_head = (None, head) if baseline is None else baseline(index)
        labels_N = batch["labels"].roll(-1, dims=1)[judged(batch)]
        parts: dict[str, list[torch.Tensor]] = {}
        start, count = 0, 1
        while start < len(labels_N):
            chunk = slice(start, start + count)
            with torch.inference_mode():
                own_nV = head(rows_ND[chunk]).float()
                labels_n1 = labels_N[chunk].to(own_nV.device)[:, None]
                log_q_nV = own_nV.log_softmax(dim=-1)
                values = {"loss": -log_q_nV.gather(1, labels_n1).squeeze(1)}
                if other_rows_ND is not None:
                    other_nV = other_head(other_rows_ND[chunk]).float().to(own_nV.device)
                    log_p_nV = other_nV.log_softmax(dim=-1)
                    values["baseline_loss"] = -log_p_nV.gather(1, labels_n1).squeeze(1)
                    vocabulary = min(own_nV.shape[1], other_nV.shape[1])
                    if own_nV.shape[1] != other_nV.shape[1]:
                        # One head is padded further than the other; the rows beyond belong to no token.
                        log_q_nV, log_p_nV = (
                            logits[:, :vocabulary].log_softmax(dim=-1) for logits in (own_nV, other_nV)
                        )
                    rows = dense_rows(log_q_nV, log_p_nV)
                    values |= {"kl": rows["forward_kl"], "agreement": rows["agreement"]}
            for name, values_n in values.items():
                parts.setdefault(name, []).append(values_n.float().cpu())
            start, count = start + count, max(1, CHUNK_ELEMENTS // own_nV.shape[1])
        for key, name in (("loss", model.name), ("baseline_loss", baseline_name)):
            if key in parts:
                check_finite(name, torch.cat(parts[key]), batch, first_window=index * len(batches[0]["labels"]))
        for name, chunks in parts.items():
            measured.setdefault(name, []).extend(chunks)
        log_progress("reading by the model", index + 1, len(batches))
    joined = {name: torch.cat(chunks) for name, chunks in measured.items()}
    counts = [count for batch in batches for count in judged(batch).sum(dim=1).tolist() if count]
    return TokenMeasures(
        loss_N=joined["loss"],
        counts=tuple(counts),
        baseline_loss_N=joined.get("baseline_loss"),
        kl_N=joined.get("kl"),
        agreement_N=joined.get("agreement"),
        compared_vocabulary=vocabulary,
    )


def check_finite(name: str, losses_N: torch.Tensor, batch: Batch, *, first_window: int) -> None:
    """Check the losses [N] of a batch's judged tokens.

    Raises:
        RefusedInputError: one is no number; names its window and token.
    """
    bad = (~losses_N.isfinite()).nonzero()
    if len(bad) == 0:
        return
    row, position = judged(batch).nonzero()[int(bad[0])].tolist()
    rule = (
        f"gives NaN or infinity for the token at position {position + 2} of window {first_window + row + 1} "
        f"({len(bad):,} of {len(losses_N):,} tokens of its batch)"
    )
    raise RefusedInputError(
        ConfigError(where=name, rule=rule, fix="look for NaN in its weights, or try --dtype float32")
    )
