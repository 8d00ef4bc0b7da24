"""torch's elastic launcher and its ranks: failures that its launcher reads, their network interfaces, and their end.

`recorded` wraps the main function of a rank. Run as a module, this file is `accelerate` or `torchrun`, and stores the
failures of its ranks: with torch 2.13.0, `ChildFailedError` has exit codes, signals and error files, but only its text
outlives the process.

gloo listens on the address of the host's own name, which is 127.0.1.1 in Debian's `/etc/hosts`, so that ranks of two
such nodes cannot connect. NCCL uses the first interface, which may be a container's. Ranks therefore use loopback on a
single node, else the interface of the route to the other nodes. A `TCPStore` listens on every interface, even for host
`127.0.0.1`, unless it gets a bound socket; anyone who can connect to a store can write to it.

Ranks of a killed launcher continue to train as orphans and write checkpoints. On Linux
`PR_SET_PDEATHSIG` of prctl ends them. A launcher on another machine only has its standard input: a signal to `ssh` ends
the connection but not the remote process. The remote process therefore reads its standard input. At its end it stops as
after SIGTERM, so that ranks save a checkpoint; after the word "end" it stops immediately.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ...ds_configs.check.flight_recorder import DUMP_VARIABLES
from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from .. import patches
from .messages import LAUNCH_TOKEN

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the file for a process's failure; torchrun sets it for each rank."""
TRACES = DUMP_VARIABLES[0]
"""Variable with the beginning of the files into which ranks write their collective operations after a timeout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """Failure of a rank or of the launcher."""

    rank: int | None
    """`None` for the launcher."""
    message: str
    """Error of this package, else type and text of the exception; empty after a signal."""
    traceback: str = ""
    """Of exceptions that are not errors of this package."""
    exit_code: int = 1
    """Exit code for the command that launched it."""
    seconds: float = 0.0
    """Time of the exception, since the epoch."""
    signal: str | None = None


def recorded(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap the main function of a rank, so that the launcher gets its exception and the rank ends with the launcher."""
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

    class Handler(ErrorHandler):
        def record_exception(self, e: BaseException) -> None:
            if not os.environ.get(ERROR_FILE):
                return
            # torchrun reads `message` and integer seconds, within which two ranks may fail.
            extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
            failure: dict[str, Any] = {"message": {"message": f"{type(e).__name__}: {e}", "extraInfo": extra}}
            failure["seconds"] = time.time()
            if isinstance(e, ShardwrightError):
                failure["known"] = {"message": str(e), "exit_code": e.exit_code}
            Path(os.environ[ERROR_FILE]).write_text(json.dumps(failure), encoding="utf-8")
            if "Timed out waiting" in str(e):
                write_collectives()

    def launched() -> None:
        # A rank that was started by hand may outlive its shell.
        if "TORCHELASTIC_RUN_ID" in os.environ and (end_with_launcher := signal_at_parent_death(signal.SIGKILL)):
            end_with_launcher()
        stay_on_loopback()
        main()

    wrapped: Callable[[], None] = record(launched, error_handler=Handler())
    return wrapped


def write_collectives() -> None:
    """Write this rank's collective operations for its launcher; on ranks without one, do nothing.

    NCCL's watchdog writes them after its own timeout. gloo records them too (torch 2.13.0), but nothing writes them.
    """
    if os.environ.get(TRACES):
        from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

        # A directory that cannot be written must not hide why the rank ends.
        with contextlib.suppress(OSError):
            Path(f"{os.environ[TRACES]}{os.environ.get('RANK', '0')}").write_bytes(_dump_fr_trace())


def first_cause(failures: Sequence[RankFailure]) -> tuple[str, int] | None:
    """Return the cause of a failed launch and its exit code: ranks killed by a signal, else the first exception.

    Other ranks fail as a consequence. `None` if no rank recorded a failure.
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
    """Return the failures that a launcher, or a rank without one, recorded."""
    if not file.is_file():
        return []
    recorded_failures = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(recorded_failures, list):
        return [RankFailure(**failure) for failure in recorded_failures]
    # torchrun itself runs under torch's `record`, which records no fractions of a second.
    return _failures(0 if "seconds" in recorded_failures else None, 1, recorded_failures)


def _failures(rank: int | None, exit_code: int, data: Mapping[str, Any]) -> list[RankFailure]:
    """Return the failure of one rank; empty if its launcher ended it."""
    message = data.get("message")
    if isinstance(message, Mapping):
        extra = message["extraInfo"]
        known = data.get("known", {"message": message["message"], "traceback": extra["py_callstack"]})
        return [RankFailure(rank=rank, seconds=data.get("seconds", float(extra["timestamp"])), **known)]
    # Elastic ends the other ranks by SIGTERM after a failure.
    if exit_code >= 0 or exit_code == -signal.SIGTERM:
        return []
    return [RankFailure(rank=rank, message="", signal=signal_name(-exit_code))]


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number if it has no name on this system."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_MAIN_ADDRESS = ("--main_process_ip", "--master-addr")
"""Flags of Accelerate and torchrun for several nodes."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables with the interface of a backend."""
_BACKLOG = 2048


def main_address(command: Sequence[str]) -> str | None:
    """Return the main address in a launch command; `None` for one node.

    >>> main_address(["torchrun", "--nnodes=2", "--master-addr", "node-1", "script.py"])
    'node-1'
    """
    # Words after `-m` belong to the module.
    end = command.index("-m") if "-m" in command else len(command)
    flags = [index for index, word in enumerate(command[:end]) if word in _MAIN_ADDRESS]
    return command[flags[0] + 1] if flags else None


def meet(main: str | None) -> None:
    """Make this launcher and its ranks listen on the interface to the other nodes; call it before they start.

    Raises:
        UsageError: the main node's name cannot be resolved, or there is no route to it.
    """
    if main is None:
        # torchrun's `--local-addr`, where ranks connect.
        os.environ.setdefault("PET_LOCAL_ADDR", "127.0.0.1")
        stay_on_loopback()
        return
    address = own_address(main)
    os.environ.setdefault("PET_LOCAL_ADDR", address)
    interfaces = psutil.net_if_addrs().items()
    interface = next((name for name, entries in interfaces for entry in entries if entry.address == address), None)
    if interface is not None:
        for name in _INTERFACES:
            os.environ.setdefault(name, interface)


def own_address(main: str) -> str:
    """Return this node's address on the route to another.

    Raises:
        UsageError: the other node's name cannot be resolved, or there is no route to it.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(main, 9, type=socket.SOCK_DGRAM)[0]
        # Connecting a datagram socket only reads the routing table; nothing is sent.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        rule, fix = f"cannot be reached from {socket.gethostname()} ({error.strerror})", "name the main node's address"
        raise UsageError(ConfigError(where="main_address", value=main, rule=rule, fix=fix)) from None


def stay_on_loopback() -> None:
    """On a single node, make this rank or launcher listen on loopback only; call it before ranks connect."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        for name in _INTERFACES:
            os.environ.setdefault(name, "lo")
    for name in patches.names("loopback-store-"):
        patches.apply(name, lambda plain: partial(_store, plain))


def _store(plain: Any, host_name: str, port: int, *args: Any, **kwargs: Any) -> Any:
    """Create a store; for a loopback host, bind its server to 127.0.0.1 only."""
    # The fourth argument, after the world size.
    is_master = args[1] if len(args) > 1 else kwargs.get("is_master", False)
    is_loopback = host_name == "localhost"
    with contextlib.suppress(ValueError):
        is_loopback = is_loopback or ipaddress.ip_address(host_name).is_loopback
    if is_master and is_loopback:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            # This process shares its server, or torch reports the error.
            listener.close()
        else:
            listener.listen(_BACKLOG)
            kwargs["master_listen_fd"] = listener.fileno()
            port = listener.getsockname()[1]
            listener.detach()
    return plain(host_name, port, *args, **kwargs)


# `PR_SET_PDEATHSIG` of linux/prctl.h.
_SET_PARENT_DEATH_SIGNAL = 1


def signal_at_parent_death(number: signal.Signals) -> Callable[[], object] | None:
    """Return a function that makes a process get a signal when its parent dies; `None` on unsupported systems."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_SET_PARENT_DEATH_SIGNAL, number)


_END = b"end\n"
_STANDARD_INPUT = 0
_SECONDS_TO_END = 10.0
"""Time for the other machine to kill its ranks, which occupy accelerator memory."""
_SECONDS_BETWEEN_SIGNALS = 0.5


def tell_to_end(launcher: subprocess.Popen[bytes]) -> None:
    """Make a launcher on another machine kill its ranks, and wait some seconds for it."""
    assert launcher.stdin is not None, "its standard input is a pipe"
    with contextlib.suppress(OSError, ValueError):
        launcher.stdin.write(_END)
        launcher.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(timeout=_SECONDS_TO_END)


def stop_with_stdin() -> None:
    """Stop this process when its standard input, the connection that started it, ends."""

    def read_to_end() -> None:
        # Unbuffered: a thread that holds the lock of a buffer keeps Python from exiting.
        received = b""
        while chunk := os.read(_STANDARD_INPUT, 4096):
            received += chunk
        os.kill(os.getpid(), signal.SIGTERM)
        if _END in received:
            # After the first signal ranks save a checkpoint; the second one stops that.
            time.sleep(_SECONDS_BETWEEN_SIGNALS)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read_to_end, daemon=True, name="standard input").start()


def main(command: Sequence[str]) -> int:
    """Run `accelerate` or `torchrun` in this process; write failures of ranks to `ERROR_FILE`."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if command[0] == "accelerate":
        from accelerate.commands.accelerate_cli import main as launcher

        # With one rank, Accelerate starts this Python, where torchrun would read the variable.
        sys.executable = os.environ.get("PYTHON_EXEC") or sys.executable
    else:
        from torch.distributed.run import main as launcher
    file = Path(os.environ[ERROR_FILE]) if os.environ.get(ERROR_FILE) else None
    if file is not None:
        # torchrun never removes the error files of its ranks; this directory is removed with the launch.
        tempfile.tempdir = str(file.parent)
    if LAUNCH_TOKEN in os.environ:
        # `launch_ranks` reports the failed rank itself.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Warnings to the developers of libraries, repeated by every rank and step.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    sys.argv = list(command)
    meet(main_address(command))
    try:
        launcher()
    except ChildFailedError as error:
        failures = [
            asdict(failure)
            for rank, ended in error.failures.items()
            for failure in _failures(rank, ended.exitcode, ended.error_file_data)
        ]
        if file is not None:
            file.write_text(json.dumps(failures), encoding="utf-8")
        if file is None or LAUNCH_TOKEN not in os.environ:
            print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
