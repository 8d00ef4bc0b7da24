"""Finished matrices of an interrupted run of SpQR or low-rank correction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ...plugins.safetensors.reading import load_tensors
from ..formats.spqr_format import SmallMatrix, matrix_settings, read_matrix

_SETTINGS = "matrix_settings"


class MatrixJournal:
    """Keeps the matrices of each part of a model; one without a directory keeps nothing."""

    def __init__(self, directory: Path | None, identity: Mapping[str, str]) -> None:
        """Open a journal and read what it has.

        Raises:
            UsageError: it is another run's.
        """
        from ...plugins.llm_compressor.journal import Journal

        self._journal = None if directory is None else Journal(directory, identity)
        self._pending: dict[str, SmallMatrix] = {}
        self.restored: dict[str, SmallMatrix] = {}
        self.parts = 0
        if self._journal is None:
            return
        for entry in self._journal.entries:
            tensors = load_tensors(self._journal.directory / entry.file)
            stated = json.loads(bytes(tensors.pop(_SETTINGS).tolist()))
            for name, settings in stated.items():
                self.restored[name] = read_matrix(name, settings, tensors, where=entry.file)
            self.parts += 1

    def add(self, name: str, matrix: SmallMatrix) -> None:
        """Take a matrix of the part at hand."""
        self._pending[name] = matrix

    def finish_part(self, part: int) -> None:
        """Write the matrices of a part."""
        import torch

        if self._journal is not None:
            stated = json.dumps({name: matrix_settings(matrix) for name, matrix in self._pending.items()})
            tensors = {
                f"{layer}.{name}": tensor
                for layer, matrix in self._pending.items()
                for name, tensor in matrix.tensors().items()
            }
            tensors[_SETTINGS] = torch.tensor(list(stated.encode()), dtype=torch.uint8)
            self._journal.record(phase=0, part=part, tensors=tensors)
        self._pending = {}
