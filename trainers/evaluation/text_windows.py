"""From a text to windows of tokens: which tokens a model reads together, and which of them it is judged on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import Fault, UsageError
from ..data.chat import IGNORED_LABEL, special_prefix, special_suffix
from ..data.samples import load_samples
from ..data.sources import PYTHON_HELP
from ..data.text import read_utf8

Window = dict[str, list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest:
    """Text that a model is judged on, and the way it is cut."""

    files: tuple[Path, ...] = ()
    """Plain text files; empty to read `dataset`."""
    dataset: str = PYTHON_HELP
    """`ID[:config][#N]` of the Hub, a file or directory of rows, or `python-help`."""
    split: str = "test"
    """Split of a Hub dataset."""
    dataset_revision: str | None = None
    """Branch, tag or commit of a Hub dataset."""
    stride: int | None = None
    """Tokens from one window's start to the next; `None`: `seq_len`, so that none is read twice."""
    num_samples: int | None = None
    """Windows to use, from the start of the text; `None`: all."""

    @property
    def source(self) -> str:
        """Name that the user gave."""
        return ", ".join(map(str, self.files)) or self.dataset


@dataclass(frozen=True, kw_only=True, slots=True)
class TextWindows:
    """Windows of tokens with labels; a label of -100 is read, but not judged."""

    windows: tuple[Window, ...]
    """`input_ids` and `labels` of each, in the order of the text."""
    source: str
    """What the text came from."""
    seq_len_tokens: int
    """Longest window."""
    stride_tokens: int
    """From one window's start to the next."""
    available_windows: int
    """Windows that the whole text has."""

    @property
    def predicted_tokens(self) -> int:
        """Tokens that are judged; the first one of a window never is, as nothing predicts it."""
        return sum(label != IGNORED_LABEL for window in self.windows for label in window["labels"][1:])


def text_windows(request: TextRequest, tokenizer: Any, *, seq_len: int) -> TextWindows:
    """Read a text and cut it into windows of `seq_len` tokens.

    Documents of plain text are joined, each with the tokenizer's special tokens around it, and cut where a window is
    full; what is left at the end is not used. Conversations make one window each, judged where the assistant speaks.

    Raises:
        UsageError: the text is missing, empty or shorter than one window, or a number is out of range.
    """
    stride = seq_len if request.stride is None else request.stride
    faults = number_faults(request, seq_len)
    if faults:
        raise UsageError(faults)
    if request.files:
        found = list(windows_of(_file_tokens(request.files, tokenizer, seq_len), seq_len, stride))
    else:
        found = _dataset_windows(request, tokenizer, seq_len, stride)
    return TextWindows(
        windows=tuple(found[: request.num_samples]),
        source=request.source,
        seq_len_tokens=seq_len,
        stride_tokens=stride,
        available_windows=len(found),
    )


def number_faults(request: TextRequest, seq_len: int | None) -> list[Fault]:
    """Return which lengths and counts are out of range; `None` stands for a length that is not chosen yet."""
    faults = []
    if seq_len is not None and seq_len < 2:
        faults.append(Fault(where="--seq-len", value=seq_len, rule="must be at least 2: the first token is not judged"))
    longest = "the sequence length" if seq_len is None else f"seq_len = {seq_len}"
    if request.stride is not None and (request.stride < 1 or (seq_len is not None and request.stride > seq_len)):
        faults.append(Fault(where="--stride", value=request.stride, rule=f"must be from 1 to {longest}"))
    if request.num_samples is not None and request.num_samples < 1:
        faults.append(Fault(where="--num-samples", value=request.num_samples, rule="must be at least 1"))
    return faults


def windows_of(tokens: Sequence[int], seq_len: int, stride: int) -> Iterator[Window]:
    """Yield whole windows, `stride` tokens apart; a token that an earlier window judged is read, but not judged again.

    >>> [window["labels"] for window in windows_of(range(7), 4, 2)]
    [[0, 1, 2, 3], [-100, -100, 4, 5]]
    """
    for start in range(0, len(tokens) - seq_len + 1, stride):
        read = list(tokens[start : start + seq_len])
        judged_before = 0 if start == 0 else seq_len - stride
        yield {"input_ids": read, "labels": [IGNORED_LABEL] * judged_before + read[judged_before:]}


def _file_tokens(files: Sequence[Path], tokenizer: Any, seq_len: int) -> list[int]:
    texts = [read_utf8(path, where="--text") for path in files]
    if not any(text.strip() for text in texts):
        raise UsageError(Fault(where="--text", value=", ".join(map(str, files)), rule="has no text"))
    before, after = special_prefix(tokenizer), special_suffix(tokenizer)
    tokens: list[int] = []
    for text in texts:
        tokens += [*before, *tokenizer(text, add_special_tokens=False)["input_ids"], *after]
    if len(tokens) < seq_len:
        rule = f"has {len(tokens)} tokens, fewer than one window of seq_len = {seq_len}"
        fix = "lower --seq-len or give more text"
        raise UsageError(Fault(where="--text", value=", ".join(map(str, files)), rule=rule, fix=fix))
    return tokens


def _dataset_windows(request: TextRequest, tokenizer: Any, seq_len: int, stride: int) -> list[Window]:
    samples = load_samples(
        request.dataset,
        tokenizer,
        seq_len=seq_len,
        split=request.split,
        revision=request.dataset_revision,
        evaluation_fraction=0.0,
    )
    if samples.statistics.kind == "text":
        tokens = list(chain.from_iterable(sample["input_ids"] for sample in samples.train))
        return list(windows_of(tokens, seq_len, stride))
    if stride != seq_len:
        rule = f"joins documents of plain text, and {request.dataset} has {samples.statistics.kind}"
        raise UsageError(Fault(where="--stride", value=stride, rule=rule, fix="leave it out"))
    return list(samples.train)
