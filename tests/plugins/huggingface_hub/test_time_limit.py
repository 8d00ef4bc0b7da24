"""Requests to a Hub that does not answer end with an error; a slow one is waited for."""

from __future__ import annotations

import threading
import time

import pytest
from shardwright.plugins.huggingface_hub import hub
from shardwright.plugins.huggingface_hub.hub import HubTimeoutError, within_limit


def test_silence_is_reported_of_and_given_up(monkeypatch, capsys):
    monkeypatch.setattr(hub, "FIRST_WORD_SECONDS", 0.1)
    with pytest.raises(HubTimeoutError, match=r"model a/b: the Hub did not answer within 0\.4 s; try again later"):
        within_limit(lambda: threading.Event().wait(60), "model a/b", limit=0.4)
    assert "waiting for the Hub: model a/b, 0 s" in capsys.readouterr().err


def test_answers_and_errors_come_through():
    assert within_limit(lambda: 7, "a", limit=5.0) == 7
    with pytest.raises(KeyError):
        within_limit(lambda: {}["x"], "a", limit=5.0)


@pytest.mark.slow
def test_a_download_that_moves_resumes_and_a_drip_does_not():
    began = time.monotonic()

    def arrived() -> int:
        return int((time.monotonic() - began) * 1_000_000)

    assert within_limit(lambda: time.sleep(0.9) or "done", "a", limit=0.3, arrived=arrived) == "done"
    with pytest.raises(HubTimeoutError):
        within_limit(lambda: time.sleep(30), "a", limit=0.3, arrived=lambda: int(time.monotonic() - began))
