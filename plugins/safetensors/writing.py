"""Atomic writing of safetensors files and checkpoints.

A model directory is written under a temporary name and renamed when all of it is on the disk. If the directory already
contains a model, the file by which its weights are found is deleted first, and the new one is moved last: after an
interruption the directory cannot be loaded as a mixture of old and new weights.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.output import STAGING, flush, replacing, write_files
from ...ds_configs.specs.errors import ShardwrightError
from .reading import INDEX, SINGLE, read_header, read_index

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 5 * 10**9
"""Maximum bytes of tensors per file, unless a single tensor is larger."""


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a file atomically.

    Args:
        tensors: Tensors on any device; tensors that share memory are copied, because the format does not support them.
        path: The file, which is replaced.
        metadata: Added to the header.

    Raises:
        OSError: the file cannot be written.
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
        OSError: a file cannot be written.
    """
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
    """Convert safetensors' own write errors to one line that names the path.

    Raises:
        ShardwrightError: instead of `SafetensorError`.
    """
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
