"""Files that are never half written or overwritten unasked: made beside their place, flushed, and renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..specs.errors import Fault, ShardwrightError, UsageError
from .output import occupied_faults


def write_files(files: Mapping[str, str | bytes], directory: Path, *, force: bool = False) -> list[Path]:
    """Write each text or picture under `directory` through a temporary name and return the paths.

    Scripts (`.sh`, `.sbatch`) become executable.

    Raises:
        UsageError: the directory exists and is not empty, and `force` is false, or the path is a file.
        ShardwrightError: the system refuses to write.
    """
    faults = occupied_faults(directory, force=force) or [
        Fault(where=f"output_dir/{name}", rule="is a directory where a file must go")
        for name in sorted(files)
        if (directory / name).is_dir()
    ]
    if faults:
        raise UsageError(faults)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        contents = {directory / name: content for name, content in sorted(files.items())}
        # Every file lies beside its place before the first one moves there, so that a full disk changes nothing.
        with ExitStack() as staged:
            for path, content in contents.items():
                temporary = staged.enter_context(replacing(path))
                temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
                flush(temporary)
    except OSError as error:
        raise ShardwrightError(f"output_dir = {str(directory)!r}: cannot be written ({error.strerror})") from None
    return list(contents)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a temporary file beside `path` that takes its place when the block ends without an error.

    Scripts (`.sh`, `.sbatch`) become executable.

    Raises:
        OSError: the system refuses to write.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        # A library that wrote the file may have let its owner alone read it (safetensors 0.8.0).
        temporary.chmod(0o755 if path.suffix in (".sh", ".sbatch") else 0o644)
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
