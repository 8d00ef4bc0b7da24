"""Failures of ranks, as torch's elastic launcher collects them: a rank records its exception, its launcher reads it.

`recorded` wraps the main function of a rank. Run as a module, this file is `accelerate` or `torchrun` itself, and keeps
what it knows of its ranks: seen with torch 2.13.0, `ChildFailedError` holds exit codes, signals and error files, and
only a text of them outlives the process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ShardwrightError
from .interfaces import main_address, meet
from .loopback import stay_on_loopback
from .parent_death import end_with_launcher

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable that names where a process records its failure; torchrun sets one for each rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """The end of a rank, or of the launcher itself, that did not end well by itself."""

    rank: int | None
    """Its number among all ranks; `None` for the launcher."""
    message: str
    """The error of this package, else the exception with its type; empty after a signal."""
    traceback: str = ""
    """Where an exception that is none of this package's was raised."""
    exit_code: int = 1
    """What the command that launched it is to exit with."""
    seconds: float = 0.0
    """Since the epoch, when the exception was raised."""
    signal: str | None = None
    """Name of the signal that killed it."""


def recorded(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap the main function of a rank: its exception reaches its launcher, which it does not outlive."""
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

    class Handler(ErrorHandler):
        def record_exception(self, e: BaseException) -> None:
            if not os.environ.get(ERROR_FILE):
                return
            # torchrun reads `message` and whole seconds, in which two ranks may fail.
            extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
            record: dict[str, Any] = {"message": {"message": f"{type(e).__name__}: {e}", "extraInfo": extra}}
            record["seconds"] = time.time()
            if isinstance(e, ShardwrightError):
                record["known"] = {"message": str(e), "exit_code": e.exit_code}
            Path(os.environ[ERROR_FILE]).write_text(json.dumps(record), encoding="utf-8")

    def launched() -> None:
        end_with_launcher()
        stay_on_loopback()
        main()

    wrapped: Callable[[], None] = record(launched, error_handler=Handler())
    return wrapped


def first_cause(failures: Sequence[RankFailure]) -> tuple[str, int] | None:
    """Return what ended a launch, and the exit code for it: ranks that a signal killed, else the first exception.

    The others fail because of it. `None` where no rank has recorded anything.
    """
    killed = [failure for failure in failures if failure.signal is not None]
    if killed:
        named = ", ".join(f"rank {failure.rank} was killed by {failure.signal}" for failure in killed)
        hint = " (the kernel does so when memory runs out)" if "SIGKILL" in named else ""
        return f"{named}{hint}; the other ranks were ended", 1
    if not failures:
        return None
    first = min(failures, key=lambda failure: failure.seconds)
    shown = f"\n{first.traceback.rstrip()}" if first.traceback else ""
    who = "the launcher" if first.rank is None else f"rank {first.rank}"
    return f"{who}: {first.message}{shown}", first.exit_code


def read_failures(file: Path) -> list[RankFailure]:
    """Return what a launcher, or a single rank that had none, left; nothing where none recorded a failure."""
    if not file.is_file():
        return []
    found = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(found, list):
        return [RankFailure(**each) for each in found]
    # torchrun runs under torch's own `record`, which tells no fractions of a second.
    return _failures(0 if "seconds" in found else None, 1, found)


def _failures(rank: int | None, exit_code: int, data: Mapping[str, Any]) -> list[RankFailure]:
    """Return the failure of one rank; none where its launcher ended it."""
    told = data.get("message")
    if isinstance(told, Mapping):
        extra = told["extraInfo"]
        known = data.get("known", {"message": told["message"], "traceback": extra["py_callstack"]})
        return [RankFailure(rank=rank, seconds=data.get("seconds", float(extra["timestamp"])), **known)]
    # Elastic ends the other ranks by SIGTERM once one has failed: theirs is no failure of their own.
    if exit_code >= 0 or exit_code == -signal.SIGTERM:
        return []
    return [RankFailure(rank=rank, message="", signal=signal_name(-exit_code))]


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number where it has none here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main(command: Sequence[str]) -> int:
    """Run `accelerate` or `torchrun` of this node in this process; failures of ranks go to `ERROR_FILE`."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if command[0] == "accelerate":
        from accelerate.commands.accelerate_cli import main as launcher
    else:
        from torch.distributed.run import main as launcher
    file = Path(os.environ[ERROR_FILE]) if os.environ.get(ERROR_FILE) else None
    if file is not None:
        # torchrun never removes the directory with the error files of its ranks; this one goes with the launch.
        tempfile.tempdir = str(file.parent)
    sys.argv = list(command)
    meet(main_address(command))
    try:
        launcher()
    except ChildFailedError as error:
        found = [
            asdict(failure)
            for rank, ended in error.failures.items()
            for failure in _failures(rank, ended.exitcode, ended.error_file_data)
        ]
        if file is not None:
            file.write_text(json.dumps(found), encoding="utf-8")
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
