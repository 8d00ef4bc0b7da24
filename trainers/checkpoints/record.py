"""The record of a whole checkpoint: every file with its size and checksum, written when all of them are on the disk.

A checkpoint is whole when its record is there and every file is as the record says. Whatever ends a save, a signal, a
full disk or a power failure, therefore leaves either a whole checkpoint or one that is known to be cut short. The
checksum is XXH3, which reads faster than memory is copied; it finds damage, and is no protection against forgery.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

from ...ds_configs.plan.write import flush, write_files

RECORD = "checkpoint_complete.json"
SCHEMA_VERSION = 1
_CHUNK_BYTES = 2**20
_FILES_AT_ONCE = 4
Reader = Callable[[Path], "CheckpointRecord"]
"""`read_whole`, or `read_complete` where the bytes themselves are looked at later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """One file of a checkpoint."""

    size_bytes: int
    """Its length."""
    xxh3_128: str
    """Checksum of its bytes, in hexadecimal digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """Contents of a whole checkpoint, and the run that saved it."""

    step: int
    """Optimizer steps that were done."""
    files: Mapping[str, FileRecord]
    """Every file by its path below the checkpoint."""
    facts: Mapping[str, Any]
    """The run that saved it, as `resume_rules.run_facts` tells."""


class NotWholeError(Exception):
    """A checkpoint is cut short or damaged; the message says where."""


def file_records(directory: Path, names: Iterable[str] | None = None) -> dict[str, FileRecord]:
    """Return size and checksum of files below a directory, of all of them where none are named.

    Raises:
        OSError: a file cannot be read.
    """
    read = list(_names(directory) if names is None else names)
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        return dict(zip(read, pool.map(lambda name: _file_record(directory / name), read), strict=True))


def write_record(directory: Path, *, step: int, files: Mapping[str, FileRecord], facts: Mapping[str, Any]) -> None:
    """Mark a checkpoint complete, once `flush_tree` has run on every node that wrote to it.

    Raises:
        ShardwrightError: the record cannot be written.
    """
    record = CheckpointRecord(step=step, files=files, facts=dict(facts))
    text = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(record)}, indent=1) + "\n"
    write_files({RECORD: text}, directory, force=True)
    flush(directory.parent)


def read_whole(directory: Path) -> CheckpointRecord:
    """Return the record of a checkpoint after every byte of it was compared.

    Raises:
        NotWholeError: the first file that is missing, shorter, longer or different, or why there is no record.
    """
    record = read_complete(directory)
    try:
        found = file_records(directory, record.files)
    except OSError as error:
        raise NotWholeError(f"cannot be read ({error})") from None
    for name, expected in record.files.items():
        if found[name] != expected:
            raise NotWholeError(f"{name} holds other bytes than were saved")
    return record


def read_complete(directory: Path) -> CheckpointRecord:
    """Return the record of a checkpoint whose files are all there with their sizes; reads none of them.

    Raises:
        NotWholeError: the first file that is missing, shorter or longer, or why there is no record.
    """
    record = read_record(directory)
    for name, expected in record.files.items():
        path = directory / name
        if not path.is_file():
            raise NotWholeError(f"{name} is missing")
        size = path.stat().st_size
        if size != expected.size_bytes:
            raise NotWholeError(f"{name} has {size} of {expected.size_bytes} bytes")
    return record


def read_record(directory: Path) -> CheckpointRecord:
    """Return the record of a checkpoint, without a look at its files.

    Raises:
        NotWholeError: there is none, or it is damaged.
    """
    try:
        content = json.loads((directory / RECORD).read_bytes())
        if content["schema_version"] != SCHEMA_VERSION:
            raise NotWholeError(f"{RECORD} has the version {content['schema_version']!r}, not {SCHEMA_VERSION}")
        files = {_inside(name): FileRecord(**entry) for name, entry in content["files"].items()}
        return CheckpointRecord(step=int(content["step"]), files=files, facts=dict(content["facts"]))
    except FileNotFoundError:
        raise NotWholeError(f"has no {RECORD}, with which a save ends") from None
    except OSError as error:
        raise NotWholeError(f"{RECORD} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NotWholeError(f"{RECORD} is damaged ({error!r})") from None


def flush_tree(directory: Path) -> None:
    """Wait until every file below a directory, and their names, are on the disk; one process of each node calls it."""
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        list(pool.map(flush, [path for path in directory.rglob("*") if not path.is_symlink()]))
    flush(directory)


def flushed_records(directory: Path) -> dict[str, FileRecord]:
    """Do what `flush_tree` does, and return what `file_records` does, both at once.

    Raises:
        OSError: a file cannot be read, or not be written to the disk.
    """
    with ThreadPoolExecutor(1) as pool:
        flushing = pool.submit(flush_tree, directory)
        records = file_records(directory)
        flushing.result()
    return records


def _names(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != RECORD:
            yield path.relative_to(directory).as_posix()


def _inside(name: str) -> str:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name!r} is no path below the checkpoint")
    return name


def _file_record(path: Path) -> FileRecord:
    import xxhash

    found, size = xxhash.xxh3_128(), 0
    # Mapped, since the allocator would keep a chunk in the arena of every thread that once read a file.
    with path.open("rb", buffering=0) as stream, mmap(-1, _CHUNK_BYTES) as chunk, memoryview(chunk) as view:
        while count := stream.readinto(view):
            found.update(view[:count])
            size += count
    return FileRecord(size_bytes=size, xxh3_128=found.hexdigest())
