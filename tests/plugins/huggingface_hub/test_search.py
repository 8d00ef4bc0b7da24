"""Searches of the Hub that fail: one line each, with the way out; the page's tests search one that answers."""

from __future__ import annotations

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.plugins.huggingface_hub.hub import http_client, search_models

httpx = http_client()
BUSY = httpx.Response(503, request=httpx.Request("GET", "http://127.0.0.1/api/models"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (httpx.ConnectError("refused"), "the Hub cannot be searched (ConnectError); write ORG/NAME"),
        (OfflineModeIsEnabled("off"), "offline mode is on (HF_HUB_OFFLINE): the Hub cannot be searched"),
        (HfHubHTTPError("busy", response=BUSY), "search for models: the Hub answered 503; try again later"),
    ],
)
def test_a_search_that_fails_is_one_line(monkeypatch, error, said):
    def fail(*_, **named):
        assert named["search"] == "llama"
        raise error
        yield

    monkeypatch.setattr(HfApi, "list_models", fail)
    with pytest.raises(ShardwrightError) as caught:
        search_models("llama")
    assert str(caught.value) == said
