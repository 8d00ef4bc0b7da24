"""Strict reading and atomic writing of safetensors files, shard indexes and checkpoints.

safetensors' own reader checks the header of a file: its length, every value, and that tensors fill the file without gap
or overlap (https://github.com/huggingface/safetensors#format). It needs no torch for that. Readers raise
`RefusedInputError` for files that are missing, damaged, unsafe or contain a tensor twice, and `UsageError` for files
that cannot be read.

A model directory is written under a temporary name and renamed when all of it is on the disk. If the directory already
contains a model, the file by which its weights are found is deleted first, and the new one is moved last: after an
interruption the directory cannot be loaded as a mixture of old and new weights.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..ds_configs.plan.output import STAGING, flush, replacing, write_files
from ..ds_configs.specs.errors import ConfigError, RefusedInputError, ShardwrightError, UsageError

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
        return math.prod(self.shape)

    @property
    def bits(self) -> int:
        return self.elements * _BITS[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
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
    """Return the file of each tensor in an index, without a check that the files exist."""
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
    """Check that names of shards are plain file names."""
    plain = [name for name in names if isinstance(name, str) and name not in ("", "..") and Path(name).name == name]
    _raise_errors([_name_error(where, name) for name in names if name not in plain])


def _name_error(where: str, name: object) -> ConfigError:
    rule = "must name a file of the same directory"
    return ConfigError(where=where, value=name, rule=rule, fix="download it again")


def _raise_errors(errors: list[ConfigError]) -> None:
    if errors:
        raise RefusedInputError(errors[:_SHOWN])


def checkpoint_files(directory: Path, *, index: str = INDEX, single: str = SINGLE) -> list[Path]:
    """Return the weight files of a checkpoint; empty if there is neither an index nor a single file."""
    if not (directory / index).is_file():
        return [directory / single] if (directory / single).is_file() else []
    names = sorted(set(read_index(directory / index).values()))
    _raise_errors([_name_error(str(directory / index), name) for name in names if not (directory / name).is_file()])
    return [directory / name for name in names]


def read_checkpoint(directory: Path, *, index: str = INDEX, single: str = SINGLE) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint from its headers; each must be once in the file that the index lists.

    A directory without weights is rejected too.
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
    """Return every tensor of several files."""
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
    """Return all tensors of files on the CPU."""
    return dict(each_tensor(read_headers(files)))


def each_tensor(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of `read_checkpoint` or `read_headers` on the CPU one at a time, file by file."""
    for file in sorted({tensor.file for tensor in tensors.values()}):
        with opened(file) as stored:
            for name in sorted(name for name, tensor in tensors.items() if tensor.file == file):
                yield name, stored.get_tensor(name)


SHARD_BYTES = 5 * 10**9
"""Maximum bytes of tensors per file, unless a single tensor is larger."""


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a file atomically, with `metadata` in its header.

    Tensors that share memory are copied, because the format does not support them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    own: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        shared = storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen
        seen.add(storage.data_ptr())
        own[name] = tensor.clone() if shared else tensor
    with replacing(path) as temporary:
        try:
            save_file(own, temporary, metadata={"format": "pt", **(metadata or {})})
        except SafetensorError as error:
            raise OSError(f"{path}: cannot be written ({error})") from None


def save_checkpoint(
    tensors: Mapping[str, Tensor], directory: Path, *, stem: str = "model", shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors in files of at most `shard_bytes`, with an index if there is more than one."""
    from huggingface_hub import split_torch_state_dict_into_shards

    pattern = f"{stem}{{suffix}}.safetensors"
    split = split_torch_state_dict_into_shards(dict(tensors), filename_pattern=pattern, max_shard_size=shard_bytes)
    for file, names in split.filename_to_tensors.items():
        save_tensors({name: tensors[name] for name in names}, directory / file)
    if split.is_sharded:
        write_index(directory, split.tensor_to_filename, split.metadata, stem=stem)


def name_shards(files: Sequence[Path]) -> None:
    """Rename files of a directory, in order, to the names that Transformers reads, and write an index for several."""
    directory = files[0].parent
    if len(files) == 1:
        files[0].rename(directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    parameters = size = 0
    for number, path in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = read_header(path).tensors
        weight_map |= dict.fromkeys(tensors, name)
        parameters += sum(tensor.elements for tensor in tensors.values())
        size += sum(tensor.bits for tensor in tensors.values()) // 8
        path.rename(directory / name)
    write_index(directory, weight_map, {"total_parameters": parameters, "total_size": size})


def write_index(
    directory: Path, weight_map: Mapping[str, str], metadata: Mapping[str, Any], *, stem: str = "model"
) -> None:
    """Write the index of a checkpoint's shards."""
    index = {"metadata": dict(metadata), "weight_map": dict(weight_map)}
    write_files({f"{stem}.safetensors.index.json": json.dumps(index, indent=2) + "\n"}, directory, force=True)


def rename_tensors(directory: Path, renamed: Callable[[str], str]) -> int:
    """Rename tensors of a checkpoint in its headers and index, without reading tensors; return how many changed."""
    changed = 0
    for file in sorted(directory.glob("*.safetensors")):
        names = {name: renamed(name) for name in read_header(file).tensors}
        if count := sum(name != new for name, new in names.items()):
            changed += count
            with file.open("rb") as source, replacing(file) as temporary, temporary.open("wb") as target:
                entries = json.loads(source.read(int.from_bytes(source.read(8), "little")))
                entries = {names.get(name, name): entry for name, entry in entries.items()}
                text = json.dumps(entries, separators=(",", ":")).encode()
                text += b" " * (-len(text) % 8)
                target.write(len(text).to_bytes(8, "little") + text)
                shutil.copyfileobj(source, target, 1 << 22)
    if changed and (directory / INDEX).is_file():
        stated = json.loads((directory / INDEX).read_bytes())
        weight_map = {renamed(name): file for name, file in read_index(directory / INDEX).items()}
        write_index(directory, weight_map, stated.get("metadata") or {})
    return changed


@contextmanager
def named_write_errors(path: Path) -> Iterator[None]:
    """Convert safetensors' own write errors to a `ShardwrightError` of one line that names the path."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise ShardwrightError(f"{path}: cannot be written ({error})") from None


@contextmanager
def appearing_directory(output: Path) -> Iterator[Path]:
    """Yield an empty directory whose files appear in `output` together at the end, or not at all.

    The directory is next to `output`, or inside an existing `output`, which may be a mount that files cannot be renamed
    into. Existing weight files that the new model does not replace are removed.
    """
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    parent = output if output.is_dir() else output.parent
    temporary = Path(tempfile.mkdtemp(dir=parent, prefix=f".{output.name}{STAGING}"))
    try:
        with named_write_errors(output):
            yield temporary
        publish(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, output: Path) -> None:
    """Rename a finished model directory to `output`, or move its files into an existing `output`."""
    for path in temporary.rglob("*"):
        flush(path)
    if not output.is_dir():
        temporary.chmod(0o755)
        temporary.replace(output)
        flush(output.parent)
        return
    entry = INDEX if (temporary / INDEX).exists() else SINGLE
    for name in (INDEX, SINGLE):
        (output / name).unlink(missing_ok=True)
    flush(output)
    for stale in output.glob("model*.safetensors"):
        stale.unlink()
    for path in sorted(temporary.iterdir(), key=lambda path: path.name == entry):
        if path.name == entry:
            flush(output)
        if path.is_dir():
            shutil.rmtree(output / path.name, ignore_errors=True)
        path.replace(output / path.name)
    flush(output)
