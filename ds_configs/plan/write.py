"""Files that are never half written or overwritten unasked: made beside their place, flushed, and renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..specs.errors import Fault, ShardwrightError, UsageError


def write_files(files: Mapping[str, str | bytes], directory: Path, *, force: bool = False) -> list[Path]:
    """Write each text or picture under `directory` through a temporary name and return the paths.

    Scripts (`.sh`, `.sbatch`) become executable.

    Raises:
        UsageError: the directory exists and is not empty, and `force` is false, or the path is a file.
        ShardwrightError: the system refuses to write.
    """
    faults = output_faults(directory, force=force) or [
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


def output_faults(
    directory: Path,
    *,
    force: bool,
    sources: Mapping[str, str | None] | None = None,
    own: Collection[str] = (),
    fix: str = "use --force to write into it",
) -> list[Fault]:
    """Return what keeps a command from writing to a directory: one rule for all of them.

    Args:
        directory: Where results go.
        force: Whether files that lie there may be replaced.
        sources: What the command reads, by its part in it; none of these is ever written over.
        own: Names of files that may be replaced without `force`.
        fix: The way out where something lies there.
    """
    where, value = "output_dir", str(directory)
    if directory.exists() and not directory.is_dir():
        return [Fault(where=where, value=value, rule="is a file", fix="name a directory")]
    if not directory.is_dir():
        return []
    faults = [
        Fault(where=where, value=value, rule=f"is {part} itself, whose files would be replaced", fix="name another one")
        for part, source in (sources or {}).items()
        if source is not None and directory.resolve() == Path(source).expanduser().resolve()
    ]
    if not force and (others := sorted({path.name for path in directory.iterdir()} - set(own))):
        rule = f"holds {others[0]!r}, which is not replaced" if own else "exists and is not empty"
        faults.append(Fault(where=where, value=value, rule=rule, fix=fix))
    return faults


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
