"""Start torchrun and accelerate launch with a hard time limit, and report the error of the rank that failed first.

Seen with torch 2.13.0 and accelerate 1.15.0: torchrun starts every rank in a new session, so that signals to the
launcher's process group do not reach it, and a killed launcher leaves its ranks running. Every process of a launch
therefore has a token in its environment, by which it is found and ended.
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

import psutil

from ...ds_configs.check.flight_recorder import DUMP_VARIABLES, summary
from ...ds_configs.specs.errors import InputError, ShardwrightError
from .elastic import ERROR_FILE, TRACES, RankFailure, first_cause, read_failures, signal_at_parent_death, tell_to_end
from .messages import LAUNCH_TOKEN, Message, log_message, read_message

# The failing rank's traceback comes last; what ranks printed before would bury it.
TAIL_CHARACTERS = 6000
LONGEST_RUN_SECONDS = 90 * 86400.0
_POLL_SECONDS = 0.1
STOP_SECONDS = 600.0
"""Time for ranks to save a checkpoint when the command is interrupted; torchrun's 30 s are too short for large ones."""
_OTHERS_END_SECONDS = 5.0
"""Time for the other launchers of a job to report after one has failed: their failure may be the cause."""

_OUTER_LAUNCH = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|LOCAL_SIZE|GROUP_RANK|NODE_RANK|MASTER_ADDR|MASTER_PORT)$"
    r"|(ACCELERATE|FSDP|PARALLELISM_CONFIG|TORCHELASTIC|TORCHRUN|PET)_"
)
"""Variables of an enclosing launch or job script, which would contradict this one's."""


_NOISE = re.compile(
    r"DeepSpeed \S+ built successfully"
    r"|Gradient accumulation steps mismatch"
    r"|Failed to load CPU gemm_4bit_forward"
    r"|find_unused_parameters=True was specified in DDP constructor"
)
"""Lines of libraries that every rank prints and that need no action: they are not passed on."""


class LaunchFailedError(ShardwrightError):
    """A launch failed or ran out of time; names the rank that failed first if ranks recorded their errors."""

    def __init__(
        self,
        ending: str,
        *,
        output: str,
        launcher_exit_code: int | None,
        failures: Sequence[RankFailure] = (),
        collectives: Sequence[str] = (),
    ) -> None:
        message, self.exit_code = first_cause(failures) or (f"{ending}\n{output[-TAIL_CHARACTERS:]}", 1)
        super().__init__("\n".join([message, *collectives]))
        self.output = output
        self.failures = tuple(failures)
        self.launcher_exit_code = launcher_exit_code
        """Exit code of the launcher that failed first; `None` after the time limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launcher to start; several of them are the nodes of one job."""

    arguments: tuple[str, ...]
    """Arguments of `interpreter`, such as `-m torch.distributed.run ...`."""
    environment: Mapping[str, str] | None = None
    """Variables in addition to `cpu_rank_environment`."""
    program: tuple[str, ...] | None = None
    """Program instead of `interpreter`, which stops when its standard input ends, such as `ssh` and a host."""
    name: str | None = None
    """Name in failures; `None` for its command."""


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


def launch_ranks(
    *launches: Launch,
    timeout_seconds: float = LONGEST_RUN_SECONDS,
    on_message: Callable[[Message], None] = log_message,
    on_line: Callable[[str], None] | None = None,
) -> str:
    """Run one launcher, or several as the nodes of a job, and return their output; no process is left running.

    If one launcher fails or `timeout_seconds` pass, all are ended. `on_message` receives the messages of ranks,
    `on_line` every other line as it is printed, without known harmless messages of libraries.

    Raises:
        LaunchFailedError: a launcher failed or ran out of time; contains the error of the rank that failed first, else
            the end of the output.
    """
    token = uuid.uuid4().hex

    def on_output(line: str) -> None:
        message = read_message(line)
        if message is not None:
            on_message(message)
        elif on_line is not None and not _NOISE.search(line):
            on_line(line)

    with tempfile.TemporaryDirectory(prefix="shardwright-launch-", ignore_cleanup_errors=True) as directory:
        running: list[_Running] = []
        # Ranks of earlier runs may have left files of the same name in a directory of the user's.
        kept = next((os.environ[name] for name in DUMP_VARIABLES if os.environ.get(name)), None)
        traces, started_at = kept or f"{directory}/rank_", time.time()
        try:
            for index, launch in enumerate(launches):
                running.append(_Running(launch, Path(directory) / f"{index}.log", token, traces))
            failed, code = _wait(running, timeout_seconds, on_output)
        except (KeyboardInterrupt, SystemExit):
            # Ctrl-C, and SIGTERM to the command: ranks save a checkpoint, unless a second signal ends the wait.
            for started in running:
                if started.process.stdin is None:
                    started.process.terminate()
                else:
                    started.process.stdin.close()
            deadline = time.monotonic() + STOP_SECONDS
            while any(started.process.poll() is None for started in running) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            raise
        finally:
            _end_processes([started.process for started in running], token)
        text = "".join(started.text() for started in running)
        failures = [failure for started in running for failure in read_failures(started.error_file)]
        try:
            # torch writes records if ranks timed out.
            collectives = summary(Path(traces), since=started_at) if failed is not None else []
        except InputError as error:
            collectives = [str(error)]
    if failed is None:
        return text
    ending = f"stopped after {timeout_seconds:g} s" if code is None else f"exit code {code}"
    name = failed.name or " ".join([*(failed.program or [interpreter()]), *failed.arguments])
    raise LaunchFailedError(
        f"{name}: {ending}", output=text, launcher_exit_code=code, failures=failures, collectives=collectives
    )


class _Running:
    """A launcher whose output goes to a file, which is read while it grows."""

    def __init__(self, launch: Launch, log: Path, token: str, traces: str) -> None:
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
                    "TORCH_FR_BUFFER_SIZE": "2000",
                    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
                    **cpu_rank_environment(),
                    **(launch.environment or {}),
                    TRACES: traces,
                    LAUNCH_TOKEN: token,
                    ERROR_FILE: str(self.error_file),
                    # torchrun's `--shutdown-timeout`, which accelerate has no flag for.
                    "PET_SHUTDOWN_TIMEOUT": str(int(STOP_SECONDS)),
                },
                # On SIGTERM a launcher ends its ranks.
                preexec_fn=signal_at_parent_death(signal.SIGTERM),
            )

    def new_lines(self) -> list[str]:
        """Return the complete lines since the last call."""
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
    """Return the launch that failed and its exit code, which is `None` after the time limit."""
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
    # Two versions of ninja would each rebuild DeepSpeed's operators, so this Python's directory comes first.
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


def _end_processes(launchers: Sequence[subprocess.Popen[bytes]], token: str) -> None:
    """Kill the remaining processes of a launch; repeat until none is found, since ranks may still be starting."""
    for launcher in launchers:
        if launcher.stdin is not None and launcher.poll() is None:
            tell_to_end(launcher)
    for _ in range(20):
        left = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(LAUNCH_TOKEN) == token:
                    left.append(process)
                    process.kill()
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.kill()
        if not left:
            break
        psutil.wait_procs(left, timeout=1.0)
    for launcher in launchers:
        launcher.wait()
