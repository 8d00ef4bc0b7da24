"""A first signal is noted, what follows at once is the same request, and a later one ends the process."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable

import pytest
from shardwright.trainers.guards import signals
from shardwright.trainers.guards.signals import StoppedBySignalError, StopRequest


def in_a_child(work: Callable[[], object]) -> int:
    """Return how a forked process ends that does some work: its exit code, or minus its signal."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_signals_are_noted_and_given_back():
    before = signal.getsignal(signal.SIGTERM)
    request = StopRequest(0.3)
    request.install()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert request.number == signal.SIGTERM
        request.remove()
        request.install()
        assert request.number == 0, "another training was not asked to stop"
    finally:
        request.remove()
    assert signal.getsignal(signal.SIGTERM) == before
    # The limit went with it: this process is not ended.
    time.sleep(0.4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(number, monkeypatch):
    monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 0.0)

    def work() -> None:
        StopRequest(60.0).install()
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        os.kill(os.getpid(), number)
        time.sleep(30)

    assert in_a_child(work) == 128 + number


def test_a_process_that_cannot_stop_in_time_is_ended():
    def work() -> None:
        StopRequest(0.05).install()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    assert in_a_child(work) == 143


def test_the_error_reaches_another_process_whole():
    error = copy.copy(StoppedBySignalError("stopped", number=15))
    assert (str(error), error.exit_code) == ("stopped", 143)
