"""Parts of the table: each injects its faults and records the expected and the actual outcome."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warm_ranks import RanksFailedError

from faults.injection import LOG, Fault
from faults.layouts import STEPS, Workshop, losses_of

Row = dict[str, Any]
SAVED_AT = 4
TOLERANCE = 1e-6
_SHIM = Path(__file__).with_name("file_operations.c")


@contextmanager
def _session(directory: Path) -> Iterator[None]:
    """Warm processes in which file operations can be broken."""
    import session

    shim = directory / "file_operations.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(shim), str(_SHIM), "-ldl"], check=True)
    os.environ["LD_PRELOAD"] = str(shim)
    try:
        opened = session.open_session()
    finally:
        del os.environ["LD_PRELOAD"]
    try:
        yield
    finally:
        opened.close()


@dataclass(frozen=True, slots=True)
class Choice:
    engines: Sequence[str]
    pattern: str = ""
    """Regular expression for location and name of a fault; an empty one matches all."""

    def has(self, where: str, fault: str) -> bool:
        return re.search(self.pattern, f"{where} {fault}") is not None


def run(part: str, directory: Path, choice: Choice) -> Iterator[Row]:
    with _session(directory):
        workshop = Workshop(directory / "workshop")
        for number, row in enumerate(PARTS[part](workshop, choice), start=1):
            mark = "as expected" if row["expected"] else "NOT AS EXPECTED"
            print(f"{number} {row['where']} {row['fault']}: {row['happened']} ({mark})", file=sys.stderr, flush=True)
            yield row


def _resumed(workshop: Workshop, engine: str, output: Path) -> tuple[bool, str]:
    """Resume after a fault, and compare every loss with the undisturbed run."""
    whole = losses_of(workshop.whole(engine))
    try:
        reported = workshop.run(engine, output, flags=("--resume",))
    except RanksFailedError as error:
        # What follows is the command, with places of this machine.
        how = str(error).splitlines()[0].partition(": ")[0]
        return False, f"resume failed: {how}: {_last_line(error.output)}"
    losses = losses_of(output)
    difference = max((abs(a - b) for a, b in zip(losses, whole[len(whole) - len(losses) :], strict=True)), default=0.0)
    start = "step 0" if "training begins at step 0" in reported else f"checkpoint-{STEPS - len(losses)}"
    return difference <= TOLERANCE, f"resumed from {start}, largest difference {difference:.1e}"


def _last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.startswith("rank ")), "")[:160]


def kills(workshop: Workshop, choice: Choice) -> Iterator[Row]:
    """A kill in the middle of each file operation of a save, on the rank that does it."""
    for engine in choice.engines:
        for rank in (0, 1):
            log = workshop.directory / f"{engine}-{rank}.log"
            counting = Fault(kind="file-kill", phase="save", step=SAVED_AT, rank=rank)
            environment = counting.environment | {LOG: str(log)}
            workshop.run(engine, workshop.directory / f"counted-{engine}-{rank}", environment=environment)
            operations = log.read_text().split()
            for at in _chosen(operations):
                fault = Fault(kind="file-kill", phase="save", step=SAVED_AT, rank=rank, at=at)
                name = f"kill in operation {at} of {len(operations)} ({operations[at - 1]})"
                if not choice.has(f"{engine}, rank {rank}", name):
                    continue
                row = _broken_save(workshop, engine, fault, name, "SIGKILL")
                # Saves differ by an operation or two: this one was over before.
                if not row["happened"].startswith("the run went on"):
                    yield row


def full_disks(workshop: Workshop, choice: Choice) -> Iterator[Row]:
    """A disk that is full, or fails, from some operation of a save on."""
    for engine in choice.engines:
        for kind, at in (("file-enospc", 1), ("file-enospc", 4), ("file-enospc", 9), ("file-eio", 6)):
            fault = Fault(kind=kind, phase="save", step=SAVED_AT, rank=0, at=at)
            name = f"{kind.removeprefix('file-').upper()} from operation {at} on"
            if choice.has(engine, name):
                yield _broken_save(workshop, engine, fault, name, "")


def _chosen(operations: Sequence[str]) -> list[int]:
    """Return every operation, but of a run of equal ones the first, the second and the last."""
    chosen = []
    for at, name in enumerate(operations, start=1):
        first = at == 1 or operations[at - 2] != name
        second = at == 2 or (at > 2 and operations[at - 3] != name)
        last = at == len(operations) or operations[at] != name
        if first or second or last:
            chosen.append(at)
    return chosen


def _broken_save(workshop: Workshop, engine: str, fault: Fault, name: str, expected: str) -> Row:
    output = workshop.directory / "broken"
    shutil.rmtree(output, ignore_errors=True)
    try:
        workshop.run(engine, output, environment=fault.environment)
        ended, broke = "the run went on", False
    except RanksFailedError as error:
        ended, broke = str(error).split(":")[0], expected in str(error)
    went_on, happened = _resumed(workshop, engine, output)
    where = f"{engine}, rank {fault.rank}"
    return {"where": where, "fault": name, "happened": f"{ended}; {happened}", "expected": broke and went_on}


PARTS: dict[str, Callable[[Workshop, Choice], Iterator[Row]]] = {"kills": kills, "disks": full_disks}
