"""The record of a whole checkpoint: every file with its size and checksum, written when all of them are on the disk.

A checkpoint is whole when its record is there and every file is as the record says. Whatever ends a save, a signal, a
full disk or a power failure, therefore leaves either a whole checkpoint or one that is known to be cut short. The
checksum is XXH3, which reads faster than memory is copied; it finds damage, and is no protection against forgery.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.plan.write import flush, write_files

RECORD = "checkpoint_complete.json"
SCHEMA_VERSION = 1
_CHUNK_BYTES = 4 * 2**20


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


def write_record(directory: Path, *, step: int, facts: Mapping[str, Any]) -> CheckpointRecord:
    """Mark a checkpoint complete, once `flush_tree` has run on every node that wrote to it.

    Raises:
        ShardwrightError: the record cannot be written.
        OSError: a file cannot be read.
    """
    files = {name: _file_record(directory / name) for name in _names(directory)}
    record = CheckpointRecord(step=step, files=files, facts=dict(facts))
    text = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(record)}, indent=1) + "\n"
    write_files({RECORD: text}, directory, force=True)
    flush(directory)
    flush(directory.parent)
    return record


def read_whole(directory: Path) -> CheckpointRecord:
    """Return the record of a checkpoint after every file was compared with it.

    Raises:
        NotWholeError: the first file that is missing, shorter, longer or different, or why there is no record.
    """
    record = read_record(directory)
    for name, expected in record.files.items():
        path = directory / name
        if not path.is_file():
            raise NotWholeError(f"{name} is missing")
        size = path.stat().st_size
        if size != expected.size_bytes:
            raise NotWholeError(f"{name} has {size} of {expected.size_bytes} bytes")
    for name, expected in record.files.items():
        if _file_record(directory / name) != expected:
            raise NotWholeError(f"{name} holds other bytes than were saved")
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
    for path in directory.rglob("*"):
        if not path.is_symlink():
            flush(path)
    flush(directory)


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
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            found.update(chunk)
            size += len(chunk)
    return FileRecord(size_bytes=size, xxh3_128=found.hexdigest())
