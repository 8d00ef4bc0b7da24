"""What a test session creates and removes: a temporary directory, a data directory, warm processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import psutil
import warm_ranks

_PREFIX = "shardwright-tests-"
_OPENING = "shardwright-opening-"
_LOCK = "in-use"
COMMANDS = {
    "accelerate": "-m accelerate.commands.accelerate_cli",
    "torchrun": "-m torch.distributed.run",
    "shardwright": "-m shardwright",
}
"""Console scripts that the session replaces by warm processes."""


class Session:
    def __init__(self, directory: Path, lock: IO[str], server: ExitStack, environment: dict[str, str | None]) -> None:
        self._directory = directory
        self._lock = lock
        self._server = server
        self._environment = environment

    def close(self) -> None:
        name = os.environ[warm_ranks.SERVER_NAME]
        self._server.close()
        _end_processes_with(warm_ranks.SERVER_NAME, name)
        for variable, value in self._environment.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        tempfile.tempdir = None
        shutil.rmtree(self._directory, ignore_errors=True)
        self._lock.close()


def open_session() -> Session:
    """Make the session's directory, remove those of sessions that were killed, and start the server."""
    base = Path(tempfile.gettempdir())
    for left_behind in abandoned(base):
        shutil.rmtree(left_behind, ignore_errors=True)
    # Renamed once it is locked: another session that opens now would remove it as abandoned.
    unlocked = Path(tempfile.mkdtemp(prefix=_OPENING))
    lock = (unlocked / _LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    directory = unlocked.rename(base / unlocked.name.replace(_OPENING, _PREFIX))
    for name in ("data", "tmp", "bin"):
        (directory / name).mkdir()
    interpreter = warm_ranks.write_interpreter(directory / "bin")
    for name, arguments in COMMANDS.items():
        script = directory / "bin" / name
        script.write_text(f"#!/bin/sh\nexec '{interpreter}' {arguments} \"$@\"\n")
        script.chmod(0o755)
    changed = {
        "TMPDIR": str(directory / "tmp"),
        "SHARDWRIGHT_DATA_DIR": str(directory / "data"),
        "PYTHON_EXEC": str(interpreter),
        # Two environments that share a directory of compiled operators would recompile each other's.
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions")),
    }
    before = {variable: os.environ.get(variable) for variable in changed}
    os.environ.update(changed)
    tempfile.tempdir = None
    server = ExitStack()
    server.enter_context(warm_ranks.server())
    return Session(directory, lock, server, before)


def abandoned(base: Path) -> Iterator[Path]:
    """Yield directories of sessions whose process has ended: nothing locks them."""
    for directory in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (directory / _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield directory


def _end_processes_with(variable: str, value: str) -> None:
    """Kill every process with a variable of the session, except this one and its parents."""
    kept = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in kept and process.environ().get(variable) == value:
                process.kill()


def warm_command(name: str) -> list[str]:
    return [os.environ["PYTHON_EXEC"], *COMMANDS[name].split()]


def warm_path() -> str:
    return os.pathsep.join([str(Path(os.environ["PYTHON_EXEC"]).parent), os.environ["PATH"]])
