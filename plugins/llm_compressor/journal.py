"""Journal of a quantization run: finished layers on disk, so that an interrupted run can resume.

`journal.json` identifies the run and lists one safetensors file for each finished part, in order; a part is listed
only after its complete file is on the disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.output import write_files
from ...ds_configs.quantization.scheme import QuantizationScheme
from ...ds_configs.specs.errors import ConfigError, UsageError
from ..safetensors.reading import each_tensor, read_headers
from ..safetensors.writing import save_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MANIFEST = "journal.json"
_SCHEMA_VERSION = 1
# A layer's file can have gigabytes; it is hashed in chunks.
_BYTES_AT_ONCE = 1 << 22
_PACKAGES = ("llmcompressor", "compressed-tensors", "torch", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalEntry:
    """One finished part of the model in one phase of the method."""

    phase: int
    """Index of the method's pass over the model, from 0."""
    part: int
    """Index of the part of the model, from 0."""
    file: str
    """Name of the safetensors file."""
    size_bytes: int
    """Its size."""
    blake2b: str
    """Its digest."""


def run_identity(
    *,
    run_key: str,
    scheme: QuantizationScheme,
    method: str,
    method_options: Mapping[str, Any],
    calibration: Sequence[Mapping[str, Sequence[int]]],
    batch_size: int,
    seed: int,
) -> dict[str, str]:
    """Return the properties that must be equal for a run to resume from a journal, as text for messages."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in calibration:
        digest.update((json.dumps(list(map(int, sample["input_ids"]))) + "\n").encode())
    return {
        "model and settings": run_key,
        "scheme": json.dumps(asdict(scheme), sort_keys=True, default=str),
        "method": method,
        "options": json.dumps(dict(method_options), sort_keys=True, default=str),
        "calibration text": digest.hexdigest(),
        "batch size": str(batch_size),
        "seed": str(seed),
        "versions": ", ".join(f"{name} {version(name)}" for name in _PACKAGES),
    }


class Journal:
    """Finished parts of one run, which can be restored if their files are complete."""

    def __init__(self, directory: Path, identity: Mapping[str, str]) -> None:
        """Open the journal of this run, or create it.

        A part whose file is missing, truncated or changed is ignored, and so are all later parts.

        Raises:
            UsageError: the directory contains the journal of another run; names the differences.
        """
        self.directory = directory
        self._identity = dict(identity)
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in (*directory.glob(".layer-*"), *directory.glob(f".{MANIFEST}.*")):
            leftover.unlink()
        self.entries: tuple[JournalEntry, ...] = tuple(self._trusted())
        self._write_manifest()

    def record(self, *, phase: int, part: int, tensors: Mapping[str, Any]) -> None:
        """Write the tensors of a finished part durably to the disk."""
        path = self.directory / f"layer-{len(self.entries):05d}.safetensors"
        save_tensors(tensors, path)
        size_bytes, digest = path.stat().st_size, _digest(path)
        entry = JournalEntry(phase=phase, part=part, file=path.name, size_bytes=size_bytes, blake2b=digest)
        self.entries = (*self.entries, entry)
        self._write_manifest()

    def restore(self, entry: JournalEntry, model: PreTrainedModel) -> tuple[str, ...]:
        """Copy the tensors of a finished part into the model and return the names of their modules."""
        from compressed_tensors.utils import update_offload_parameter

        modules: dict[str, None] = {}
        for name, tensor in each_tensor(read_headers([self.directory / entry.file])):
            module_name, _, tensor_name = name.rpartition(".")
            modules[module_name] = None
            update_offload_parameter(model.get_submodule(module_name), tensor_name, tensor)
        return tuple(modules)

    def of_phase(self, phase: int) -> tuple[JournalEntry, ...]:
        """Return the finished parts of one phase, in order."""
        return tuple(entry for entry in self.entries if entry.phase == phase)

    def _trusted(self) -> Iterator[JournalEntry]:
        path = self.directory / MANIFEST
        if not path.exists():
            return
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            schema, identity = manifest["schema_version"], manifest["run"]
            entries = [JournalEntry(**entry) for entry in manifest["layers"]]
        except (ValueError, KeyError, TypeError):
            return
        if schema != _SCHEMA_VERSION:
            return
        fix = "use another directory, or delete this one to start from the beginning"
        errors = [
            ConfigError(
                where=str(self.directory),
                value=identity.get(name),
                rule=f"is the journal of a run with another {name}; this run has {wanted}",
                fix=fix,
            )
            for name, wanted in self._identity.items()
            if identity.get(name) != wanted
        ]
        if errors:
            raise UsageError(errors)
        for index, entry in enumerate(entries):
            path = self.directory / entry.file
            # Names come from a file: only the name that this class would have chosen is opened.
            if entry.file != f"layer-{index:05d}.safetensors" or not path.is_file():
                return
            if path.stat().st_size != entry.size_bytes or _digest(path) != entry.blake2b:
                return
            yield entry

    def _write_manifest(self) -> None:
        content = {
            "schema_version": _SCHEMA_VERSION,
            "run": self._identity,
            "layers": [asdict(entry) for entry in self.entries],
        }
        write_files({MANIFEST: json.dumps(content, indent=1) + "\n"}, self.directory, force=True)


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(_BYTES_AT_ONCE):
            digest.update(part)
    return digest.hexdigest()
