"""Ranks and commands of tests in warm processes: forks of a server that has imported everything once.

`run_ranks` is torchrun for tests: a group of ranks on this machine, each a new process with its own environment.
`write_interpreter` writes a program for `PYTHON_EXEC`, the variable with which torchrun lets users select the
interpreter: launchers, commands and ranks then spend no time on imports. docs/testing.md explains both.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwright.plugins.launching.elastic import signal_name
from shardwright.plugins.launching.launch import TAIL_CHARACTERS, cpu_rank_environment

from warm_ranks.on_demand import OnDemand
from warm_ranks.protocol import OPERATORS, SERVER_NAME, address, receive_number, request_process

_HERE = Path(__file__).parent
OTHERS_END_SECONDS = 3.0
"""How long the other ranks of a group may run after one has failed: one of them may report the cause."""


class RanksFailedError(AssertionError):
    """A rank failed, was killed, or the group ran out of time; the message has its traceback."""

    def __init__(self, message: str, *, output: str) -> None:
        super().__init__(f"{message}\n{output[-TAIL_CHARACTERS:]}")
        self.output = output
        """What all ranks printed."""


@contextmanager
def server() -> Iterator[None]:
    """Start a server, which imports at its first request, and set `SERVER_NAME` while it runs.

    The session has one. A test whose processes must import under other variables starts its own.
    """
    name = uuid.uuid4().hex
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address(name))
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, str(_HERE / "server.py"), str(listener.fileno())],
            stdin=subprocess.DEVNULL,
            env=cpu_rank_environment(),
            start_new_session=True,
            pass_fds=[listener.fileno()],
        )
    outer = os.environ.pop(SERVER_NAME, None)
    os.environ[SERVER_NAME] = name
    try:
        yield
    finally:
        process.kill()
        process.wait()
        del os.environ[SERVER_NAME]
        if outer is not None:
            os.environ[SERVER_NAME] = outer


def write_interpreter(directory: Path) -> Path:
    """Write a program that takes the arguments of the Python interpreter and runs them in a warm process."""
    path = directory / "python"
    # A shebang cannot name an interpreter with spaces in its path.
    path.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I -S '{_HERE / 'interpreter.py'}' \"$@\"\n")
    path.chmod(0o755)
    return path


def run_ranks(
    arguments: Sequence[str | Path],
    *,
    ranks: int = 2,
    timeout_seconds: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a script on CPU ranks, each in a fresh warm process, and return what they printed.

    Raises:
        RanksFailedError: A rank failed or a signal ended it, or time ran out; the others were ended.
    """
    from torch.distributed import TCPStore

    # The store is in this process: its port is bound before the ranks start.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        # Lets a rank import what tests share.
        "PYTHONPATH": str(_HERE.parent),
    }
    shared = cpu_rank_environment() | group | dict(environment or {})
    command = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory, contextlib.ExitStack() as stack:
        logs = [Path(directory) / f"rank{rank}.log" for rank in range(ranks)]
        running: dict[int, Any] = {}
        for rank, log in enumerate(logs):
            with log.open("wb") as output, Path(os.devnull).open("rb") as nothing:
                streams = (nothing.fileno(), output.fileno(), output.fileno())
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONUNBUFFERED": "1"}
                connection = request_process(command, shared | own, str(Path.cwd()), streams)
            running[rank] = stack.enter_context(contextlib.closing(connection))
            assert receive_number(connection), "the server of warm processes has ended"
        ended = _wait(running, timeout_seconds)
        output = "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
        # Other ranks can notice that a rank was killed, and fail, before its status arrives here.
        failed = min(filter(ended.get, ended), key=lambda rank: ended[rank] != -signal.SIGKILL, default=None)
        if failed is not None:
            status = ended[failed]
            how = f"was killed by {signal_name(-status)}" if status < 0 else f"failed with exit code {status}"
            last = logs[failed].read_text(encoding="utf-8", errors="replace")
            raise RanksFailedError(f"rank {failed} of {ranks} {how}: {' '.join(command)}", output=output + last)
        if len(ended) < ranks:
            message = f"{ranks - len(ended)} of {ranks} ranks were stopped after {timeout_seconds:g} s"
            raise RanksFailedError(f"{message}: {' '.join(command)}", output=output)
    return output


def _wait(running: Mapping[int, Any], timeout_seconds: float) -> dict[int, int]:
    """Return exit statuses in the order of arrival, without the ranks that had to be stopped."""
    deadline = time.monotonic() + timeout_seconds
    ended: dict[int, int] = {}
    while len(ended) < len(running) and (left := deadline - time.monotonic()) > 0:
        waiting = {connection: rank for rank, connection in running.items() if rank not in ended}
        for connection in select.select(list(waiting), [], [], left)[0]:
            status = receive_number(connection)
            ended[waiting[connection]] = -signal.SIGKILL if status is None else status
            if status != 0:
                deadline = min(deadline, time.monotonic() + OTHERS_END_SECONDS)
    return ended


__all__ = [
    "OPERATORS",
    "SERVER_NAME",
    "OnDemand",
    "RanksFailedError",
    "run_ranks",
    "server",
    "write_interpreter",
]
