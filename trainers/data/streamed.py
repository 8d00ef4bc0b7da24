"""Samples of a dataset that is read only as far as a training goes, and kept on disk instead of in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import Fault, UsageError
from .chat import IGNORED_LABEL
from .samples import (
    Sample,
    SampleMaker,
    Samples,
    SampleStatistics,
    check_text_column,
    digest_of,
    has_text,
    kind_of,
)
from .settings import DataSettings
from .sources import WHOLE, Part, Row, parse_source, read_rows


def streamed_samples(
    settings: DataSettings, tokenizer: Any, *, train_samples: int, evaluation_samples: int, part: Part = WHOLE
) -> Samples:
    """Return the first samples of a dataset; the head is held out, and what follows is trained on.

    Rows are read as samples are made of them, and the samples to train on go to a file of the temporary directory (16
    bytes a token), which ends with what is returned: memory does not grow with their number. Rows that equal one of the
    head are left out of the training.

    Args:
        settings: Dataset, sequence length and packing; the share of `evaluation_fraction` does not count.
        tokenizer: Splits the text, and renders conversations.
        train_samples: To train on, at most.
        evaluation_samples: To hold out; 0 holds nothing out.
        part: Of the rows to train on. The head is that of the whole dataset, whoever reads.

    Raises:
        UsageError: as `load_samples` does, or the dataset ends before there is anything to train on.
    """
    source = settings.dataset
    read = partial(
        read_rows,
        parse_source(source),
        split=settings.dataset_split,
        revision=settings.dataset_revision,
        streaming=True,
    )
    found = read()
    first = list(islice(found, 1))
    if settings.text_column is not None:
        check_text_column(source, first, settings.text_column)
    rows = _Rows(chain(first, found), settings)
    rows.kind = kind_of(source, list(rows.as_read(first)))
    make = SampleMaker(tokenizer, settings.seq_len, kind=rows.kind, packing=settings.packing, source=source)
    evaluation = list(islice(make(rows.head()), evaluation_samples))
    make.unlabelled = make.cut = 0
    if part != WHOLE:
        rows.go_on_with(read(part=part))
    directory = tempfile.TemporaryDirectory(prefix="shardwright-stream-", ignore_cleanup_errors=True)
    train, tokens, labels = _on_disk(islice(make(rows.rest()), train_samples), Path(directory.name))
    if not len(train):
        rule = f"ends after {rows.read} rows, before there is a sample of seq_len = {settings.seq_len} to train on"
        fix = "lower --seq-len or --evaluation-samples, or leave --streaming out"
        raise UsageError(Fault(where="dataset", value=source, rule=rule, fix=fix))
    statistics = SampleStatistics(
        source=source,
        kind=rows.kind,
        rows=rows.read,
        empty_rows=rows.empty,
        unlabelled_rows=make.unlabelled,
        cut_rows=make.cut,
        train_samples=len(train),
        evaluation_samples=len(evaluation),
        train_tokens=tokens,
        train_labels=labels,
        machines=part.count,
    )
    return replace(Samples(train=train, evaluation=evaluation, statistics=statistics), kept=directory)


class _Rows:
    """Rows with text, in their order: those of the head are remembered, and left out where they come again."""

    kind: Any = None

    def __init__(self, found: Iterator[Row], settings: DataSettings) -> None:
        self.read = self.empty = 0
        self._found, self._settings = found, settings
        self._held_out: set[bytes] = set()

    def as_read(self, rows: Sequence[Row] | Iterator[Row]) -> Iterator[Row]:
        """Yield rows with the column that is read as text."""
        column = self._settings.text_column
        return ({"text": row.get(column)} if column is not None else row for row in rows)

    def go_on_with(self, found: Iterator[Row]) -> None:
        """Read others from here on, among which those of the head may be."""
        self._found = found

    def head(self) -> Iterator[Row]:
        """Yield rows that are held out."""
        for row in self._filled():
            self._held_out.add(digest_of(row, self._settings.seed))
            yield row

    def rest(self) -> Iterator[Row]:
        """Yield the rows after the head."""
        return (row for row in self._filled() if digest_of(row, self._settings.seed) not in self._held_out)

    def _filled(self) -> Iterator[Row]:
        for row in self.as_read(self._found):
            self.read += 1
            if has_text(row, self.kind):
                yield row
            else:
                self.empty += 1


def _on_disk(samples: Iterator[Sample], directory: Path) -> tuple[Any, int, int]:
    """Write samples to a file, and return them mapped from it, their tokens and their labels."""
    from datasets import Dataset, Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    tokens = labels = 0
    features = Features({name: List(Value("int64")) for name in ("input_ids", "labels")})
    file = str(directory / "train.arrow")
    with ArrowWriter(path=file, features=features) as writer:
        for sample in samples:
            tokens += len(sample["input_ids"])
            labels += sum(label != IGNORED_LABEL for label in sample["labels"])
            writer.write(sample)
        count, _ = writer.finalize()
    return (Dataset.from_file(file) if count else []), tokens, labels
