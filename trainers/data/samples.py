"""From a named dataset to token samples for training and held-out evaluation."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from ...ds_configs.specs.errors import Fault, UsageError
from .chat import IGNORED_LABEL, encode_chat, encode_completion, special_prefix, special_suffix
from .settings import DataSettings
from .sources import Row, parse_source, read_rows
from .text import joined_pieces

Kind = Literal["text", "messages", "prompt and completion"]
Sample = dict[str, list[int]]

MESSAGE_COLUMNS = ("messages", "conversations")
_FILL = {"input_ids": None, "labels": IGNORED_LABEL, "token_weights": 0.0, "teacher_rows": -1, "position_ids": 0}
"""What each column is padded with; `None`: the padding token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleStatistics:
    """Counts of rows that were read, and of what became of them."""

    source: str
    """The dataset as the user named it."""
    kind: Kind
    """Which columns the rows have."""
    rows: int
    """Rows that were read."""
    empty_rows: int
    """Rows without text, which were left out."""
    unlabelled_rows: int
    """Rows whose labels were all masked once cut to `seq_len`, which were left out."""
    cut_rows: int
    """Rows longer than `seq_len`, whose end was cut off."""
    train_samples: int
    """Samples to train on."""
    evaluation_samples: int
    """Samples held out."""
    train_tokens: int
    """Tokens to train on, without padding."""
    train_labels: int
    """Tokens with a label among them."""
    machines: int = 1
    """Machines among which the rows to train on are divided; the counts are those of one."""

    @property
    def source_name(self) -> str:
        """The dataset as a published card names it: a file of this machine without its place."""
        return Path(self.source).name if parse_source(self.source).is_local else self.source


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Samples of at most `seq_len` tokens; each a dict of `input_ids` and `labels`."""

    train: Sequence[Sample]
    """To train on: a list, or a dataset on disk."""
    evaluation: list[Sample]
    """Held out: rows of their own, none of which is trained on."""
    statistics: SampleStatistics
    """What was read."""
    kept: Any = None
    """Owner of the file of `train`, where it is one; the file ends with it."""


def stated_samples(settings: DataSettings, tokenizer: Any) -> Samples:
    """Return the samples that settings describe: the same for a teacher's cache and for a training.

    Raises:
        UsageError: as `load_samples` does.
    """
    return load_samples(
        settings.dataset,
        tokenizer,
        seq_len=settings.seq_len,
        packing=settings.packing,
        split=settings.dataset_split,
        revision=settings.dataset_revision,
        seed=settings.seed,
        evaluation_fraction=settings.evaluation_fraction,
        text_column=settings.text_column,
    )


def load_samples(
    source: str,
    tokenizer: Any,
    *,
    seq_len: int,
    packing: bool = True,
    split: str = "train",
    limit: int | None = None,
    revision: str | None = None,
    seed: int = 0,
    evaluation_fraction: float = 0.05,
    text_column: str | None = None,
) -> Samples:
    """Read a dataset and turn it into samples.

    Rows have `text`; `messages` or `conversations`; or `prompt` and `completion`. Plain text is joined, each document
    ended by the end-of-sequence token, and cut into samples of exactly `seq_len` tokens; with `packing=False` each
    document is cut on its own and the last piece is shorter. Other rows make one sample each, labelled where the
    assistant or the completion speaks; their end is cut off beyond `seq_len`.

    Which rows are held out depends on their content and the seed alone, so that equal rows are never on both sides. A
    single document is divided in itself.

    Args:
        source: `ID[:config][#N]` of the Hub, a `.jsonl`, `.json`, `.csv`, `.parquet` or `.txt` file, a directory of
            such, or `python-help`.
        tokenizer: Splits the text, and renders conversations.
        seq_len: Longest sample in tokens.
        packing: Whether plain text is joined.
        split: Split of a Hub dataset.
        limit: Rows to read at most, beside the source's own `#N`.
        revision: Branch, tag or commit of a Hub dataset.
        seed: Chooses the rows to hold out.
        evaluation_fraction: Share of rows to hold out, 0 to below 1; 0 holds nothing out.
        text_column: Column that is read as `text`; then no other is looked at.

    Raises:
        UsageError: the dataset does not exist, has no text, is shorter than one sample, or all labels are masked.
    """
    where = parse_source(source)
    if limit is not None:
        where = replace(where, limit=limit if where.limit is None else min(limit, where.limit))
    rows: list[Row] = list(read_rows(where, split=split, revision=revision))
    if text_column is not None:
        check_text_column(source, rows, text_column)
        rows = [{"text": row.get(text_column)} for row in rows]
    kind = kind_of(source, rows)
    filled = [row for row in rows if has_text(row, kind)]
    if not filled:
        rule = f"none of its {len(rows)} rows has any text"
        raise UsageError(Fault(where="dataset", value=source, rule=rule))
    make = SampleMaker(tokenizer, seq_len, kind=kind, packing=packing, source=source)
    kept, held_out = _split_rows(filled, kind, seed, evaluation_fraction)
    train = list(make(kept))
    unlabelled, cut = make.unlabelled, make.cut
    evaluation = list(make(held_out))
    if not train:
        raise UsageError(_nothing_left(source, seq_len, kind, len(filled)))
    statistics = SampleStatistics(
        source=source,
        kind=kind,
        rows=len(rows),
        empty_rows=len(rows) - len(filled),
        unlabelled_rows=unlabelled,
        cut_rows=cut,
        train_samples=len(train),
        evaluation_samples=len(evaluation),
        train_tokens=sum(len(sample["input_ids"]) for sample in train),
        train_labels=sum(label != IGNORED_LABEL for sample in train for label in sample["labels"]),
    )
    return Samples(train=train, evaluation=evaluation, statistics=statistics)


def collate(samples: Sequence[dict[str, Any]], *, pad_token_id: int = 0) -> dict[str, Any]:
    """Pad samples on the right to the longest and return tensors [B, S], with an `attention_mask`.

    Padding is told by position, not by the token, so that a padding token that is also the end-of-sequence token keeps
    its label where a text ends. `token_weights`, `teacher_rows` and `position_ids` are padded where samples have them.
    """
    import torch

    lengths = [len(sample["input_ids"]) for sample in samples]
    batch = {}
    for name, fill in _FILL.items():
        if name in samples[0]:
            value = pad_token_id if fill is None else fill
            padded = [
                [*sample[name], *[value] * (max(lengths) - length)]
                for sample, length in zip(samples, lengths, strict=True)
            ]
            batch[name] = torch.tensor(padded)
    positions_S = torch.arange(max(lengths))
    batch["attention_mask"] = (positions_S[None] < torch.tensor(lengths)[:, None]).long()
    return batch


def check_text_column(source: str, rows: Sequence[Row], column: str) -> None:
    """Raise a `UsageError` where the first row has no such column."""
    known = list(rows[0]) if rows else []
    if rows and column not in known:
        near = get_close_matches(column, known, n=1)
        fix = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
        raise UsageError(Fault(where="text_column", value=column, rule=f"is no column of {source}", fix=fix))


def kind_of(source: str, rows: Sequence[Row]) -> Kind:
    """Return what rows hold, by the columns of the first."""
    if not rows:
        raise UsageError(Fault(where="dataset", value=source, rule="has no rows"))
    columns = list(rows[0])
    if any(name in columns for name in MESSAGE_COLUMNS):
        return "messages"
    if "prompt" in columns and "completion" in columns:
        return "prompt and completion"
    if "text" in columns:
        return "text"
    rule = f"needs a column text, {' or '.join(MESSAGE_COLUMNS)}, or prompt and completion; it has {', '.join(columns)}"
    raise UsageError(Fault(where="dataset", value=source, rule=rule, fix="name one with --text-column"))


def _messages(row: Row) -> Any:
    return next((row[name] for name in MESSAGE_COLUMNS if row.get(name)), None)


def has_text(row: Row, kind: Kind) -> bool:
    """Tell whether a row holds anything to train on."""
    if kind == "messages":
        return isinstance(_messages(row), list)
    if kind == "prompt and completion":
        return bool(row.get("prompt")) and bool(row.get("completion"))
    text = row.get("text")
    return isinstance(text, str) and bool(text.strip())


def digest_of(row: Row, seed: int) -> bytes:
    """Return what decides the side of a row: equal rows have an equal one."""
    return hashlib.sha256(f"{seed}\n{json.dumps(row, sort_keys=True, default=str)}".encode()).digest()


def _split_rows(rows: list[Row], kind: Kind, seed: int, fraction: float) -> tuple[list[Row], list[Row]]:
    if fraction <= 0:
        return rows, []
    if len(rows) == 1 and kind == "text":
        text = rows[0]["text"]
        end = round(len(text) * (1 - fraction))
        return [{"text": text[:end]}], [{"text": text[end:]}]
    digests = [digest_of(row, seed) for row in rows]
    equal_rows, wanted, taken = Counter(digests), max(1, round(len(rows) * fraction)), set()
    # The last one stays, so that there is always something to train on.
    for digest in sorted(equal_rows)[:-1]:
        if wanted <= 0:
            break
        taken.add(digest)
        wanted -= equal_rows[digest]
    kept = [row for row, digest in zip(rows, digests, strict=True) if digest not in taken]
    return kept, [row for row, digest in zip(rows, digests, strict=True) if digest in taken]


class SampleMaker:
    """Samples of rows, made one by one; counts the rows whose labels are all masked, and those that were cut."""

    def __init__(self, tokenizer: Any, seq_len: int, *, kind: Kind, packing: bool, source: str) -> None:
        self.unlabelled = self.cut = 0
        self._tokenizer, self._seq_len, self._kind = tokenizer, seq_len, kind
        self._packing, self._source = packing, source

    def __call__(self, rows: Iterable[Row]) -> Iterator[Sample]:
        """Yield samples of at most `seq_len` tokens; rows are taken as samples are asked for."""
        return self._of_text(rows) if self._kind == "text" else self._of_turns(rows)

    def _of_text(self, rows: Iterable[Row]) -> Iterator[Sample]:
        tokenizer = self._tokenizer
        before, after = special_prefix(tokenizer), special_suffix(tokenizer)
        documents = ([*before, *tokenizer(row["text"], add_special_tokens=False)["input_ids"], *after] for row in rows)
        for tokens in (joined_pieces if self._packing else _pieces)(documents, self._seq_len):
            # Samples own their labels, so that masking one leaves the tokens alone.
            yield {"input_ids": tokens, "labels": list(tokens)}

    def _of_turns(self, rows: Iterable[Row]) -> Iterator[Sample]:
        for index, row in enumerate(rows):
            ids, labels = self._encoded(row, index)
            self.cut += len(ids) > self._seq_len
            ids, labels = ids[: self._seq_len], labels[: self._seq_len]
            # The first position has no predictor.
            if any(label != IGNORED_LABEL for label in labels[1:]):
                yield {"input_ids": ids, "labels": labels}
            else:
                self.unlabelled += 1

    def _encoded(self, row: Row, index: int) -> tuple[list[int], list[int]]:
        where = f"{self._source}[{index}]"
        if self._kind == "messages":
            return encode_chat(self._tokenizer, _messages(row), where=where)
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            return encode_chat(self._tokenizer, [*prompt, *completion], first_labelled=len(prompt), where=where)
        return encode_completion(self._tokenizer, str(prompt), str(completion))


def _pieces(documents: Iterable[list[int]], seq_len: int) -> Iterator[list[int]]:
    for document in documents:
        for start in range(0, len(document), seq_len):
            tokens = document[start : start + seq_len]
            if len(tokens) > 1:
                yield tokens


def _nothing_left(source: str, seq_len: int, kind: Kind, rows: int) -> Fault:
    if kind == "text":
        rule = f"its text is shorter than one sample of seq_len = {seq_len} tokens"
        return Fault(where="dataset", value=source, rule=rule, fix="lower --seq-len or give more text")
    speaker = "the assistant" if kind == "messages" else "the completion"
    rule = f"every label is masked: in none of {rows} rows does {speaker} speak within seq_len = {seq_len} tokens"
    return Fault(where="dataset", value=source, rule=rule, fix="raise --seq-len, or check the rows' roles")
