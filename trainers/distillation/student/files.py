"""The files of a teacher and of a student: tensors stream from one to the other, and a directory appears whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....ds_configs.specs.errors import Fault, RefusedInputError, ShardwrightError, UsageError
from ....plugins.huggingface_hub.hub import ModelSource
from ...formats.model_directory import COMPANIONS, INDEX, SINGLE, appearing_directory

if TYPE_CHECKING:
    import torch

_SHARD_BYTES = 5 * 10**9


def teacher_directory(source: ModelSource, where: str) -> Path:
    """Return a local directory with the teacher's weights; those of a Hub repository are fetched first.

    Raises:
        UsageError: a local `config.json` without weights.
        ShardwrightError: the Hub does not give the files.
    """
    local = Path(where).expanduser()
    if local.exists():
        if not local.is_dir():
            raise UsageError(Fault(where="teacher", value=where, rule="is a file", fix="name the model's directory"))
        return local
    from huggingface_hub import snapshot_download

    try:
        patterns = ["config.json", "*.safetensors", INDEX, *COMPANIONS]
        return Path(snapshot_download(where, revision=source.revision, allow_patterns=patterns))
    except Exception as error:
        # Whatever the connection, the cache or the disk raises.
        raise ShardwrightError(f"teacher = {where!r}: cannot be fetched ({type(error).__name__}: {error})") from None


class TeacherTensors:
    """The tensors of a safetensors checkpoint, read one at a time."""

    def __init__(self, directory: Path) -> None:
        self.files = _files_by_name(directory)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every name with its tensor on the CPU, file by file."""
        from safetensors import SafetensorError, safe_open

        for file in sorted(set(self.files.values())):
            try:
                with safe_open(file, framework="pt") as stored:
                    for name in sorted(stored.keys()):
                        yield name, stored.get_tensor(name)
            except SafetensorError as error:
                rule = f"is not a whole safetensors file ({error})"
                raise RefusedInputError(Fault(where=str(file), rule=rule, fix="download it again")) from None


def _files_by_name(directory: Path) -> dict[str, Path]:
    from safetensors import SafetensorError, safe_open

    index = directory / INDEX
    try:
        if index.is_file():
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        else:
            names = {SINGLE} if (directory / SINGLE).is_file() else set()
        files = [directory / name for name in names if Path(name).name == name]
        if not files:
            fix = "load it and save it again with save_pretrained, which writes safetensors"
            raise RefusedInputError(Fault(where=str(directory), rule="has no safetensors weights", fix=fix))
        found: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as stored:
                found |= dict.fromkeys(stored.keys(), file)
        return found
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ShardwrightError):
            raise
        raise RefusedInputError(Fault(where=str(directory), rule=f"has damaged weight files ({error})")) from None


@dataclass(kw_only=True)
class StudentWriter:
    """Collects the files of a student in a directory that nobody else sees yet."""

    directory: Path
    """Where the files are made."""
    pending: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of the shard that is being filled."""
    pending_bytes: int = 0
    """Their size."""
    written: list[list[str]] = field(default_factory=list)
    """Names in each finished shard."""
    total_bytes: int = 0
    """Size of all tensors so far."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor; a full shard goes to disk."""
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > _SHARD_BYTES:
            self._flush()
        # Slices of one tensor, and tied ones, may share memory, which the format refuses.
        self.pending[name] = tensor.contiguous().clone()
        self.pending_bytes += size
        self.total_bytes += size

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self.pending, self.directory / f"shard-{len(self.written)}", metadata={"format": "pt"})
        self.written.append(list(self.pending))
        self.pending, self.pending_bytes = {}, 0

    def finish(self) -> None:
        """Write the last shard and give all of them the names that Transformers reads."""
        self._flush()
        count = len(self.written)
        if count == 1:
            (self.directory / "shard-0").rename(self.directory / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self.written):
            file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            (self.directory / f"shard-{index}").rename(self.directory / file)
            weight_map |= dict.fromkeys(names, file)
        self.write_json(INDEX, {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map})

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a JSON file."""
        (self.directory / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def student_writer(output: Path) -> Iterator[StudentWriter]:
    """Yield a writer whose files appear in `output` together at the end, or not at all."""
    with appearing_directory(output) as directory:
        yield StudentWriter(directory=directory)
