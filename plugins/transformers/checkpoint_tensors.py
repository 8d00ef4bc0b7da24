"""Single tensors of a Hugging Face checkpoint, from only those of its files that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...ds_configs.specs.errors import Fault, UsageError
from ..safetensors.reading import INDEX, SINGLE, opened, read_header, read_index

if TYPE_CHECKING:
    from torch import Tensor


class CheckpointTensors:
    """Tensors of a checkpoint by name; files are opened, or downloaded, when something of theirs is read."""

    def __init__(self, source: str, *, revision: str | None = None) -> None:
        """Find out which file holds what.

        Args:
            source: Directory or Hub id.
            revision: Revision of a Hub id.

        Raises:
            UsageError: There are no safetensors.
            RefusedInputError: The index or the file is corrupt, or names files elsewhere.
        """
        from transformers.utils.hub import extract_commit_hash

        self._source, self._revision = source, revision
        self._paths: dict[str, str] = {}
        index, single = self._file(INDEX), None
        if index is not None:
            self._files = read_index(Path(index))
        elif (single := self._file(SINGLE)) is not None:
            self._files = dict.fromkeys(read_header(Path(single)).tensors, SINGLE)
        else:
            rule, fix = f"holds neither {SINGLE} nor {INDEX}", "name a checkpoint with safetensors"
            raise UsageError(Fault(where="model", value=source, rule=rule, fix=fix))
        # A branch may move on while files are still read: all are taken from the commit of the first.
        self._revision = extract_commit_hash(index or single, None) or revision

    def _file(self, name: str) -> str | None:
        if name in self._paths:
            return self._paths[name]
        from transformers.utils import cached_file

        found: str | None = cached_file(
            self._source,
            name,
            revision=self._revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=True,
        )
        if found is not None:
            self._paths[name] = found
        return found

    def read(self, name: str, *, shape: Sequence[int]) -> Tensor:
        """Return a tensor; the checkpoint of a base model lacks the first part of every name.

        Args:
            name: Name in the state dict of the model with its head.
            shape: Shape that it must have.

        Raises:
            UsageError: The checkpoint lacks it, or has it in another shape.
            RefusedInputError: Its file is corrupt.
        """
        stored = next((each for each in (name, name.partition(".")[2]) if each in self._files), None)
        if stored is None:
            raise UsageError(Fault(where=self._source, value=name, rule="the checkpoint lacks this tensor"))
        path = self._file(self._files[stored])
        if path is None:
            raise UsageError(Fault(where=self._source, value=self._files[stored], rule="this file is missing"))
        with opened(Path(path)) as file:
            found: Tensor = file.get_tensor(stored)
        if tuple(found.shape) != tuple(shape):
            rule = f"has shape {tuple(found.shape)}, the config needs {tuple(shape)}"
            raise UsageError(Fault(where=self._source, value=name, rule=rule))
        return found
