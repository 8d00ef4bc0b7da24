"""Writes rendered files so that none is ever half written or overwritten unasked."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..errors import Fault, ShardwrightError, UsageError


def write_files(files: Mapping[str, str], directory: Path, *, force: bool = False) -> list[Path]:
    """Write each text under `directory` through a temporary name and return the paths.

    Scripts (`.sh`, `.sbatch`) become executable.

    Raises:
        UsageError: the directory exists and is not empty, and `force` is false, or the path is a file.
        ShardwrightError: the system refuses to write.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(Fault(where="output_dir", value=str(directory), rule="is a file", fix="name a directory"))
    if not force and directory.is_dir() and any(directory.iterdir()):
        raise UsageError(
            Fault(
                where="output_dir",
                value=str(directory),
                rule="exists and is not empty",
                fix="use --force to replace the files of the plan in it",
            )
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return [_write(directory / name, text) for name, text in sorted(files.items())]
    except OSError as error:
        raise ShardwrightError(f"output_dir = {str(directory)!r}: cannot be written ({error.strerror})") from None


def _write(path: Path, text: str) -> Path:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o755 if path.suffix in (".sh", ".sbatch") else 0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
