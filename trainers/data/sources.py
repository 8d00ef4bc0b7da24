"""Rows of a dataset from wherever it lies: the Hub, files on this machine, or Python's own help topics."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from .text import read_utf8

PYTHON_HELP = "python-help"
"""Names the topics of Python's own help, which every installation holds."""
SUFFIXES = (".csv", ".json", ".jsonl", ".parquet", ".txt")

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Source of rows, which a user writes as `ID[:config][#N]`."""

    name: str
    """Hub id, path, or `python-help`."""
    config: str | None = None
    """Configuration of a Hub dataset; `None`: its only or default one."""
    limit: int | None = None
    """Rows to read; `None`: all."""

    @property
    def is_local(self) -> bool:
        """Whether nothing has to be fetched."""
        return self.name == PYTHON_HELP or Path(self.name).exists()


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Part of a dataset that one of several readers reads: together they read each row once."""

    index: int = 0
    """Its number, from 0."""
    count: int = 1
    """How many there are."""


WHOLE = Part()
"""The part of a reader that is alone."""


def parse_source(text: str) -> Source:
    """Split ``ID[:config][#N]``; a path that exists is taken as it is.

    Raises:
        UsageError: N is no count, or the name is neither a path nor shaped like a Hub id.

    >>> parse_source("Salesforce/wikitext:wikitext-2-raw-v1#500")
    Source(name='Salesforce/wikitext', config='wikitext-2-raw-v1', limit=500)
    """
    if Path(text).exists():
        return Source(name=text)
    rest, mark, count = text.rpartition("#")
    limit = None
    if mark:
        if not count.isdecimal() or int(count) < 1:
            rule, fix = "what follows # is the number of rows to read, at least 1", "such as imdb#2000"
            raise UsageError(Fault(where="dataset", value=text, rule=rule, fix=fix))
        text, limit = rest, int(count)
    if text == PYTHON_HELP or Path(text).exists():
        return Source(name=text, limit=limit)
    name, _, config = text.partition(":")
    if name.startswith((".", "/", "~")) or name.endswith(SUFFIXES) or name.count("/") > 1 or not name:
        rule = "no such file or directory"
        raise UsageError(Fault(where="dataset", value=text, rule=rule, fix=f"or a Hub id, or {PYTHON_HELP}"))
    return Source(name=name, config=config or None, limit=limit)


def local_place(text: str | None) -> str | None:
    """Return the path that a dataset is read from; `None` where it is none, or none that exists.

    >>> local_place("imdb#2000")
    """
    if text is None:
        return None
    return next((name for name in (text, text.rpartition("#")[0]) if name and Path(name).exists()), None)


def read_rows(
    source: Source, *, split: str, revision: str | None, streaming: bool = False, part: Part = WHOLE
) -> Iterator[Row]:
    """Yield the rows of a source, at most its limit; of the Hub only as far as they are asked for where `streaming`.

    One part of `count` is each `count`-th file where there are as many files, and otherwise each `count`-th row of all.

    Raises:
        UsageError: nothing of that name, configuration or split exists, or a file cannot be read as rows.
        ShardwrightError: the Hub cannot be reached.
    """
    if revision is not None and source.is_local:
        raise UsageError(Fault(where="dataset_revision", value=revision, rule="only a Hub dataset has revisions"))
    if source.limit is None:
        return _rows(source, split=split, revision=revision, streaming=streaming, part=part)
    # A limit counts the rows of the whole.
    return _every(islice(_rows(source, split=split, revision=revision, streaming=True), source.limit), part)


def _rows(source: Source, *, split: str, revision: str | None, streaming: bool, part: Part = WHOLE) -> Iterator[Row]:
    if source.name == PYTHON_HELP:
        return _every(_help_topics(), part)
    if source.is_local:
        files = _files(Path(source.name))
        if len(files) >= part.count:
            files, part = files[part.index :: part.count], WHOLE
        return _every((row for path in files for row in _file_rows(path)), part)
    return _hub_rows(source, split=split, revision=revision, streaming=streaming, part=part)


def _every(rows: Iterable[Row], part: Part) -> Iterator[Row]:
    return islice(rows, part.index, None, part.count)


def _help_topics() -> Iterator[Row]:
    from pydoc_data.topics import topics

    return ({"text": topics[name]} for name in sorted(topics))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix not in SUFFIXES:
            rule = f"a dataset file ends in {', '.join(SUFFIXES)}"
            raise UsageError(Fault(where="dataset", value=str(path), rule=rule))
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not found:
        rule = f"holds no file that ends in {', '.join(SUFFIXES)}"
        raise UsageError(Fault(where="dataset", value=str(path), rule=rule))
    return found


def _file_rows(path: Path) -> Iterator[Row]:
    read = {
        ".csv": _csv_rows,
        ".json": _json_rows,
        ".jsonl": _jsonl_rows,
        ".parquet": _parquet_rows,
        ".txt": _text_rows,
    }[path.suffix]
    try:
        yield from read(path)
    except UnicodeDecodeError as error:
        raise UsageError(Fault(where="dataset", value=str(path), rule=f"is not UTF-8 text ({error.reason})")) from None


def _text_rows(path: Path) -> Iterator[Row]:
    yield {"text": read_utf8(path, where="dataset")}


def _csv_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, strict=True)
        try:
            for row in rows:
                where = f"{path}:{rows.line_num}"
                if None in row or None in row.values():
                    columns = len(rows.fieldnames or ())
                    raise UsageError(Fault(where=where, rule=f"must have {columns} values, as the first line has"))
                yield row
        except csv.Error as error:
            raise UsageError(Fault(where=f"{path}:{rows.line_num}", rule=f"is not valid CSV ({error})")) from None


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _row(_parsed(line, f"{path}:{number}"), f"{path}:{number}")


def _json_rows(path: Path) -> Iterator[Row]:
    data = _parsed(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(data, list):
        raise UsageError(
            Fault(where=str(path), rule="must hold a list of objects", fix="or one object a line, as .jsonl")
        )
    for index, value in enumerate(data):
        yield _row(value, f"{path}[{index}]")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(Fault(where=where, rule=f"is not valid JSON ({error})")) from None


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise UsageError(Fault(where=where, rule="must be an object with columns such as text or messages"))
    return value


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        detail = " ".join(str(error).split())
        raise UsageError(Fault(where="dataset", value=str(path), rule=f"is not readable Parquet ({detail})")) from None


def _hub_rows(source: Source, *, split: str, revision: str | None, streaming: bool, part: Part) -> Iterator[Row]:
    """Yield rows, fetched as they are wanted where `streaming`: a large dataset is not fetched for a few."""
    from datasets import IterableDataset, load_dataset
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    try:
        found = load_dataset(source.name, source.config, split=split, revision=revision, streaming=streaming)
        if isinstance(found, IterableDataset) and found.num_shards >= part.count:
            found, part = found.shard(part.count, part.index, contiguous=False), WHOLE
        yield from _every(found, part)
    except DatasetNotFoundError as error:
        fix = f"check the id, log in for a gated one, or name a file, a directory or {PYTHON_HELP}"
        raise UsageError(Fault(where="dataset", value=source.name, rule=_one_line(error), fix=fix)) from None
    except (ValueError, DatasetsError) as error:
        # datasets 5.2.0 says 'Instruction "NAME" corresponds to no data!' of a split that is there and empty.
        if "corresponds to no data" in str(error):
            rule, fix = f"its split {split} has no rows", "name another one, or a file"
            raise UsageError(Fault(where="dataset", value=source.name, rule=rule, fix=fix)) from None
        raise UsageError(Fault(where="dataset", value=source.name, rule=_one_line(error))) from None
    except (OSError, RuntimeError) as error:
        if "scripts are no longer supported" in str(error):
            rule = "is a script, which would run code of its repository"
            fix = "use its Parquet files: --dataset-revision refs/convert/parquet where the Hub has converted it"
            raise UsageError(Fault(where="dataset", value=source.name, rule=rule, fix=fix)) from None
        fix = "; HF_HUB_OFFLINE is set: unset it, or name a file" if "OfflineMode" in str(error) else ""
        raise ShardwrightError(f"dataset {source.name}: the Hub cannot be reached ({_one_line(error)}){fix}") from None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."
