"""Replacement for the Python interpreter that runs its arguments in a warm process and exits with the same status.

Started with `-I -S`, so that it takes milliseconds. It forwards signals; when it is killed, its connection closes and
the server kills the process.
"""

import os
import select
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120

from protocol import HANDLED_SIGNALS, exit_with, receive_number, request_process


def main() -> None:
    process = 0
    waiting = []

    def forward(number: int, _: object) -> None:
        if process:
            os.kill(process, number)
        else:
            waiting.append(number)

    connection = request_process(sys.argv[1:], os.environ, os.getcwd(), (0, 1, 2))  # noqa: PTH109
    for number in HANDLED_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    process = receive_number(connection) or 0
    for number in waiting:
        os.kill(process, number)
    # A signal that arrives just before a call blocks is handled after it, so no wait is long.
    while not select.select([connection], [], [], 1)[0]:
        pass
    status = receive_number(connection)
    if status is None:
        sys.exit("the server of warm processes has ended")
    exit_with(status)


main()
