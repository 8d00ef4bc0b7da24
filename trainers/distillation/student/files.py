"""The files of a teacher and of a student: tensors stream from one to the other, and a directory appears whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....ds_configs.plan.write import write_files
from ....ds_configs.specs.errors import Fault, UsageError
from ....plugins.huggingface_hub.hub import ModelSource
from ....plugins.huggingface_hub.model_directory import model_directory
from ....plugins.safetensors.writing import SHARD_BYTES, appearing_directory, name_shards, save_tensors

if TYPE_CHECKING:
    import torch


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
    return model_directory(where, revision=source.revision)


@dataclass(kw_only=True)
class StudentWriter:
    """Collects the files of a student in a directory that nobody else sees yet."""

    directory: Path
    """Where the files are made."""
    pending: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of the shard that is being filled."""
    pending_bytes: int = 0
    """Their size."""
    written: list[Path] = field(default_factory=list)
    """Every finished shard."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor; a full shard goes to disk."""
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > SHARD_BYTES:
            self._flush()
        # A slice would keep the whole tensor in memory.
        self.pending[name] = tensor.contiguous().clone()
        self.pending_bytes += size

    def _flush(self) -> None:
        self.written.append(self.directory / f"shard-{len(self.written)}")
        save_tensors(self.pending, self.written[-1])
        self.pending, self.pending_bytes = {}, 0

    def finish(self) -> None:
        """Write the last shard and give all of them the names that Transformers reads."""
        self._flush()
        name_shards(self.written)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a JSON file."""
        write_files({name: json.dumps(value, indent=2) + "\n"}, self.directory, force=True)


@contextmanager
def student_writer(output: Path) -> Iterator[StudentWriter]:
    """Yield a writer whose files appear in `output` together at the end, or not at all."""
    with appearing_directory(output) as directory:
        yield StudentWriter(directory=directory)
