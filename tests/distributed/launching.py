"""Starts torchrun and accelerate launch with a hard time limit, and tells what the failing rank said."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

TAIL_CHARACTERS = 6000
GRACE_SECONDS = 5.0
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*\S.*")


class LaunchFailedError(RuntimeError):
    """A launch ended with an error or ran out of time."""


def torchrun(arguments: Sequence[str], *, ranks: int = 2, timeout_seconds: float = 240.0) -> str:
    """Run a script or ``-m module`` on CPU ranks and return what it printed."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return run([*command, "--master-port", str(free_port()), *arguments], timeout_seconds=timeout_seconds)


def accelerate_launch(
    config_file: Path, module: str, arguments: Sequence[str], *, timeout_seconds: float = 240.0
) -> str:
    """Run ``accelerate launch --config_file config_file -m module`` and return what it printed."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config_file)]
    port = ["--main_process_port", str(free_port())]
    return run([*launcher, *port, "-m", module, *arguments], timeout_seconds=timeout_seconds)


def run(arguments: Sequence[str], *, timeout_seconds: float, environment: Mapping[str, str] | None = None) -> str:
    """Run this Python with ``arguments`` and leave no process behind.

    Raises:
        LaunchFailedError: It failed, or it was stopped after ``timeout_seconds``; the message ends with the
            traceback of the rank that failed first.
    """
    # Two versions of ninja would each rebuild DeepSpeed's operators: use the one beside this Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    modules = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    visible = {
        "PATH": path,
        "PYTHONPATH": modules,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, *arguments]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **visible, **(environment or {})},
        )
        try:
            code: int | None = process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_processes(process)
        output.seek(0)
        text = output.read()
    if code == 0:
        return text
    ending = f"stopped after {timeout_seconds:g} s" if code is None else f"exit code {code}"
    raise LaunchFailedError(f"{' '.join(command)}: {ending}\n{first_traceback(text)}")


def first_traceback(text: str) -> str:
    """Return the first traceback in ``text``, without the launcher's own; the end of ``text`` when there is none."""
    text = _RANK_PREFIX.sub("", text)
    found = [match.group() for match in _TRACEBACK.finditer(text) if "ChildFailedError" not in match.group()]
    return found[0] if found else text[-TAIL_CHARACTERS:]


def free_port() -> int:
    """Return a TCP port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _end_processes(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and its ranks: torchrun puts every rank into a session of its own, out of reach of killpg."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
