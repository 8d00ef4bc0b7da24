"""The server of the page: its address, its errors and its origin policy."""

from __future__ import annotations

import http.client
import importlib.util
import socket
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from shardwright.cli.main import run
from shardwright.cli.page.server import POLICY, is_loopback, listening_socket
from shardwright.ds_configs.specs.errors import UsageError


def test_a_port_in_use_is_one_line_with_a_fix(capsys):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        assert run(["ui", "--port", str(port)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"port = {port}: cannot listen at 127.0.0.1 (address already in use)" in line
    assert "pass another --port, or --port 0" in line


def test_without_gradio_one_line_names_the_extra(capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gradio" else found(name))
    assert run(["ui", "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("pip install 'shardwright[ui]'")


@pytest.mark.parametrize("host", ["no host", "999.1.1.1", "a" * 300])
def test_an_invalid_host_is_rejected(host):
    with pytest.raises(UsageError, match=r"use 127\.0\.0\.1"):
        listening_socket(host, 0)


def test_invalid_ports_are_rejected(capsys):
    assert run(["ui", "--port", "70000"]) == 2
    assert "port = 70000" in capsys.readouterr().err


def test_only_names_of_this_machine_are_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.2", "example.com")))  # noqa: S104


def test_the_policy_names_no_other_machine():
    assert "http" not in POLICY and "*" not in POLICY


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Run the command in a process of its own, and return the address that it prints."""
    command = [sys.executable, "-m", "shardwright", "ui", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize("path", ["/config", "/gradio_api/info", "/gradio_api/queue/join"])
def test_pages_of_other_origins_are_rejected(address, path, method):
    """Another port of this machine is another origin, and so are another scheme and another name of it."""
    port = address.rsplit(":", 1)[1]
    for origin in ("http://localhost:1234", f"https://127.0.0.1:{port}", f"http://localhost:{port}", "null"):
        answer = requested(address + path, method, origin)
        assert answer.status == 403
        assert not [name for name in answer.headers if name.lower().startswith("access-control-")]
        assert f"only pages of {address}" in answer.read().decode()


def test_the_page_itself_is_answered(address):
    assert requested(f"{address}/config", "GET", address).status == 200
    assert requested(f"{address}/config", "GET", None).status == 200


def requested(address: str, method: str, origin: str | None) -> http.client.HTTPResponse:
    """Return what a server answers to a page of an origin; `None` for no page."""
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.netloc, timeout=30)
    headers = {"Access-Control-Request-Method": "POST"} | ({"Origin": origin} if origin else {})
    connection.request(method, url.path, headers=headers)
    return connection.getresponse()
