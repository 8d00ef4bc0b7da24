"""Run a program and a server of warm processes that ends with it: `with_server.py PROGRAM ...`.

A network namespace has its own abstract socket names, so it cannot reach the session's server. This one has the same
name inside the namespace.
"""

import os
import socket
import sys
from pathlib import Path

from protocol import SERVER_NAME, address

if __name__ == "__main__":
    # Bound before the program starts, which can then connect immediately.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address(os.environ[SERVER_NAME]))
    listener.listen(64)
    if os.fork() == 0:
        listener.set_inheritable(True)
        server = str(Path(__file__).with_name("server.py"))
        os.execv(sys.executable, [sys.executable, server, str(listener.fileno())])  # noqa: S606
    listener.close()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606
