"""Writes rendered files so that none is ever half written or overwritten unasked."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..specs.errors import Fault, ShardwrightError, UsageError


def write_files(files: Mapping[str, str | bytes], directory: Path, *, force: bool = False) -> list[Path]:
    """Write each text or picture under `directory` through a temporary name and return the paths.

    Scripts (`.sh`, `.sbatch`) become executable.

    Raises:
        UsageError: the directory exists and is not empty, and `force` is false, or the path is a file.
        ShardwrightError: the system refuses to write.
    """
    try:
        faults = _faults(directory, files, force=force)
        if faults:
            raise UsageError(faults)
        directory.mkdir(parents=True, exist_ok=True)
        return _write_all({directory / name: text for name, text in sorted(files.items())})
    except OSError as error:
        raise ShardwrightError(f"output_dir = {str(directory)!r}: cannot be written ({error.strerror})") from None


def _faults(directory: Path, files: Mapping[str, str | bytes], *, force: bool) -> list[Fault]:
    where, value = "output_dir", str(directory)
    if directory.exists() and not directory.is_dir():
        return [Fault(where=where, value=value, rule="is a file", fix="name a directory")]
    if not force and directory.is_dir() and any(directory.iterdir()):
        fix = "use --force to replace the files of the plan in it"
        return [Fault(where=where, value=value, rule="exists and is not empty", fix=fix)]
    in_the_way = [name for name in sorted(files) if (directory / name).is_dir()]
    return [Fault(where=f"{where}/{name}", rule="is a directory where a file must go") for name in in_the_way]


def _write_all(contents: Mapping[Path, str | bytes]) -> list[Path]:
    """Write every file beside its place before the first one moves there, so that a full disk changes nothing."""
    staged: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            staged[path] = _stage(path, content)
        for path, temporary in staged.items():
            temporary.replace(path)
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)
    return list(contents)


def _stage(path: Path, content: str | bytes) -> Path:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o755 if path.suffix in (".sh", ".sbatch") else 0o644)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
