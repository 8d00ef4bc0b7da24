"""Token samples for training and evaluation: in memory or streamed."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from ...ds_configs.specs.errors import ConfigError, UsageError
from .chat import IGNORED_LABEL, encode_chat, encode_completion, special_prefix, special_suffix
from .sources import DataSettings, Row, joined_pieces, parse_source, read_rows

Kind = Literal["text", "messages", "prompt and completion"]
Sample = dict[str, list[int]]

MESSAGE_COLUMNS = ("messages", "conversations")
PROMPT_COLUMNS = (("prompt", "completion"), ("instruction", "output"))
"""Columns of a prompt and its completion; the second pair is Alpaca's, with an optional `input`."""
_ALPACA_PROMPT = (
    "Below is an instruction that describes a task{with_input}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""The prompt of tatsu-lab/stanford_alpaca, for a tokenizer without a chat template."""
_FILL = {"input_ids": None, "labels": IGNORED_LABEL, "teacher_rows": -1, "position_ids": 0}
"""Padding value of each column; `None` for the padding token."""
_NumberedRow = tuple[int, Row]
"""A row with its index, which errors name."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleStatistics:
    """Counts of rows that were read, and of the samples made of them."""

    source: str
    """The dataset as the user wrote it."""
    kind: Kind
    rows: int
    empty_rows: int
    """Rows without text, which were skipped."""
    unlabelled_rows: int
    """Rows without a label within `seq_len` tokens, which were skipped."""
    cut_rows: int
    """Rows longer than `seq_len`, which were truncated."""
    train_samples: int
    evaluation_samples: int
    train_tokens: int
    """Training tokens, without padding."""
    train_labels: int
    """Training tokens with a label."""
    template_rows: int = 0
    """Rows that the chat template rendered."""
    packed_documents: int = 0
    """Training documents in the `train_samples` rows; 0 if each row is one document, or plain text that is joined."""

    @property
    def source_name(self) -> str:
        """Name of the dataset for a published model card: local files without their directory."""
        return Path(self.source).name if parse_source(self.source).is_local else self.source


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Samples of at most `seq_len` tokens; each a dict of `input_ids` and `labels`."""

    train: Sequence[Sample]
    """Training samples: a list, or a dataset on disk."""
    evaluation: list[Sample]
    """Evaluation samples, from rows that are not trained on."""
    statistics: SampleStatistics
    kept: object = None
    """Owner of the file of `train`, if it is on disk; the file is deleted with it."""


def stated_samples(settings: DataSettings, tokenizer: Any) -> Samples:
    """Return the samples that settings describe, and log truncation; a teacher's cache and the training use the same.

    Raises:
        UsageError: as `load_samples`.
    """
    samples = load_samples(
        settings.dataset,
        tokenizer,
        seq_len=settings.seq_len,
        packing=settings.packing != "off",
        split=settings.dataset_split,
        revision=settings.dataset_revision,
        seed=settings.seed,
        evaluation_fraction=settings.evaluation_fraction,
        text_column=settings.text_column,
    )
    _log_truncation(samples.statistics, settings.seq_len)
    return samples


def _log_truncation(statistics: SampleStatistics, seq_len: int) -> None:
    if statistics.cut_rows:
        logger.info(
            f"{statistics.cut_rows:,} of {statistics.rows:,} rows of {statistics.source} are longer than {seq_len} "
            "tokens and are truncated"
        )


def load_samples(
    source: str,
    tokenizer: Any,
    *,
    seq_len: int,
    packing: bool = True,
    split: str = "train",
    revision: str | None = None,
    seed: int = 0,
    evaluation_fraction: float = 0.05,
    text_column: str | None = None,
) -> Samples:
    """Read a dataset and turn it into samples.

    Rows have `text`; `messages` or `conversations`, with or without `tools`; `prompt` and `completion`; or, as Alpaca,
    `instruction`, `input` and `output`. Plain text is joined, with the
    end-of-sequence token after each document, and split into samples of exactly `seq_len` tokens; with `packing=False`
    each document is split separately and its last piece is shorter. Any other row makes one sample, truncated to
    `seq_len`, with labels on what the assistant or the completion says.

    Only the content and the seed decide which rows are evaluation rows, so equal rows are in the same set. A single
    document is split into two parts.

    Args:
        source: `ID[:config][#N]` of the Hub, a `.jsonl`, `.json`, `.csv`, `.parquet` or `.txt` file, a directory of
            such files, or `python-help`.
        tokenizer: Its template renders conversations.
        seq_len: Largest sample length in tokens.
        packing: Whether plain text is joined.
        seed: Selects the evaluation rows.
        evaluation_fraction: Share of evaluation rows, 0 to below 1; 0 for none.
        text_column: Column that is read as `text`; other columns are ignored.

    Raises:
        UsageError: the dataset does not exist, has no text, is shorter than one sample, or all labels are masked.
    """
    rows: list[Row] = list(read_rows(parse_source(source), split=split, revision=revision))
    if text_column is not None:
        check_text_column(source, rows, text_column)
        rows = [{"text": row.get(text_column)} for row in rows]
    kind = kind_of(source, rows)
    filled = [(index, row) for index, row in enumerate(rows) if has_text(row, kind)]
    check_one_format(source, rows, kind)
    if not filled:
        rule = f"none of its {len(rows)} rows has text"
        raise UsageError(ConfigError(where="dataset", value=source, rule=rule))
    make = SampleMaker(tokenizer, seq_len, kind=kind, packing=packing, source=source)
    train_rows, evaluation_rows = _split_rows(filled, kind, seed, evaluation_fraction)
    train = list(make(train_rows))
    unlabelled, cut = make.unlabelled, make.cut
    evaluation = list(make(evaluation_rows))
    make.log_changes()
    if not train:
        if kind == "text":
            rule = f"its text is shorter than one sample of seq_len = {seq_len} tokens"
            fix = "lower --seq-len, or add more text"
        else:
            speaker = "the assistant" if kind == "messages" else "the completion"
            rule = f"every label is masked: no row of {len(filled)} has text of {speaker} within seq_len = {seq_len} "
            rule += "tokens"
            fix = "raise --seq-len, or check the roles in the rows"
        raise UsageError(ConfigError(where="dataset", value=source, rule=rule, fix=fix))
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
        template_rows=make.chats["rendered"],
    )
    return Samples(train=train, evaluation=evaluation, statistics=statistics)


def collate(samples: Sequence[dict[str, Any]], *, pad_token_id: int = 0) -> dict[str, Any]:
    """Pad samples on the right to the longest and return tensors [B, S]; unless packed, with an `attention_mask`.

    The mask depends on positions, not on tokens: an end-of-sequence token that is also the padding token keeps its
    label. `teacher_rows` and `position_ids` are padded if samples have them.
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
    if "position_ids" in batch:
        # The positions of packed documents make the mask; each token of padding, with position 0, is a document.
        return batch
    positions_S = torch.arange(max(lengths))
    batch["attention_mask"] = (positions_S[None] < torch.tensor(lengths)[:, None]).long()
    return batch


def check_text_column(source: str, rows: Sequence[Row], column: str) -> None:
    """Raise a `UsageError` if the first row has no such column."""
    known = list(rows[0]) if rows else []
    if rows and column not in known:
        near = get_close_matches(column, known, n=1)
        fix = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
        raise UsageError(ConfigError(where="text_column", value=column, rule=f"is not a column of {source}", fix=fix))


def kind_of(source: str, rows: Sequence[Row]) -> Kind:
    """Return the kind of the rows, by the columns of the first one."""
    if not rows:
        raise UsageError(ConfigError(where="dataset", value=source, rule="has no rows"))
    columns = list(rows[0])
    if any(name in columns for name in MESSAGE_COLUMNS):
        return "messages"
    if any(name in columns and other in columns for name, other in PROMPT_COLUMNS):
        return "prompt and completion"
    if "text" in columns:
        return "text"
    rule = (
        f"needs a column text, {' or '.join(MESSAGE_COLUMNS)}, prompt and completion, or instruction and output, "
        f"but has {', '.join(columns)}"
    )
    fix = "select one with --text-column"
    fix = f"{fix} {columns[0]}" if len(columns) == 1 else f"{fix}, or rename two to prompt and completion"
    raise UsageError(ConfigError(where="dataset", value=source, rule=rule, fix=fix))


def _messages(row: Row) -> Any:
    return next((row[name] for name in MESSAGE_COLUMNS if row.get(name)), None)


def has_text(row: Row, kind: Kind) -> bool:
    """Return whether a row has text to train on."""
    if kind == "messages":
        return isinstance(_messages(row), list)
    if kind == "prompt and completion":
        return any(bool(row.get(name)) and bool(row.get(other)) for name, other in PROMPT_COLUMNS)
    text = row.get("text")
    return isinstance(text, str) and bool(text.strip())


def check_one_format(source: str, rows: Iterable[Row], kind: Kind, *, first: int = 0) -> None:
    """Raise a `UsageError` if rows have text in the columns of another kind; `first` is the index of the first row."""
    kinds: tuple[Kind, ...] = ("messages", "prompt and completion", "text")
    for index, row in enumerate(rows, start=first):
        if not has_text(row, kind) and (other := next((name for name in kinds if has_text(row, name)), None)):
            rule = f"has {other}, but earlier rows have {kind}: all rows of a dataset must have one format"
            fix = "convert the rows, or train on one file per format"
            raise UsageError(ConfigError(where=f"{source}[{index}]", rule=rule, fix=fix))


def prompt_and_completion(row: Row, *, with_template: bool, where: str) -> tuple[Any, Any]:
    """Return the prompt and the completion of a row, both texts or both lists of messages.

    An Alpaca row is a question and an answer for a chat template, or else text with Alpaca's own prompt.

    Raises:
        UsageError: one is a text and the other a list.
    """
    prompt, completion = row.get("prompt"), row.get("completion")
    if not (prompt and completion):
        instruction, further, completion = str(row["instruction"]), row.get("input"), str(row["output"])
        if with_template:
            question = f"{instruction}\n\n{further}" if further else instruction
            return [{"role": "user", "content": question}], [{"role": "assistant", "content": completion}]
        prompt = _ALPACA_PROMPT.format(
            with_input=", paired with an input that provides further context" if further else "",
            instruction=instruction,
            input=f"### Input:\n{further}\n\n" if further else "",
        )
    if not any(isinstance(prompt, kind) and isinstance(completion, kind) for kind in (str, list)):
        rule = f"prompt is a {type(prompt).__name__} and completion a {type(completion).__name__}"
        fix = "write both as text, or both as lists of messages"
        raise UsageError(ConfigError(where=where, rule=rule, fix=fix))
    return prompt, completion


def tools_of(row: Row, where: str) -> list[Any] | None:
    """Return the functions that a row offers to the assistant; datasets store them as a list or as JSON text."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise UsageError(ConfigError(where=where, rule=f"its tools are not valid JSON ({error})")) from None
    if tools and not isinstance(tools, list):
        rule = f"its tools must be a list, not {type(tools).__name__}"
        raise UsageError(ConfigError(where=where, rule=rule))
    return tools or None


def digest_of(row: Row, seed: int) -> bytes:
    """Return the digest that decides whether a row is an evaluation row; equal rows have equal digests."""
    return hashlib.sha256(f"{seed}\n{json.dumps(row, sort_keys=True, default=str)}".encode()).digest()


def _split_rows(
    rows: list[_NumberedRow], kind: Kind, seed: int, fraction: float
) -> tuple[list[_NumberedRow], list[_NumberedRow]]:
    if fraction <= 0:
        return rows, []
    if len(rows) == 1 and kind == "text":
        ((index, row),) = rows
        end = round(len(row["text"]) * (1 - fraction))
        return [(index, {"text": row["text"][:end]})], [(index, {"text": row["text"][end:]})]
    digests = [digest_of(row, seed) for _, row in rows]
    equal_rows, missing, selected = Counter(digests), max(1, round(len(rows) * fraction)), set()
    # The last digest is never selected, so that there is always a row to train on.
    for digest in sorted(equal_rows)[:-1]:
        if missing <= 0:
            break
        selected.add(digest)
        missing -= equal_rows[digest]
    train = [row for row, digest in zip(rows, digests, strict=True) if digest not in selected]
    return train, [row for row, digest in zip(rows, digests, strict=True) if digest in selected]


class SampleMaker:
    """Make samples of rows one by one; count rows whose labels are all masked, and truncated rows."""

    def __init__(self, tokenizer: Any, seq_len: int, *, kind: Kind, packing: bool, source: str) -> None:
        self.unlabelled = self.cut = 0
        self.chats: Counter[str] = Counter()
        """What a chat template does to conversations, as `encode_chat` counts it."""
        self._tokenizer, self._seq_len, self._kind = tokenizer, seq_len, kind
        self._packing, self._source = packing, source

    def __call__(self, rows: Iterable[_NumberedRow]) -> Iterator[Sample]:
        """Yield samples of at most `seq_len` tokens; rows are read as samples are requested."""
        tokenizer, seq_len = self._tokenizer, self._seq_len
        if self._kind == "text":
            before, after = special_prefix(tokenizer), special_suffix(tokenizer)
            documents = (
                [*before, *tokenizer(row["text"], add_special_tokens=False)["input_ids"], *after] for _, row in rows
            )
            pieces = (
                document[start : start + seq_len]
                for document in documents
                for start in range(0, len(document), seq_len)
                if min(seq_len, len(document) - start) > 1
            )
            for tokens in joined_pieces(documents, seq_len) if self._packing else pieces:
                # Labels are a copy, so that masking a label does not change the tokens.
                yield {"input_ids": tokens, "labels": list(tokens)}
            return
        for index, row in rows:
            where = f"{self._source}[{index}]"
            if self._kind == "messages":
                tools = tools_of(row, where)
                ids, labels = encode_chat(tokenizer, _messages(row), tools=tools, where=where, counts=self.chats)
            else:
                prompt, completion = prompt_and_completion(
                    row, with_template=bool(tokenizer.chat_template), where=where
                )
                if isinstance(prompt, list):
                    turns, tools = [*prompt, *completion], tools_of(row, where)
                    ids, labels = encode_chat(
                        tokenizer, turns, first_labelled=len(prompt), tools=tools, where=where, counts=self.chats
                    )
                else:
                    ids, labels = encode_completion(tokenizer, prompt, completion)
            self.cut += len(ids) > seq_len
            ids, labels = ids[:seq_len], labels[:seq_len]
            # The first token is never predicted.
            if any(label != IGNORED_LABEL for label in labels[1:]):
                yield {"input_ids": ids, "labels": labels}
            else:
                self.unlabelled += 1

    def log_changes(self) -> None:
        """Log what the chat template changes in earlier messages of a conversation."""
        if rows := self.chats["rewritten"]:
            lost = self.chats["unlabelled answers"]
            also = f"; {lost:,} answers are not in it and have no labels" if lost else ""
            logger.info(
                f"the chat template changes earlier messages, such as their thoughts, in {rows:,} conversations of "
                f"{self._source}: labels are those of the complete rendering{also}"
            )


def streamed_samples(settings: DataSettings, tokenizer: Any, *, train_samples: int, evaluation_samples: int) -> Samples:
    """Return the first samples of a dataset: the head becomes the evaluation set, the following rows are trained on.

    Rows are read as samples are made of them. Training samples are written to a file in the temporary directory (16
    bytes per token), which is deleted with the returned object, so memory does not grow with their number. Rows equal
    to a row of the head are not trained on.

    Args:
        settings: Dataset, sequence length and packing; `evaluation_fraction` is ignored.
        tokenizer: Its template renders conversations.
        train_samples: Largest number of training samples.
        evaluation_samples: Number of evaluation samples; 0 for none.

    Raises:
        UsageError: as `load_samples`, or the dataset ends before the first training sample.
    """
    from datasets import Dataset, Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    source = settings.dataset
    split, revision = settings.dataset_split, settings.dataset_revision
    stream = read_rows(parse_source(source), split=split, revision=revision, streaming=True)
    first = list(islice(stream, 1))
    if settings.text_column is not None:
        check_text_column(source, first, settings.text_column)
    rows = _Rows(chain(first, stream), settings)
    rows.kind = kind_of(source, list(rows.as_read(first)))
    make = SampleMaker(tokenizer, settings.seq_len, kind=rows.kind, packing=settings.packing != "off", source=source)
    evaluation = list(islice(make(rows.head()), evaluation_samples))
    make.unlabelled = make.cut = 0
    directory = tempfile.TemporaryDirectory(prefix="shardwright-stream-", ignore_cleanup_errors=True)
    tokens = labels = 0
    file = str(Path(directory.name) / "train.arrow")
    features = Features({name: List(Value("int64")) for name in ("input_ids", "labels")})
    with ArrowWriter(path=file, features=features) as writer:
        for sample in islice(make(rows.rest()), train_samples):
            tokens += len(sample["input_ids"])
            labels += sum(label != IGNORED_LABEL for label in sample["labels"])
            writer.write(sample)
        count, _ = writer.finalize()
    make.log_changes()
    if not count:
        rule = f"ends after {rows.read} rows, before the first training sample of seq_len = {settings.seq_len}"
        fix = "lower --seq-len or --evaluation-samples, or omit --streaming"
        raise UsageError(ConfigError(where="dataset", value=source, rule=rule, fix=fix))
    statistics = SampleStatistics(
        source=source,
        kind=rows.kind,
        rows=rows.read,
        empty_rows=rows.empty,
        unlabelled_rows=make.unlabelled,
        cut_rows=make.cut,
        train_samples=count,
        evaluation_samples=len(evaluation),
        train_tokens=tokens,
        train_labels=labels,
        template_rows=make.chats["rendered"],
    )
    _log_truncation(statistics, settings.seq_len)
    return Samples(train=Dataset.from_file(file), evaluation=evaluation, statistics=statistics, kept=directory)


class _Rows:
    """Rows with text, in order; rows of the head are remembered and skipped if they occur again."""

    kind: Any = None

    def __init__(self, stream: Iterator[Row], settings: DataSettings) -> None:
        self.read = self.empty = 0
        self.stream = stream
        self._settings = settings
        self._head: set[bytes] = set()

    def as_read(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield rows with the selected column as `text`."""
        column = self._settings.text_column
        return ({"text": row.get(column)} if column is not None else row for row in rows)

    def head(self) -> Iterator[_NumberedRow]:
        for index, row in self._filled():
            self._head.add(digest_of(row, self._settings.seed))
            yield index, row

    def rest(self) -> Iterator[_NumberedRow]:
        seed = self._settings.seed
        return ((index, row) for index, row in self._filled() if digest_of(row, seed) not in self._head)

    def _filled(self) -> Iterator[_NumberedRow]:
        for row in self.as_read(self.stream):
            self.read += 1
            if has_text(row, self.kind):
                yield self.read - 1, row
            else:
                check_one_format(self._settings.dataset, [row], self.kind, first=self.read - 1)
                self.empty += 1
