"""Rows of a dataset from the Hub, from local files, or from the help topics of Python."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError, collecting
from ...ds_configs.specs.settings import Settings
from ...ds_configs.specs.texts import near_path
from ...plugins.huggingface_hub import hub_errors, hub_failure, hub_status
from .image_rows import with_image_parts


def read_documents(files: Sequence[Path] | None) -> list[str]:
    """Return one document per file; without files, the help topics of Python.

    Raises:
        UsageError: files cannot be read, or are not UTF-8; lists all of them.
    """
    if files:
        errors: list[ConfigError] = []
        documents = []
        for path in files:
            with collecting(errors):
                documents.append(read_utf8(path, where="--text"))
        if errors:
            raise UsageError(errors)
        return documents
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def read_utf8(path: Path, *, where: str) -> str:
    """Return the text of a file; `where` is the flag or field in errors.

    Raises:
        UsageError: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8 text ({error.reason} at byte {error.start})"
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
    raise UsageError(ConfigError(where=where, value=str(path), rule=rule, fix="pass UTF-8 text"))


def pack(documents: Sequence[str], tokenizer: Any, seq_len: int) -> list[dict[str, Any]]:
    """Join the documents' tokens and split them into samples of ``seq_len`` tokens; the rest is dropped.

    Raises:
        UsageError: the text is shorter than one sample.
    """
    import torch

    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = [[*document, *end] for document in tokenizer(list(documents), add_special_tokens=False)["input_ids"]]
    blocks = list(joined_pieces(encoded, seq_len))
    if not blocks:
        rule = f"the text has {sum(map(len, encoded))} tokens, fewer than one sample"
        raise UsageError(ConfigError(where="--seq-len", value=seq_len, rule=rule, fix="lower it, or add more --text"))
    return [{"input_ids": block_T, "labels": block_T} for block_T in torch.tensor(blocks)]


def joined_pieces(documents: Iterable[list[int]], seq_len: int) -> Iterator[list[int]]:
    """Yield the joined tokens of documents in pieces of ``seq_len``; the rest is dropped."""
    waiting: list[int] = []
    for document in documents:
        waiting += document
        end = len(waiting) // seq_len * seq_len
        for start in range(0, end, seq_len):
            yield waiting[start : start + seq_len]
        waiting = waiting[end:]


PYTHON_HELP = "python-help"
"""Name of the dataset of Python's help topics, which every installation has."""
SUFFIXES = (".csv", ".json", ".jsonl", ".parquet", ".txt")

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Source of rows, written as `ID[:config][#N]`."""

    name: str
    """Hub id, path, or `python-help`."""
    config: str | None = None
    """Configuration of a Hub dataset; `None` for its only or default one."""
    limit: int | None = None
    """Number of rows to read; `None` for all."""

    @property
    def is_local(self) -> bool:
        """Whether nothing is downloaded."""
        return self.name == PYTHON_HELP or Path(self.name).exists()


def parse_source(text: str) -> Source:
    """Parse ``ID[:config][#N]``; an existing path is not split.

    >>> parse_source("Salesforce/wikitext:wikitext-2-raw-v1#500")
    Source(name='Salesforce/wikitext', config='wikitext-2-raw-v1', limit=500)

    Raises:
        UsageError: N is not a positive number, or the name is neither a path nor a Hub id.
    """
    if Path(text).exists():
        return Source(name=text)
    rest, mark, count = text.rpartition("#")
    limit = None
    if mark:
        if not count.isdecimal() or int(count) < 1:
            rule, fix = "the number of rows after # must be at least 1", "write for example imdb#2000"
            raise UsageError(ConfigError(where="dataset", value=text, rule=rule, fix=fix))
        text, limit = rest, int(count)
    if text == PYTHON_HELP or Path(text).exists():
        return Source(name=text, limit=limit)
    name, _, config = text.partition(":")
    if name.startswith((".", "/", "~")) or name.endswith(SUFFIXES) or name.count("/") > 1 or not name:
        near = near_path(text)
        fix = f"did you mean {near}?" if near else f"pass an existing path, a Hub id, or {PYTHON_HELP}"
        rule = "no such file or directory"
        raise UsageError(ConfigError(where="dataset", value=text, rule=rule, fix=fix))
    return Source(name=name, config=config or None, limit=limit)


def local_place(text: str | None) -> str | None:
    """Return the path that a dataset is read from; `None` if it is not an existing path.

    >>> local_place("imdb#2000")
    """
    if text is None:
        return None
    return next((name for name in (text, text.rpartition("#")[0]) if name and Path(name).exists()), None)


def read_rows(source: Source, *, split: str, revision: str | None) -> Iterator[Row]:
    """Yield the rows of a source up to its limit; with a limit, Hub rows are downloaded as they are needed.

    Raises:
        UsageError: the name, configuration or split does not exist, or a file cannot be read as rows.
        ShardwrightError: the Hub cannot be reached.
    """
    if revision is not None and source.is_local:
        raise UsageError(ConfigError(where="dataset_revision", value=revision, rule="only a Hub dataset has revisions"))
    if source.name == PYTHON_HELP:
        return islice(({"text": text} for text in read_documents(None)), source.limit)
    if not source.is_local:
        hub = enumerate(_hub_rows(source, split=split, revision=revision))
        return islice((with_image_parts(row, None, f"{source.name}[{index}]") for index, row in hub), source.limit)
    path = Path(source.name)
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            rule = f"has no file that ends in {', '.join(SUFFIXES)}"
            raise UsageError(ConfigError(where="dataset", value=str(path), rule=rule))
    elif path.suffix not in SUFFIXES:
        rule = f"a dataset file ends in {', '.join(SUFFIXES)}"
        raise UsageError(ConfigError(where="dataset", value=str(path), rule=rule))
    rows = (
        with_image_parts(row, file.parent, f"{file}[{index}]")
        for file in files
        for index, row in enumerate(_file_rows(file))
    )
    return islice(rows, source.limit)


def _file_rows(path: Path) -> Iterator[Row]:
    try:
        if path.suffix == ".txt":
            yield {"text": read_utf8(path, where="dataset")}
        elif path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as lines:
                table = csv.DictReader(lines, strict=True)
                try:
                    for row in table:
                        if None in row or None in row.values():
                            rule = f"must have {len(table.fieldnames or ())} values, like the first line"
                            raise UsageError(ConfigError(where=f"{path}:{table.line_num}", rule=rule))
                        yield row
                except csv.Error as error:
                    where, rule = f"{path}:{table.line_num}", f"is not valid CSV ({error})"
                    raise UsageError(ConfigError(where=where, rule=rule)) from None
        elif path.suffix == ".parquet":
            import pyarrow  # type: ignore[import-untyped]
            from pyarrow import parquet

            try:
                with parquet.ParquetFile(path) as file:
                    for batch in file.iter_batches(batch_size=1024):
                        yield from batch.to_pylist()
            except (pyarrow.ArrowException, OSError) as error:
                rule = f"is not readable Parquet ({' '.join(str(error).split())})"
                raise UsageError(ConfigError(where="dataset", value=str(path), rule=rule)) from None
        elif path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _row(_parsed(line, f"{path}:{number}"), f"{path}:{number}")
        else:
            data = _parsed(path.read_text(encoding="utf-8"), str(path))
            if not isinstance(data, list):
                rule, fix = "must be a list of objects", "or write one object per line into a .jsonl file"
                raise UsageError(ConfigError(where=str(path), rule=rule, fix=fix))
            for index, value in enumerate(data):
                yield _row(value, f"{path}[{index}]")
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8 text ({error.reason})"
        raise UsageError(ConfigError(where="dataset", value=str(path), rule=rule)) from None


def _parsed(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(ConfigError(where=where, rule=f"is not valid JSON ({error})")) from None


def _row(value: object, where: str) -> Row:
    if not isinstance(value, dict):
        raise UsageError(ConfigError(where=where, rule="must be an object with columns such as text or messages"))
    return value


def _hub_rows(source: Source, *, split: str, revision: str | None) -> Iterator[Row]:
    from datasets import load_dataset
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    streaming = source.limit is not None
    unreachable: tuple[type[Exception], ...] = (*hub_errors(), RuntimeError)
    try:
        yield from load_dataset(source.name, source.config, split=split, revision=revision, streaming=streaming)
        return
    except DatasetNotFoundError as error:
        rule = one_line(error)
        fix = f"check the id, log in for a gated dataset, or pass a file, a directory or {PYTHON_HELP}"
    except EmptyDatasetError:
        rule, fix = "has no data files on the Hub", f"pass another dataset, a file, a directory or {PYTHON_HELP}"
    except (ValueError, DatasetsError) as error:
        rule, fix = one_line(error), ""
        # datasets 5.2.0 reports 'Instruction "NAME" corresponds to no data!' for an empty split.
        if "corresponds to no data" in str(error):
            rule, fix = f"its split {split} has no rows", "pass another split, or a file"
    except unreachable as error:
        if "scripts are no longer supported" not in str(error):
            fix = "; HF_HUB_OFFLINE is set: unset it, or pass a file" if "OfflineMode" in str(error) else ""
            rule = f"the Hub cannot be reached ({one_line(error)})"
            if hub_status(error) is not None:
                rule = hub_failure(error)
            raise ShardwrightError(f"dataset {source.name}: {rule}{fix}") from None
        rule = "needs a script, which would run code of its repository"
        fix = "use the Parquet files of the Hub, if it has converted them: --dataset-revision refs/convert/parquet"
    raise UsageError(ConfigError(where="dataset", value=source.name, rule=rule, fix=fix))


def one_line(error: Exception) -> str:
    """Return the text of an error, or its type, as one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


Packing = Annotated[
    Literal["auto", "on", "off"],
    # YAML reads on and off as booleans.
    BeforeValidator(lambda value: ("on" if value else "off") if isinstance(value, bool) else value),
]
"""Whether several documents share a sample."""


class DataSettings(Settings):
    """Training and evaluation samples."""

    group = "Data"

    dataset: str = Field(
        "",
        description="ID[:config][#N] of the Hub, a .jsonl, .json, .csv, .parquet or .txt file, a directory of them, "
        "or python-help. Columns: text; messages or conversations; prompt and completion; or instruction and output",
    )
    text_column: str | None = Field(None, description="Column with plain text; default: text")
    chat_template: str | None = Field(
        None,
        description="Jinja file, or alpaca, chatml, llama3, zephyr; saved with the model. Default: the tokenizer's",
    )
    dataset_split: str = Field("train", description="Split of a Hub dataset")
    dataset_revision: str | None = Field(None, description="Branch, tag or commit of a Hub dataset")
    seq_len: int = Field(
        512, ge=2, description="Tokens per sample (2k = 2,048); lowered by default for models with fewer positions"
    )
    packing: Packing = Field(
        "auto", description="on: join short documents into one sample; auto: where layout and model allow it; off"
    )
    evaluation_fraction: float = Field(0.05, gt=0, lt=1, description="Share of the rows in the evaluation set")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of data order, evaluation rows and sampling")
