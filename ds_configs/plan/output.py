"""Output directories: what a command may write over, and a lock that keeps a second run out meanwhile.

The lock is on a file beside the directory, which may yet be renamed into its place, or inside of it where the place
beside cannot be written. The system drops the lock when its process ends in whatever way; a forked child does not keep
it, as it would with `flock`.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from glob import escape
from pathlib import Path

from ..specs.errors import Fault, ShardwrightError, UsageError
from ..specs.units import gigabytes

LOCK = ".shardwright-lock"
"""Ending of a lock's name beside the directory, and its name inside."""
STAGING = ".partial-"
"""Follows the directory's name in those of directories that are to take its place, or whose files are."""
_PROBE_BYTES = 2**20
_held: set[Path] = set()
"""Directories of this process, to whose own locks the system would not object."""


def output_faults(
    directory: Path,
    *,
    force: bool,
    sources: Mapping[str, str | None] | None = None,
    own: Collection[str] = (),
    fix: str = "use --force to write into it",
) -> list[Fault]:
    """Return what keeps a command from writing to a directory, before its work: one rule for all of them.

    Args:
        directory: Where results go.
        force: Whether files that lie there may be replaced.
        sources: What the command reads, by its part in it; nothing is ever written over one, or into one.
        own: Names, or patterns of names, of files that may be replaced without `force`.
        fix: The way out where something lies there.
    """
    if directory.exists() and not directory.is_dir():
        return [Fault(where="output_dir", value=str(directory), rule="is a file", fix="name a directory")]
    faults = [_source_fault(directory, part, source) for part, source in (sources or {}).items() if source is not None]
    found = [fault for fault in faults if fault is not None] + occupied_faults(directory, force=force, own=own, fix=fix)
    return found + disk_faults(directory)


def occupied_faults(
    directory: Path, *, force: bool, own: Collection[str] = (), fix: str = "use --force to write into it"
) -> list[Fault]:
    """Return the fault of a directory that holds files already, as `output_faults` does; the disk is left alone."""
    where, value = "output_dir", str(directory)
    if directory.exists() and not directory.is_dir():
        return [Fault(where=where, value=value, rule="is a file", fix="name a directory")]
    if force or not directory.is_dir():
        return []
    names = sorted(path.name for path in directory.iterdir())
    ours = (*own, LOCK, f".*{STAGING}*")
    others = [name for name in names if not any(fnmatch(name, pattern) for pattern in ours)]
    if not others:
        return []
    rule = f"holds {others[0]!r}, which is not replaced" if own else "exists and is not empty"
    return [Fault(where=where, value=value, rule=rule, fix=fix)]


def disk_faults(directory: Path, *, needed_bytes: int = 0) -> list[Fault]:
    """Return why nothing can be written to a directory, which may not exist yet; a file without a name tries it.

    Args:
        directory: Where results go.
        needed_bytes: What they will take at least.
    """
    where, value = "output_dir", str(directory)
    place = _existing(directory)
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(place).free
    except OSError as error:
        fix = "free some space, or name a place that can be written"
        return [Fault(where=where, value=value, rule=f"cannot be written ({error.strerror})", fix=fix)]
    if needed_bytes <= free:
        return []
    rule = f"takes {gigabytes(needed_bytes)} GB, and {gigabytes(free)} GB are free in {place}"
    return [Fault(where=where, value=value, rule=rule, fix="free some space, or name another disk")]


def _existing(directory: Path) -> Path:
    place = directory.resolve()
    return next(path for path in (place, *place.parents) if path.exists())


def _source_fault(directory: Path, part: str, source: str) -> Fault | None:
    """Return the fault of a directory that is a source, or lies in one, by whatever path it is reached."""
    read = Path(source).expanduser()
    if not read.exists():
        return None
    # A model may be named by its configuration.
    read = read.parent if read.name == "config.json" else read
    place = directory.resolve()
    for path in (place, *place.parents):
        if path.exists() and path.samefile(read):
            rule = f"is {part} itself, whose files would be replaced" if path == place else f"lies inside {part}"
            return Fault(where="output_dir", value=str(directory), rule=rule, fix="name another one")
    return None


@contextmanager
def reserved(directory: Path, *, force: bool, own: Collection[str] = ()) -> Iterator[None]:
    """Keep every other run out of an output directory during the block; what a killed run staged there goes.

    Args:
        directory: Where results go; it need not exist.
        force: Whether files that lie there now may be replaced: another run may have ended since they were checked.
        own: As for `output_faults`.

    Raises:
        UsageError: another run writes to it, or has left files there.
        ShardwrightError: the system refuses to write.
    """
    place = directory.resolve()
    if place in _held:
        raise UsageError(_busy(directory, f"process {os.getpid()}"))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, lock = _locked(place)
    except OSError as error:
        raise ShardwrightError(f"output_dir = {str(directory)!r}: cannot be written ({error.strerror})") from None
    if descriptor is None:
        raise UsageError(_busy(directory, lock.read_text(encoding="utf-8", errors="replace") or "another process"))
    _held.add(place)
    try:
        for abandoned in _staged(place):
            shutil.rmtree(abandoned, ignore_errors=True)
        if faults := occupied_faults(directory, force=force, own=own):
            raise UsageError(faults)
        yield
    finally:
        _held.discard(place)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _staged(place: Path) -> list[Path]:
    """Return what runs that were killed have left of a directory, beside and inside of it."""
    pattern = f".{escape(place.name)}{STAGING}*"
    return [*place.parent.glob(pattern), *place.glob(pattern)]


def _busy(directory: Path, holder: str) -> Fault:
    fix = "wait until it ends, end it, or name another directory"
    return Fault(where="output_dir", value=str(directory), rule=f"{holder} is writing to it", fix=fix)


def _locked(place: Path) -> tuple[int | None, Path]:
    """Return a descriptor that holds the lock of a directory, `None` where another process has it, and its file."""
    beside = place.with_name(f".{place.name}{LOCK}") if place.name else place / LOCK
    try:
        return _try_lock(beside), beside
    except PermissionError:
        pass
    except OSError:
        # Such as a read-only file system, on which the directory itself is another mount.
        if not place.is_dir():
            raise
    return _try_lock(place / LOCK), place / LOCK


def _try_lock(file: Path) -> int | None:
    import fcntl

    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some network file systems have no locks: nobody can be kept out there.
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                os.close(descriptor)
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    return None
                raise
        try:
            # Its holder removes it when it ends, perhaps since it was opened here.
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)
