"""Runs a program with a server of warm processes beside it, which ends with the program: `beside.py PROGRAM ...`.

A host that is a network namespace does not see the session's server, whose socket has a name of another namespace: this
one listens there under the same name.
"""

import os
import socket
import sys
from pathlib import Path

from protocol import SERVER_NAME, address

if __name__ == "__main__":
    # Bound before the program starts, so that it is never too early.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address(os.environ[SERVER_NAME]))
    listener.listen(64)
    if os.fork() == 0:
        listener.set_inheritable(True)
        server = str(Path(__file__).with_name("server.py"))
        os.execv(sys.executable, [sys.executable, server, str(listener.fileno())])  # noqa: S606
    listener.close()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606
