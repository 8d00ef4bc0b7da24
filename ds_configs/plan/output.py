"""Output directories and files: checked before use, written completely or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from glob import escape
from pathlib import Path

from ..specs.errors import ConfigError, ShardwrightError, UsageError
from ..specs.units import gigabytes

LOCK = ".shardwright-lock"
"""Suffix of the lock file next to a directory, and the name of a lock file inside it."""
STAGING = ".partial-"
"""Follows the directory's name in the names of its staging directories."""
_PROBE_BYTES = 2**20
_locked: set[Path] = set()
"""Directories that this process has locked; `lockf` does not conflict within a process."""


def output_errors(
    directory: Path,
    *,
    force: bool,
    sources: Mapping[str, str | None] | None = None,
    own: Collection[str] = (),
    fix: str = "use --force to write into it",
) -> list[ConfigError]:
    """Return why a command must not write to a directory, checked before its work. All commands use this check.

    The output must not be one of `sources`, the inputs by role, or inside one. Files whose names match a pattern of
    `own` may be replaced without `force`. `fix` is what to suggest if the directory is not empty.
    """
    errors = occupied_errors(directory, force=force, own=own, fix=fix)
    if directory.exists() and not directory.is_dir():
        return errors
    inside = []
    target = directory.resolve()
    for role, source in (sources or {}).items():
        if source is None:
            continue
        read = Path(source).expanduser()
        if not read.exists():
            continue
        # A model may be given by the path of its configuration.
        read = read.parent if read.name == "config.json" else read
        # `samefile` also finds sources that are reached by another path.
        if parent := next((path for path in (target, *target.parents) if path.exists() and path.samefile(read)), None):
            rule = f"is {role} itself, whose files would be replaced" if parent == target else f"is inside {role}"
            inside.append(
                ConfigError(where="output_dir", value=str(directory), rule=rule, fix="choose another directory")
            )
    return inside + errors + disk_errors(directory)


def occupied_errors(
    directory: Path, *, force: bool, own: Collection[str] = (), fix: str = "use --force to write into it"
) -> list[ConfigError]:
    """Return the error of a directory that holds files, as `output_errors` does, without trying to write."""
    where, value = "output_dir", str(directory)
    if directory.exists() and not directory.is_dir():
        return [ConfigError(where=where, value=value, rule="is a file", fix="pass a directory")]
    if force or not directory.is_dir():
        return []
    names = sorted(path.name for path in directory.iterdir())
    ours = (*own, LOCK, f".*{STAGING}*")
    others = [name for name in names if not any(fnmatch(name, pattern) for pattern in ours)]
    if not others:
        return []
    rule = f"contains {others[0]!r}, which is not replaced" if own else "exists and is not empty"
    return [ConfigError(where=where, value=value, rule=rule, fix=fix)]


def disk_errors(directory: Path, *, needed_bytes: int = 0) -> list[ConfigError]:
    """Return why nothing can be written to a directory, which may not exist yet; writes an unnamed temporary file."""
    where, value = "output_dir", str(directory)
    target = directory.resolve()
    existing = next(path for path in (target, *target.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(existing).free
    except OSError as error:
        fix = "free some space, or choose a writable directory"
        return [ConfigError(where=where, value=value, rule=f"cannot be written ({error.strerror})", fix=fix)]
    if needed_bytes <= free:
        return []
    rule = f"needs {gigabytes(needed_bytes)} GB, but {existing} has {gigabytes(free)} GB free"
    return [ConfigError(where=where, value=value, rule=rule, fix="free some space, or choose another disk")]


@contextmanager
def reserved(directory: Path, *, force: bool, own: Collection[str] = ()) -> Iterator[None]:
    """Lock an output directory during the block and remove what killed runs staged there.

    Raises:
        UsageError: another run writes to the directory, or has left files there.
        ShardwrightError: writing fails.
    """
    target = directory.resolve()
    if target in _locked:
        raise UsageError(_busy(directory, f"process {os.getpid()}"))
    # The lock file is next to the directory, or inside where the parent is not writable.
    lock = target.with_name(f".{target.name}{LOCK}") if target.name else target / LOCK
    descriptor = None
    # Ctrl-C may come at any moment after the lock file was created.
    try:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = _try_lock(lock)
            except OSError as error:
                # A read-only parent may hold a directory that is another mount.
                if not isinstance(error, PermissionError) and not target.is_dir():
                    raise
                lock = target / LOCK
                descriptor = _try_lock(lock)
        except OSError as error:
            raise ShardwrightError(f"output_dir = {str(directory)!r}: cannot be written ({error.strerror})") from None
        if descriptor is None:
            raise UsageError(_busy(directory, lock.read_text(encoding="utf-8", errors="replace") or "another process"))
        _locked.add(target)
        # Killed runs leave staging directories next to the directory and inside it.
        pattern = f".{escape(target.name)}{STAGING}*"
        for abandoned in [*target.parent.glob(pattern), *target.glob(pattern)]:
            shutil.rmtree(abandoned, ignore_errors=True)
        if errors := occupied_errors(directory, force=force, own=own):
            raise UsageError(errors)
        yield
    finally:
        if descriptor is not None:
            _locked.discard(target)
            lock.unlink(missing_ok=True)
            os.close(descriptor)


def _busy(directory: Path, holder: str) -> ConfigError:
    fix = "wait until it ends, stop it, or choose another directory"
    return ConfigError(where="output_dir", value=str(directory), rule=f"{holder} is writing to it", fix=fix)


NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of network file systems that have no locks."""


def _try_lock(file: Path) -> int | None:
    """Return a descriptor that holds the lock; `None` if another process has it."""
    try:
        import fcntl
    except ImportError:
        # On Windows, which does not remove open files either, other runs are not detected.
        return os.open(os.devnull, os.O_RDWR)
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Then other runs cannot be detected.
            if error.errno not in NO_LOCKS:
                os.close(descriptor)
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    return None
                raise
        try:
            # The holder may have removed the file since it was opened here.
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
        except FileNotFoundError:
            pass
        except KeyboardInterrupt:
            file.unlink(missing_ok=True)
            raise
        os.close(descriptor)


def write_files(files: Mapping[str, str | bytes], directory: Path, *, force: bool = False) -> list[Path]:
    """Write texts and pictures to `directory` through temporary names and return the paths.

    Scripts (`.sh`, `.sbatch`) become executable. Raises `UsageError` or `ShardwrightError`.
    """
    errors = occupied_errors(directory, force=force) or [
        ConfigError(where=f"output_dir/{name}", rule="is a directory, but a file must be written there")
        for name in sorted(files)
        if (directory / name).is_dir()
    ]
    if errors:
        raise UsageError(errors)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        contents = {directory / name: content for name, content in sorted(files.items())}
        # All temporary files are written before the first one is renamed, so that a full disk changes nothing.
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
    """Yield a temporary path next to `path`, which replaces it when the block ends without an error.

    Scripts (`.sh`, `.sbatch`) become executable.

    Raises:
        OSError: writing fails.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        # Some libraries write files that only the owner can read (safetensors 0.8.0).
        temporary.chmod(0o755 if path.suffix in (".sh", ".sbatch") else 0o644)
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk; Windows has no such call for these descriptors."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
