"""Stands in for the interpreter: lets the server of warm processes run what it was given, and ends as that ends.

Started by file name with `-I -S`, so that it costs milliseconds. Signals are passed on; when it is killed, the server
sees its connection close and kills the process.
"""

import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120

from protocol import HANDLED_SIGNALS, ask, end_as, receive_number


def main() -> None:
    """Run the arguments of this process elsewhere."""
    process = 0
    waiting = []

    def pass_on(number: int, _: object) -> None:
        if process:
            os.kill(process, number)
        else:
            waiting.append(number)

    connection = ask(sys.argv[1:], os.environ, os.getcwd(), (0, 1, 2))  # noqa: PTH109
    for number in HANDLED_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    process = receive_number(connection) or 0
    for number in waiting:
        os.kill(process, number)
    status = receive_number(connection)
    if status is None:
        sys.exit("the server of warm processes has ended")
    end_as(status)


main()
