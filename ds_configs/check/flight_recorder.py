"""Records of torch's flight recorder, written when ranks time out: which collective operation, which rank lags.

torch writes one pickle per rank, `TORCH_FR_DUMP_TEMP_FILE` and the rank, of lists, dictionaries, texts and numbers. A
file that names a class or a function is not one and is rejected: unpickling it could run its code.
"""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - `_PlainUnpickler` runs no code
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..specs.errors import ConfigError, InputError

DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Path of the records without the rank: the name since torch 2.9, and the earlier one, which torch 2.13 reads too."""
_RANK_FILE = re.compile(r"(\d+)(?:\.json)?$")
_LARGEST_BYTES = 1 << 28


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"names {module}.{name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """A collective operation of a process group, as one rank recorded it."""

    number: int
    """Counts the collective operations of the group."""
    name: str
    """Such as `nccl:all_gather`."""
    sizes: str
    """Shapes of the inputs."""
    frame: str
    """`file:line in function` of the caller; empty if torch recorded none."""

    def __str__(self) -> str:
        return f"{self.name} number {self.number} of inputs {self.sizes}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stuck:
    """A process group whose ranks did not run the same operations."""

    group: str
    waiting: Mapping[int, Operation]
    """Ranks that reached the operation which the others did not, or all ranks of one that did not end."""
    behind: Mapping[int, Operation | None]
    """Last operation of the ranks that lag; `None` without any operation or without a file."""
    without_file: tuple[int, ...]
    """Those of `behind` whose record is missing."""
    differs: bool = False
    """Whether the ranks called different operations under one number."""

    def lines(self) -> list[str]:
        """Return what happened, for people."""
        lines = [f"process group {self.group}:"]
        by_operation: dict[str, list[int]] = {}
        for rank, operation in sorted(self.waiting.items()):
            where = f" ({operation.frame})" if operation.frame else ""
            by_operation.setdefault(f"{operation}{where}", []).append(rank)
        verb = "called" if self.differs else "waited in"
        for text, ranks in by_operation.items():
            listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
            lines.append(f"  rank{'s' * (len(ranks) > 1)} {listed} {verb} {text}")
        for rank, last in sorted(self.behind.items()):
            if rank in self.without_file:
                lines.append(
                    f"  rank {rank} has no record: it was busy elsewhere or had ended, or is on another machine"
                )
            else:
                where = f" ({last.frame})" if last is not None and last.frame else ""
                shown = "has called no operation" if last is None else f"lags: its last operation was {last}{where}"
                lines.append(f"  rank {rank} {shown}")
        if self.differs:
            lines.append("  The ranks must call the same operations in the same order.")
        elif not self.behind:
            lines.append("  Every rank reached it, so a link or an accelerator is slow or lost.")
        return lines


def record_files(start: Path, *, since: float = 0.0) -> dict[int, Path]:
    """Return the files of all ranks in a directory, or by the beginning of their paths, a value of `DUMP_VARIABLES`.

    Files older than `since`, in seconds since the epoch, are ignored. Raises `InputError` for files of several runs.
    """
    directory, prefix = (start, "") if start.is_dir() else (start.parent, start.name)
    files: dict[int, Path] = {}
    names = sorted(file for file in directory.glob("*") if file.name.startswith(prefix) and file.is_file())
    for file in names:
        if (match := _RANK_FILE.search(file.name)) and file.stat().st_mtime >= since:
            if int(match[1]) in files:
                rule = f"has two records of rank {match[1]}: {files[int(match[1])].name} and {file.name}"
                raise InputError(ConfigError(where=str(start), rule=rule, fix="keep the files of one run"))
            files[int(match[1])] = file
    return files


def read_record(file: Path) -> dict[str, Any]:
    """Return the record of one rank, from torch's pickle or JSON, or raise `InputError`."""
    try:
        if file.stat().st_size > _LARGEST_BYTES:
            raise ValueError(f"is larger than {_LARGEST_BYTES >> 20} MiB")
        with file.open("rb") as stream:
            is_json = stream.read(1) == b"{"
            stream.seek(0)
            record = json.load(stream) if is_json else _PlainUnpickler(stream).load()
        if not isinstance(record, dict) or not isinstance(record["entries"], list):
            raise ValueError("has no entries")
        return record
    except (ValueError, KeyError, EOFError, IndexError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        rule = f"is not a record of torch's flight recorder ({error})"
        raise InputError(ConfigError(where=str(file), rule=rule, fix="pass files that torch wrote")) from None


def stuck_groups(records: Mapping[int, Mapping[str, Any]]) -> list[Stuck]:
    """Return the process groups in which ranks waited, the earliest wait first, from records by global rank."""
    members: dict[str, list[int]] = {}
    called: dict[str, dict[int, dict[int, Operation]]] = {}
    started: dict[str, int] = {}
    unfinished: set[tuple[str, int, int]] = set()
    for rank, record in records.items():
        for name, group in record.get("pg_config", {}).items():
            ranks = group["ranks"]
            members.setdefault(str(name), json.loads(ranks) if isinstance(ranks, str) else list(ranks))
        for entry in record["entries"]:
            if entry.get("is_p2p"):
                continue
            name, description = entry["process_group"]
            # Innermost first; torch's own functions come before the caller.
            frames = entry.get("frames") or [{}]
            first = next((each for each in frames if "/torch/" not in each.get("filename", "")), frames[0])
            frame = f"{first['filename']}:{first['line']} in {first['name']}" if first else ""
            number = entry["collective_seq_id"]
            operation = Operation(
                number=number,
                name=entry["profiling_name"],
                sizes=json.dumps(entry.get("input_sizes", [])),
                frame=frame,
            )
            label = f"{name} ({description})" if description else str(name)
            # gloo's default group has no name in the configuration.
            members.setdefault(label, members.get(str(name), members.get("", sorted(records))))
            called.setdefault(label, {}).setdefault(rank, {})[number] = operation
            started[label] = max(started.get(label, 0), entry.get("time_created_ns", 0))
            # gloo's records have no times, and stay `scheduled`.
            if entry.get("state") != "completed" and not operation.name.startswith("gloo:"):
                unfinished.add((label, rank, number))
    groups = []
    for label, of_ranks in called.items():
        groups += _stuck(label, members[label], of_ranks, {key[1:] for key in unfinished if key[0] == label}, records)
    return sorted(groups, key=lambda group: started[group.group])


def _stuck(
    label: str,
    members: Sequence[int],
    of_ranks: Mapping[int, Mapping[int, Operation]],
    unfinished: set[tuple[int, int]],
    records: Mapping[int, Any],
) -> list[Stuck]:
    """Return how a group is stuck; empty if all its ranks ended the same operations."""
    # The buffer of each rank keeps its last operations only.
    first = max(min(operations) for operations in of_ranks.values())
    last = max(max(operations) for operations in of_ranks.values())
    for number in range(first, last + 1):
        at = {rank: operations[number] for rank, operations in of_ranks.items() if number in operations}
        if len({operation.name for operation in at.values()}) > 1:
            return [Stuck(group=label, waiting=at, behind={}, without_file=(), differs=True)]
        if any(rank not in at for rank in members):
            # Without a file a rank may have ended long after an operation that the others have ended.
            missing = [rank for rank in members if rank not in at]
            if number < last and all(rank not in records for rank in missing):
                continue
            behind = {rank: of_ranks[rank][max(of_ranks[rank])] if rank in of_ranks else None for rank in missing}
            without_file = tuple(rank for rank in missing if rank not in records)
            return [Stuck(group=label, waiting=at, behind=behind, without_file=without_file)]
        if waiting := {rank: at[rank] for rank in at if (rank, number) in unfinished}:
            # Not the first of operations that overlap, but the first that a rank has not ended.
            return [Stuck(group=label, waiting=waiting, behind={}, without_file=())]
    return []


def summary(start: Path, *, since: float = 0.0) -> list[str]:
    """Return the lines about the files of `record_files`; empty without files, or if no rank waited."""
    records = {rank: read_record(file) for rank, file in record_files(start, since=since).items()}
    return [line for group in stuck_groups(records) for line in group.lines()]
