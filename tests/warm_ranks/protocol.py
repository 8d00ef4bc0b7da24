"""Messages between the server of warm processes and its clients. `interpreter.py` must start quickly: few imports.

A request contains the arguments, environment and directory of a process, and carries its three standard streams as file
descriptors. The answers are the process id and, when the process has ended, its exit status, negative for a signal.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any

SERVER_NAME = "WARM_RANKS_SERVER"
"""Environment variable with the name of the session's server."""
OPERATORS = ("cpu_adam", "deepspeed_shm_comm")
"""DeepSpeed's operators that ranks of tests load."""
HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that are forwarded; whether they are ignored is part of a request."""
_NUMBER_BYTES = 4
_STREAMS = 3


def address(name: str) -> str:
    """Return the address of a server in Linux's abstract namespace, which leaves no file behind."""
    return f"\0shardwright-tests-{name}"


def request_process(
    arguments: Sequence[str], environment: Mapping[str, str], directory: str, streams: Sequence[int]
) -> Any:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address(environment[SERVER_NAME]))
    request = {
        "arguments": list(arguments),
        "environment": dict(environment),
        "directory": directory,
        "ignored_signals": [number for number in HANDLED_SIGNALS if signal.getsignal(number) is signal.SIG_IGN],
    }
    body = json.dumps(request).encode()
    descriptors = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))]
    connection.sendmsg([len(body).to_bytes(_NUMBER_BYTES, "big")], descriptors)
    connection.sendall(body)
    return connection


def receive_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a request and its streams; `None` when the client has closed the connection."""
    descriptors = array.array("i")
    prefix, ancillary, _, _ = connection.recvmsg(_NUMBER_BYTES, socket.CMSG_LEN(_STREAMS * descriptors.itemsize))
    if len(prefix) < _NUMBER_BYTES:
        return None
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    body = _receive(connection, size := int.from_bytes(prefix, "big"))
    if len(body) < size:
        # The client was killed while it sent the request.
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return json.loads(body), list(descriptors)


def send_number(connection: socket.socket, number: int) -> None:
    """Send a process id or an exit status."""
    connection.sendall(number.to_bytes(_NUMBER_BYTES, "big", signed=True))


def receive_number(connection: socket.socket) -> int | None:
    """Return what `send_number` sent; `None` when the server has ended."""
    received = _receive(connection, _NUMBER_BYTES)
    return int.from_bytes(received, "big", signed=True) if len(received) == _NUMBER_BYTES else None


def exit_with(status: int) -> None:
    """End this process with an exit status, or by a signal for a negative one."""
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count and (chunk := connection.recv(count - len(received))):
        received += chunk
    return received
