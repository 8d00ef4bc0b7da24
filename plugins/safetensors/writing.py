"""Safetensors files and whole checkpoints that appear complete or not at all.

A model directory is made beside its place under another name and moved there when all of it is on the disk. Where a
model lies already, the one file by which its weights are found goes first and that of the new one comes last: whenever
the move is interrupted, the directory cannot be loaded as a mixture of old and new weights.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.output import STAGING
from ...ds_configs.plan.write import flush, replacing, write_files
from ...ds_configs.specs.errors import ShardwrightError
from .reading import INDEX, SINGLE, read_header, read_index

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 5 * 10**9
"""Tensors of one file together, unless a single one is larger."""


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a file that is whole or not there.

    Args:
        tensors: On any device; those that share memory, which the format refuses, are copied.
        path: Of the file, which is replaced.
        metadata: Added to the header.

    Raises:
        OSError: the system refuses to write.
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
    """Write tensors in files of at most `shard_bytes`, with an index if there is more than one.

    Raises:
        OSError: the system refuses to write.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    pattern = f"{stem}{{suffix}}.safetensors"
    split = split_torch_state_dict_into_shards(dict(tensors), filename_pattern=pattern, max_shard_size=shard_bytes)
    for file, names in split.filename_to_tensors.items():
        save_tensors({name: tensors[name] for name in names}, directory / file)
    if split.is_sharded:
        write_index(directory, split.tensor_to_filename, split.metadata, stem=stem)


def name_shards(files: Sequence[Path]) -> None:
    """Give files of one directory the names that Transformers reads, in their order, and write the index of several."""
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
    """Rename tensors of a checkpoint in its headers and index, without reading one; return how many changed."""
    changed = 0
    for file in sorted(directory.glob("*.safetensors")):
        header = read_header(file)
        names = {name: renamed(name) for name in header.tensors}
        if count := sum(name != new for name, new in names.items()):
            changed += count
            _write_header(file, names)
    if changed and (directory / INDEX).is_file():
        stated = json.loads((directory / INDEX).read_bytes())
        weight_map = {renamed(name): file for name, file in read_index(directory / INDEX).items()}
        write_index(directory, weight_map, stated.get("metadata") or {})
    return changed


def _write_header(file: Path, names: Mapping[str, str]) -> None:
    """Put a header with other names before the same data."""
    header = read_header(file)
    stated: dict[str, Any] = {"__metadata__": header.metadata} if header.metadata else {}
    for name, tensor in header.tensors.items():
        first = tensor.first_byte - header.data_begin
        offsets = [first, first + tensor.bits // 8]
        stated[names[name]] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(stated, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(file) as temporary, file.open("rb") as source, temporary.open("wb") as target:
        source.seek(header.data_begin)
        target.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(source, target, 1 << 22)


@contextmanager
def named_write_errors(place: Path) -> Iterator[None]:
    """Let what safetensors 0.8.0 cannot write, for which it has an exception of its own, be one line with the place.

    Raises:
        ShardwrightError: in place of `SafetensorError`.
    """
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise ShardwrightError(f"{place}: cannot be written ({error})") from None


@contextmanager
def appearing_directory(output: Path) -> Iterator[Path]:
    """Yield an empty directory whose files appear in `output` together at the end, or not at all.

    It lies beside `output`, or inside of one that is there already, which may be a mount that no file can be renamed
    into. Of a model that lies there, weight files that the new one does not replace are removed.
    """
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    place = output if output.is_dir() else output.parent
    temporary = Path(tempfile.mkdtemp(dir=place, prefix=f".{output.name}{STAGING}"))
    try:
        with named_write_errors(output):
            yield temporary
        publish(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, output: Path) -> None:
    """Move a finished model directory to its place, or its files into a directory that is there already."""
    for path in temporary.rglob("*"):
        flush(path)
    if not output.is_dir():
        temporary.chmod(0o755)
        temporary.replace(output)
        flush(output.parent)
        return
    found_by = INDEX if (temporary / INDEX).exists() else SINGLE
    for name in (INDEX, SINGLE):
        (output / name).unlink(missing_ok=True)
    flush(output)
    for stale in output.glob("model*.safetensors"):
        stale.unlink()
    for path in sorted(temporary.iterdir(), key=lambda path: path.name == found_by):
        if path.name == found_by:
            flush(output)
        if path.is_dir():
            shutil.rmtree(output / path.name, ignore_errors=True)
        path.replace(output / path.name)
    flush(output)
