"""An address of the Hub that is none is named before anything is imported that reads it."""

from __future__ import annotations

import pytest
from shardwright.cli.main import run


@pytest.mark.parametrize("address", ["http://[bad", "huggingface.co", "https://", "http://host:port", "ftp://host"])
def test_a_malformed_endpoint_is_one_line(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert run(["evaluate", "model", "--dataset", "notes.txt"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: HF_ENDPOINT = {address!r}: is not a URL of a Hub; set it to")
