"""Requests to a Hub that does not answer end with an error; a slow one is waited for, and a denied one is named."""

from __future__ import annotations

import threading

import httpx
import pytest
from huggingface_hub import constants
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.plugins import huggingface_hub as hub
from shardwright.plugins.huggingface_hub import explain_hub_error, hub_status, within_limit


def test_silence_is_reported_and_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(hub, "_NOTICE_SECONDS", 0.1)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    with pytest.raises(ShardwrightError, match=r"model a/b: the Hub did not answer within 0\.3 s; try again later"):
        within_limit(lambda: threading.Event().wait(60), "model a/b")
    assert "waiting for the Hub: model a/b" in caplog.messages


@pytest.mark.parametrize(("status", "expected"), [(403, 403), (401, 401), (404, None)])
def test_a_denied_download_that_ends_as_a_file_that_is_not_cached_is_denied(status: int, expected: int | None) -> None:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    request = httpx.Request("GET", "https://hub/config.json")
    try:
        try:
            raise HfHubHTTPError("no", response=httpx.Response(status, request=request))
        except HfHubHTTPError as denied:
            raise LocalEntryNotFoundError("not cached") from denied
    except LocalEntryNotFoundError as error:
        assert hub_status(error) == expected
        assert (f"({status})" in str(explain_hub_error("a/b", None, error))) == (expected is not None)
