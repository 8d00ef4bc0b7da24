"""Requests to a Hub that does not answer end with an error; a slow one is waited for."""

from __future__ import annotations

import threading

import pytest
from huggingface_hub import constants
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.plugins.huggingface_hub import hub
from shardwright.plugins.huggingface_hub.hub import within_limit


def test_silence_is_reported_and_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(hub, "_NOTICE_SECONDS", 0.1)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    with pytest.raises(ShardwrightError, match=r"model a/b: the Hub did not answer within 0\.3 s; try again later"):
        within_limit(lambda: threading.Event().wait(60), "model a/b")
    assert "waiting for the Hub: model a/b" in caplog.messages
