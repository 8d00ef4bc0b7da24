"""Journal of an interrupted quantization: beside the output, so that one disk holds both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from ...ds_configs.specs.errors import Fault
from ...plugins.safetensors.reading import load_tensors
from ..formats.spqr_format import SmallMatrix, matrix_settings, read_matrix

_SETTINGS = "matrix_settings"
_SUFFIX = ".journal"


def journal_directory(output_dir: Path) -> Path:
    """Return the directory of the journal that belongs to an output directory."""
    place = output_dir.resolve()
    return place.with_name(place.name + _SUFFIX)


def journal_faults(output_dir: Path, *, resume: bool, force: bool) -> list[Fault]:
    """Return what stands between a new run and the journal of an older one."""
    journal = journal_directory(output_dir)
    if resume and not journal.is_dir():
        rule = f"there is no journal at {journal} to go on from"
        return [Fault(where="--resume", rule=rule, fix="drop --resume to start")]
    if journal.is_dir() and not resume and not force:
        rule = "holds the finished layers of an interrupted run"
        fix = "use --resume to go on from there, or --force to start from the beginning"
        return [Fault(where=str(journal), rule=rule, fix=fix)]
    return []


def discard_journal(output_dir: Path) -> None:
    """Remove the journal of a run that is done or is started anew."""
    shutil.rmtree(journal_directory(output_dir), ignore_errors=True)


class MatrixJournal:
    """Finished matrices of SpQR and low-rank correction, part by part; without a directory nothing is kept."""

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
