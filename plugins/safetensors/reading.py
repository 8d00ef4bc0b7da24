"""Strict reading of safetensors files and shard indexes.

safetensors' own reader checks the header of a file: its length, every value, and that tensors fill the file without gap
or overlap (https://github.com/huggingface/safetensors#format). It needs no torch for that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""File by which a Transformers checkpoint is found: the index of its shards, or its only file."""
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of one element."""
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""Exceptions of reading JSON with an unexpected structure."""
_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor as the header of its file describes it."""

    dtype: str
    """Name in safetensors, such as `BF16`."""
    shape: tuple[int, ...]
    """Stored elements in each dimension."""
    file: Path = Path()
    """File that contains it."""

    @property
    def elements(self) -> int:
        """Stored elements."""
        return math.prod(self.shape)

    @property
    def bits(self) -> int:
        """Stored bits."""
        return self.elements * _BITS[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Header of a file."""

    tensors: dict[str, StoredTensor]
    """Every tensor by its name, in the order of the header."""
    metadata: dict[str, str]
    """Metadata that its writer added."""


@contextmanager
def opened(file: Path, *, framework: Literal["pt", "np"] = "pt") -> Iterator[Any]:
    """Check a file and yield safetensors' own reader of its tensors on the CPU.

    Raises:
        RefusedInputError: the file is missing or damaged; also inside the block.
        UsageError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    fix = "download it again"
    try:
        try:
            reader = safe_open(file, framework=framework)
        except FileNotFoundError:
            raise RefusedInputError(ConfigError(where=str(file), rule="is missing", fix=fix)) from None
        except OSError as error:
            raise UsageError(ConfigError(where=str(file), rule=f"cannot be read ({error})")) from None
        with reader as stored:
            yield stored
    except SafetensorError as error:
        rule = f"is not a complete safetensors file ({error})"
        raise RefusedInputError(ConfigError(where=str(file), rule=rule, fix=fix)) from None


def read_header(file: Path) -> Header:
    """Return the header of a file; raises the errors of `opened`."""
    with opened(file, framework="np") as stored:
        slices = {name: stored.get_slice(name) for name in stored.offset_keys()}
        tensors = {
            name: StoredTensor(dtype=part.get_dtype(), shape=tuple(part.get_shape()), file=file)
            for name, part in slices.items()
        }
        return Header(tensors=tensors, metadata=stored.metadata() or {})


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return values


def read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor in an index, without a check that the files exist.

    Raises:
        RefusedInputError: it is not an index, or names files of other directories.
        UsageError: the file cannot be read.
    """
    try:
        weight_map: dict[str, str] = json.loads(index.read_bytes(), object_pairs_hook=_without_duplicates)["weight_map"]
        names = sorted(set(weight_map.values()))
    except OSError as error:
        raise UsageError(ConfigError(where=str(index), rule=f"cannot be read ({error.strerror})")) from None
    except _DAMAGED as error:
        raise RefusedInputError(ConfigError(where=str(index), rule=f"is not a safetensors index ({error!r})")) from None
    check_names(str(index), names)
    return weight_map


def check_names(where: str, names: Iterable[object]) -> None:
    """Check that names of shards are plain file names.

    Raises:
        RefusedInputError: a name leads out of the directory.
    """
    plain = [name for name in names if isinstance(name, str) and name not in ("", "..") and Path(name).name == name]
    _raise_errors([_name_error(where, name) for name in names if name not in plain])


def _name_error(where: str, name: object) -> ConfigError:
    rule = "must name a file of the same directory"
    return ConfigError(where=where, value=name, rule=rule, fix="download it again")


def _raise_errors(errors: list[ConfigError]) -> None:
    if errors:
        raise RefusedInputError(errors[:_SHOWN])


def checkpoint_files(directory: Path, *, index: str = INDEX, single: str = SINGLE) -> list[Path]:
    """Return the weight files of a checkpoint; empty if there is neither an index nor a single file.

    Raises:
        RefusedInputError: the index is invalid, or names files that are missing or in other directories.
        UsageError: the index cannot be read.
    """
    if not (directory / index).is_file():
        return [directory / single] if (directory / single).is_file() else []
    names = sorted(set(read_index(directory / index).values()))
    _raise_errors([_name_error(str(directory / index), name) for name in names if not (directory / name).is_file()])
    return [directory / name for name in names]


def read_checkpoint(directory: Path, *, index: str = INDEX, single: str = SINGLE) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint from its headers; shards must contain the tensors that the index lists.

    Raises:
        RefusedInputError: there are no weights, files are damaged, missing or in other directories, or a tensor is
            stored twice or in another file than the index lists.
        UsageError: a file cannot be read.
    """
    files = checkpoint_files(directory, index=index, single=single)
    if not files:
        fix = "load it and save it again with save_pretrained, which writes safetensors"
        raise RefusedInputError(ConfigError(where=str(directory), rule="has no safetensors weights", fix=fix))
    tensors = read_headers(files)
    if (directory / index).is_file():
        listed, where = read_index(directory / index), str(directory / index)
        errors = [
            ConfigError(
                where=where, value=name, rule=f"is listed in {file}, but is missing there", fix="download it again"
            )
            for name, file in listed.items()
            if name not in tensors or tensors[name].file.name != file
        ]
        errors += [
            ConfigError(where=where, value=name, rule=f"is in {tensors[name].file.name}, but is not listed")
            for name in tensors
            if name not in listed
        ]
        _raise_errors(errors)
    return tensors


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return every tensor of several files.

    Raises:
        RefusedInputError: a file is damaged or missing, or two contain a tensor of the same name.
        UsageError: a file cannot be read.
    """
    tensors: dict[str, StoredTensor] = {}
    errors = []
    for file in files:
        header = read_header(file)
        errors += [
            ConfigError(
                where=str(file), value=name, rule=f"is also stored in {tensors[name].file.name}", fix="remove one"
            )
            for name in header.tensors.keys() & tensors.keys()
        ]
        tensors |= header.tensors
    _raise_errors(errors)
    return tensors


def load_tensors(*files: Path) -> dict[str, Tensor]:
    """Return all tensors of files on the CPU.

    Raises:
        RefusedInputError: a file is missing or damaged, or two contain a tensor of the same name.
        UsageError: a file cannot be read.
    """
    return dict(each_tensor(read_headers(files)))


def each_tensor(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors on the CPU one at a time, file by file.

    Args:
        tensors: Result of `read_checkpoint` or `read_headers`, or a part of it.
    """
    for file in sorted({tensor.file for tensor in tensors.values()}):
        with opened(file) as stored:
            for name in sorted(name for name, tensor in tensors.items() if tensor.file == file):
                yield name, stored.get_tensor(name)
