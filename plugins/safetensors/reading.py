"""Safetensors files and indexes of shards, read strictly: nothing that a header or an index says is believed unchecked.

A file is eight bytes with the header's length, a JSON header, and the data of all tensors without gap or overlap
(https://github.com/huggingface/safetensors#format). Headers are read here without a tensor library, so that planning
needs none; data is read by safetensors' own reader after its header was found sound.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, RefusedInputError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""What the weights of a Transformers checkpoint are found by: the index of its shards, or the only file."""
_LARGEST_HEADER_BYTES = 100_000_000
"""Limit of safetensors itself (0.8.0, `MAX_HEADER_SIZE`)."""
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of one element."""
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What reading JSON raises that is not as it should be."""
_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor as the header of its file describes it."""

    dtype: str
    """Such as `BF16`, in the words of safetensors."""
    shape: tuple[int, ...]
    """Stored elements in each dimension."""
    file: Path = Path()
    """Where it lies."""
    first_byte: int = 0
    """Where its data begins in the file."""

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
    """All that a file says of itself."""

    tensors: dict[str, StoredTensor]
    """Every tensor by its name, in the order of the header."""
    metadata: dict[str, str]
    """What its writer added."""
    data_begin: int
    """Where the data of all tensors begins in the file."""


def read_header(file: Path) -> Header:
    """Return the header of a file that is sound: as long as it says, every tensor inside, none over another.

    Raises:
        RefusedInputError: the file is missing, cut off, or no safetensors file.
        UsageError: the system does not let it be read.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_LARGEST_HEADER_BYTES, size - 8):
                raise ValueError(f"header of {length} bytes in a file of {size}")
            stated = json.loads(stream.read(length), object_pairs_hook=_without_duplicates)
        metadata = stated.pop("__metadata__", None)
        metadata = {} if metadata is None else metadata
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("its metadata is no text")
        tensors = {name: _stored(name, entry, file, 8 + length) for name, entry in stated.items()}
        _check_data(tensors, 8 + length, size)
    except FileNotFoundError:
        raise RefusedInputError(Fault(where=str(file), rule="is missing", fix="download it again")) from None
    except OSError as error:
        raise UsageError(Fault(where=str(file), rule=f"cannot be read ({error.strerror})")) from None
    except _DAMAGED as error:
        rule = f"is not a whole safetensors file ({error})"
        raise RefusedInputError(Fault(where=str(file), rule=rule, fix="download it again")) from None
    return Header(tensors=tensors, metadata=metadata, data_begin=8 + length)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


def _stored(name: str, entry: Any, file: Path, data: int) -> StoredTensor:
    first, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (*shape, first, end)):
        raise ValueError(f"{name!r} has shape {list(shape)} at bytes {first} to {end}")
    tensor = StoredTensor(dtype=entry["dtype"], shape=shape, file=file, first_byte=data + first)
    if tensor.dtype not in _BITS:
        raise ValueError(f"{name!r} is of a type {tensor.dtype!r} that the format does not have")
    if tensor.bits != 8 * (end - first):
        raise ValueError(f"{name!r}, {tensor.dtype} {list(shape)}, cannot lie at bytes {first} to {end}")
    return tensor


def _check_data(tensors: Mapping[str, StoredTensor], data: int, size: int) -> None:
    """Refuse data with gaps or overlaps, as safetensors does, and a file of another length."""
    end = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].first_byte, item[1].bits)):
        if tensor.first_byte != end:
            raise ValueError(f"{name!r} begins at byte {tensor.first_byte}, not {end}")
        end += tensor.bits // 8
    if end != size:
        raise ValueError(f"header promises {end} bytes, the file has {size}")


def read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor as an index lists it; whether the files are there is not checked.

    Raises:
        RefusedInputError: it is no index, or names something that lies elsewhere.
        UsageError: the system does not let it be read.
    """
    try:
        found: dict[str, str] = json.loads(index.read_bytes(), object_pairs_hook=_without_duplicates)["weight_map"]
        names = sorted(set(found.values()))
    except OSError as error:
        raise UsageError(Fault(where=str(index), rule=f"cannot be read ({error.strerror})")) from None
    except _DAMAGED as error:
        raise RefusedInputError(Fault(where=str(index), rule=f"is not a safetensors index ({error!r})")) from None
    check_names(str(index), names)
    return found


def check_names(where: str, names: Iterable[object]) -> None:
    """Refuse names of shards that are no plain file names.

    Raises:
        RefusedInputError: one leads out of the directory.
    """
    plain = [name for name in names if isinstance(name, str) and name not in ("", "..") and Path(name).name == name]
    _refuse([_elsewhere(where, name) for name in names if name not in plain])


def _elsewhere(where: str, name: object) -> Fault:
    rule = "must name a file of the same directory"
    return Fault(where=where, value=name, rule=rule, fix="download it again")


def _refuse(faults: list[Fault]) -> None:
    if faults:
        raise RefusedInputError(faults[:_SHOWN])


def checkpoint_files(directory: Path, *, index: str = INDEX, single: str = SINGLE) -> list[Path]:
    """Return the weight files of a checkpoint; none where there is neither an index nor the only file.

    Raises:
        RefusedInputError: the index is none, or names what is not there or lies elsewhere.
        UsageError: the system does not let the index be read.
    """
    if not (directory / index).is_file():
        return [directory / single] if (directory / single).is_file() else []
    names = sorted(set(read_index(directory / index).values()))
    _refuse([_elsewhere(str(directory / index), name) for name in names if not (directory / name).is_file()])
    return [directory / name for name in names]


def read_checkpoint(directory: Path, *, index: str = INDEX, single: str = SINGLE) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint from its headers; index and shards must agree on which file has which.

    Raises:
        RefusedInputError: there are no weights, files are damaged, missing or elsewhere, or a tensor is stored twice or
            not where the index says.
        UsageError: the system does not let a file be read.
    """
    files = checkpoint_files(directory, index=index, single=single)
    if not files:
        fix = "load it and save it again with save_pretrained, which writes safetensors"
        raise RefusedInputError(Fault(where=str(directory), rule="has no safetensors weights", fix=fix))
    found = read_headers(files)
    if (directory / index).is_file():
        listed, where = read_index(directory / index), str(directory / index)
        faults = [
            Fault(where=where, value=name, rule=f"is listed in {file}, which lacks it", fix="download it again")
            for name, file in listed.items()
            if name not in found or found[name].file.name != file
        ]
        faults += [
            Fault(where=where, value=name, rule=f"is in {found[name].file.name}, and not listed")
            for name in found
            if name not in listed
        ]
        _refuse(faults)
    return found


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return every tensor of several files.

    Raises:
        RefusedInputError: a file is damaged or missing, or two hold a tensor of one name.
        UsageError: the system does not let a file be read.
    """
    found: dict[str, StoredTensor] = {}
    faults = []
    for file in files:
        header = read_header(file)
        faults += [
            Fault(where=str(file), value=name, rule=f"is stored in {found[name].file.name} too", fix="remove one")
            for name in header.tensors.keys() & found.keys()
        ]
        found |= header.tensors
    _refuse(faults)
    return found


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a file whose header is sound; yields safetensors' own reader of PyTorch tensors on the CPU.

    Raises:
        RefusedInputError: the file is missing or damaged; also when that is found out later.
        UsageError: the system does not let it be read.
    """
    from safetensors import SafetensorError, safe_open

    read_header(file)
    try:
        with safe_open(file, framework="pt") as stored:
            yield stored
    except SafetensorError as error:
        rule = f"is not a whole safetensors file ({error})"
        raise RefusedInputError(Fault(where=str(file), rule=rule, fix="download it again")) from None


def load_tensors(*files: Path) -> dict[str, Tensor]:
    """Return all tensors of files on the CPU.

    Raises:
        RefusedInputError: a file is missing or damaged, or two hold a tensor of one name.
        UsageError: the system does not let a file be read.
    """
    return dict(each_tensor(read_headers(files)))


def each_tensor(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors on the CPU one at a time, file by file.

    Args:
        tensors: What `read_checkpoint` or `read_headers` returned, or a part of it.
    """
    for file in sorted({tensor.file for tensor in tensors.values()}):
        with opened(file) as stored:
            for name in sorted(name for name, tensor in tensors.items() if tensor.file == file):
                yield name, stored.get_tensor(name)
