"""The server of the page: where it listens, and what is said when it cannot."""

from __future__ import annotations

import importlib.util
import socket

import pytest
from shardwright.cli.main import run
from shardwright.cli.page.server import POLICY, is_loopback, listening_socket
from shardwright.ds_configs.specs.errors import UsageError


def test_a_taken_port_is_one_line_with_the_way_out(capsys):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        assert run(["ui", "--port", str(port)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"port = {port}: cannot be listened on at 127.0.0.1 (address already in use)" in line
    assert "give another --port, or --port 0" in line


def test_without_gradio_one_line_names_the_extra(capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gradio" else found(name))
    assert run(["ui", "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("pip install 'shardwright[ui]'")


@pytest.mark.parametrize("host", ["no host", "999.1.1.1", "a" * 300])
def test_a_host_that_is_none_is_refused(host):
    with pytest.raises(UsageError, match=r"use 127\.0\.0\.1"):
        listening_socket(host, 0)


def test_ports_beyond_any_are_refused(capsys):
    assert run(["ui", "--port", "70000"]) == 2
    assert "port = 70000" in capsys.readouterr().err


def test_only_names_of_this_machine_are_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.2", "example.com")))  # noqa: S104


def test_the_policy_names_no_other_machine():
    assert "http" not in POLICY and "*" not in POLICY
