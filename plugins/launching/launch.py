"""Starts torchrun and accelerate launch with a hard time limit, and tells what the failing rank said.

Seen with torch 2.13.0 and accelerate 1.15.0: torchrun puts every rank into a session of its own, out of reach of a
signal to the launcher's group, and a launcher that is killed leaves its ranks running. Every process of a launch
therefore carries a token in its environment, by which it is found and ended whatever became of its parents.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ...ds_configs.specs.errors import ShardwrightError
from .elastic import ERROR_FILE, RankFailure, first_cause, read_failures
from .parent_death import signal_at_parent_death
from .remote import tell_to_end, tell_to_end_later
from .shared_memory import remove_abandoned_buffers, remove_buffers

# The failing rank's traceback comes last; what ranks printed before would bury it.
TAIL_CHARACTERS = 6000
_POLL_SECONDS = 0.1
STOP_SECONDS = 600.0
"""What ranks get to save a checkpoint when the command is asked to stop; torchrun's own 30 s are few for large ones."""
_OTHERS_END_SECONDS = 5.0
"""What the other launchers of a job get to report, after one has failed: theirs may be the cause."""

_TOKEN = "SHARDWRIGHT_LAUNCH_TOKEN"  # noqa: S105
_OUTER_LAUNCH = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|LOCAL_SIZE|GROUP_RANK|NODE_RANK|MASTER_ADDR|MASTER_PORT)$"
    r"|(ACCELERATE|FSDP|PARALLELISM_CONFIG|TORCHELASTIC|TORCHRUN|PET)_"
)
"""Variables of an enclosing launch or job script, which would contradict this one's."""


class LaunchFailedError(ShardwrightError):
    """A launch ended with an error or ran out of time; says which rank was the cause, where ranks record that."""

    def __init__(
        self, ending: str, *, output: str, launcher_exit_code: int | None, failures: Sequence[RankFailure] = ()
    ) -> None:
        message, self.exit_code = first_cause(failures) or (f"{ending}\n{output[-TAIL_CHARACTERS:]}", 1)
        super().__init__(message)
        self.output = output
        """What all launchers and ranks printed."""
        self.launcher_exit_code = launcher_exit_code
        """Exit code of the launcher that failed first; `None` when it was stopped for time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launcher to start; several of them are the nodes of one job."""

    arguments: tuple[str, ...]
    """Arguments of `interpreter`, such as `-m torch.distributed.run ...`."""
    environment: Mapping[str, str] | None = None
    """Variables beside those of `cpu_rank_environment`."""
    port: int | None = None
    """Where its ranks meet, by which the shared memory that they leave is known; `None` where it starts none."""
    program: tuple[str, ...] | None = None
    """What takes the arguments in place of `interpreter`, and stops once its standard input ends: `ssh` and a host."""
    name: str | None = None
    """What a failure calls it; `None` for its command."""
    ends_with_starter: bool = False
    """Whether a program is to kill its ranks, rather than let them save, where this process dies."""


def interpreter() -> str:
    """Return the Python of launchers, ranks and checking processes: torchrun's own `PYTHON_EXEC`, else this one."""
    return os.environ.get("PYTHON_EXEC") or sys.executable


def python_arguments(command: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments with which `interpreter` runs a command that starts with `accelerate` or `torchrun`.

    >>> python_arguments(["torchrun", "script.py"])
    ('-m', 'shardwright.plugins.launching.elastic', 'torchrun', 'script.py')
    """
    if command[0] == "python":
        return tuple(command[1:])
    return ("-m", f"{__package__}.elastic", *command)


def at_free_port(command: Sequence[str]) -> tuple[list[str], int | None]:
    """Return a launch line with a port that is free, and the port; torchrun's `--standalone` finds one by itself.

    >>> at_free_port(["torchrun", "--standalone", "script.py"])
    (['torchrun', '--standalone', 'script.py'], None)
    """
    if command[0] != "accelerate":
        return list(command), None
    port = free_port()
    return [*command[:2], "--main_process_port", str(port), *command[2:]], port


def run_launch(
    arguments: Sequence[str],
    *,
    timeout_seconds: float,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    port: int | None = None,
) -> str:
    """Run `interpreter` with ``arguments``, hand over each line as it is printed, and leave nothing behind.

    `port` is where ranks meet that DeepSpeed may give shared memory.

    Raises:
        LaunchFailedError: It failed, or it was stopped after ``timeout_seconds``; says what the rank that failed first
            recorded, else ends with what was printed last.
    """
    launch = Launch(arguments=tuple(arguments), environment=environment, port=port)
    return run_together([launch], timeout_seconds=timeout_seconds, on_line=on_line)


def run_together(
    launches: Sequence[Launch], *, timeout_seconds: float, on_line: Callable[[str], None] | None = None
) -> str:
    """Run several launchers at once, as the nodes of a job; when one fails, all are ended.

    Raises:
        LaunchFailedError: One failed, or all were stopped after ``timeout_seconds``.
    """
    token = uuid.uuid4().hex
    ports = {launch.port for launch in launches if launch.port is not None}
    if ports:
        remove_abandoned_buffers()
    with tempfile.TemporaryDirectory(prefix="shardwright-launch-", ignore_cleanup_errors=True) as directory:
        running: list[_Running] = []
        try:
            for index, launch in enumerate(launches):
                running.append(_Running(launch, Path(directory) / f"{index}.log", token))
            failed, code = _wait(running, timeout_seconds, on_line or (lambda _: None))
        except (KeyboardInterrupt, SystemExit):
            # Ctrl-C, and SIGTERM to the command.
            _ask_to_stop([started.process for started in running])
            raise
        finally:
            _end_processes([started.process for started in running], token)
            for port in ports:
                remove_buffers(port)
        text = "".join(started.text() for started in running)
        failures = [failure for started in running for failure in read_failures(started.error_file)]
    if failed is None:
        return text
    ending = f"stopped after {timeout_seconds:g} s" if code is None else f"exit code {code}"
    name = failed.name or " ".join([*(failed.program or [interpreter()]), *failed.arguments])
    raise LaunchFailedError(f"{name}: {ending}", output=text, launcher_exit_code=code, failures=failures)


class _Running:
    """A launcher whose output goes to a file, read from there as it grows."""

    def __init__(self, launch: Launch, log: Path, token: str) -> None:
        self.launch = launch
        self._log = log
        self.error_file = log.with_suffix(".json")
        self._position = 0
        self._rest = ""
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*(launch.program or [interpreter()]), *launch.arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL if launch.program is None else subprocess.PIPE,
                env={
                    **cpu_rank_environment(),
                    **(launch.environment or {}),
                    _TOKEN: token,
                    ERROR_FILE: str(self.error_file),
                    # torchrun's `--shutdown-timeout`, which accelerate has no flag for.
                    "PET_SHUTDOWN_TIMEOUT": str(int(STOP_SECONDS)),
                },
                # On SIGTERM a launcher ends its ranks.
                preexec_fn=signal_at_parent_death(signal.SIGTERM),
            )
        if launch.ends_with_starter:
            tell_to_end_later(self.process)

    def new_lines(self) -> list[str]:
        """Return the complete lines that were printed since the last call."""
        with self._log.open("rb") as stream:
            stream.seek(self._position)
            chunk = stream.read()
        self._position += len(chunk)
        *lines, self._rest = (self._rest + chunk.decode("utf-8", errors="replace")).split("\n")
        return lines

    def text(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")


def _wait(
    running: Sequence[_Running], timeout_seconds: float, on_line: Callable[[str], None]
) -> tuple[Launch | None, int | None]:
    """Return the launch that failed with its exit code, `None` in place of the code after the time limit."""
    deadline = time.monotonic() + timeout_seconds
    failed: tuple[Launch, int] | None = None
    while True:
        codes = [started.process.poll() for started in running]
        for started in running:
            for line in started.new_lines():
                on_line(line)
        for started, code in zip(running, codes, strict=True):
            if code and failed is None:
                failed = started.launch, code
                deadline = time.monotonic() + _OTHERS_END_SECONDS
        ended = all(code is not None for code in codes)
        if failed is not None and (ended or time.monotonic() > deadline):
            return failed
        if ended:
            return None, 0
        if time.monotonic() > deadline:
            return running[0].launch, None
        time.sleep(_POLL_SECONDS)


def cpu_rank_environment() -> dict[str, str]:
    """Return this process's environment without an outer launch, with accelerators hidden and one thread per rank."""
    kept = {name: value for name, value in os.environ.items() if not _OUTER_LAUNCH.match(name)}
    # Two versions of ninja would each rebuild DeepSpeed's operators: the one beside this Python comes first.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return kept | {
        "PATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
    }


def free_port() -> int:
    """Return a TCP port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _ask_to_stop(launchers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let ranks save what they have; a second signal to this process, or `STOP_SECONDS`, ends the waiting."""
    for launcher in launchers:
        if launcher.stdin is None:
            launcher.terminate()
        else:
            launcher.stdin.close()
    deadline = time.monotonic() + STOP_SECONDS
    while any(launcher.poll() is None for launcher in launchers) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _end_processes(launchers: Sequence[subprocess.Popen[bytes]], token: str) -> None:
    """Kill what is left of a launch; ranks may start while others are being ended, so look until none is found."""
    for launcher in launchers:
        if launcher.stdin is not None and launcher.poll() is None:
            tell_to_end(launcher)
    for _ in range(20):
        found = _processes_with(token)
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.kill()
        if not found:
            break
        psutil.wait_procs(found, timeout=1.0)
    for launcher in launchers:
        launcher.wait()


def _processes_with(token: str) -> list[Any]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_TOKEN) == token:
                found.append(process)
        except psutil.Error:
            continue
    return found
