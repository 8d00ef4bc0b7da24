"""Launches over an `ssh` of our own that runs its command here: hosts that die or were never there."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from pathlib import Path

import pytest
from shardwright.ds_configs.plan.rendering import NodeCommand
from shardwright.ds_configs.specs.errors import ShardwrightError, UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.plugins.clusters import Hosts, node_launches, read_hostfile, run_over_ssh
from shardwright.plugins.launching import launch

SSH = """#!/bin/sh
# ssh OPTIONS -- HOST COMMAND
while [ "$1" != "--" ]; do shift; done
[ -e "$HOSTS/$2" ] || { echo "no route to $2" >&2; exit 255; }
[ "$3" = true ] && exit 0
echo "$3" >> "$HOSTS/ran"
exec sh -c "$3"
"""
WORKER = """
import os, sys, threading, time
def end():
    os.read(0, 9)
    os._exit(9)
threading.Thread(target=end, daemon=True).start()
words = sys.argv[1:]
rank = words[words.index("--node-rank") + 1]
while os.path.exists(os.path.join(os.environ["HOSTS"], "host-" + rank)):
    time.sleep(0.02)
os._exit(255)
"""


HARDWARE = parse_hardware("2x8xA100-80GB")


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory with a file for each host that answers."""
    directory = tmp_path / "hosts"
    directory.mkdir()
    for name in ("host-0", "host-1"):
        (directory / name).touch()
    script = tmp_path / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(SSH)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    monkeypatch.setenv("HOSTS", str(directory))
    monkeypatch.setattr(launch, "_OTHERS_END_SECONDS", 0.2)
    return directory


def command(tmp_path: Path) -> NodeCommand:
    (tmp_path / "worker.py").write_text(WORKER)
    program = (sys.executable, str(tmp_path / "worker.py"))
    return NodeCommand(program=program, words=("launch", "/plans/my plan", "--", "--dataset", "x"))


def test_a_host_that_dies_ends_the_run_on_all_hosts(hosts: Path, tmp_path: Path) -> None:
    def lose() -> None:
        while not (hosts / "ran").exists() or len((hosts / "ran").read_text().splitlines()) < 2:
            time.sleep(0.02)
        (hosts / "host-1").unlink()

    thread = threading.Thread(target=lose)
    thread.start()
    with pytest.raises(ShardwrightError, match="host-1: exit code 255"):
        run_over_ssh(command(tmp_path), Hosts(names=("host-0", "host-1")), port=29500, on_line=print)
    thread.join()


def test_a_host_that_never_answers_is_named(hosts: Path, tmp_path: Path) -> None:
    names = Hosts(names=("host-0", "host-2"))
    with pytest.raises(ShardwrightError, match=r"host-2: no answer over ssh \(no route to host-2\)"):
        run_over_ssh(command(tmp_path), names, port=29500, on_line=print)
    assert not (hosts / "ran").exists()


def test_command_for_a_host_is_one_quoted_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("NCCL_DEBUG", "IN FO")
    command = NodeCommand(words=("launch", "/plans/my plan", "--", "/my scripts/a;b.py", "--say", "it's $HOME"))
    launches = node_launches(command, Hosts(names=("a", "b")), port=1234, directory=Path("/work dir"))
    (text,) = launches[1].arguments
    words = shlex.split(text)
    assert words[:3] == ["cd", "/work dir", "&&"]
    assert "NCCL_DEBUG=IN FO" in words
    assert "hf_secret" not in text
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--main-address") + 1] == "a"
    assert words[words.index("--") + 1 :] == ["/my scripts/a;b.py", "--say", "it's $HOME"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node-0 slots=8\nnode-1 slots=8\n", "contains placeholders"),
        ("a slots=8\na slots=8\n", "lists a machine twice"),
        ("a slots=8\nb slots=4\n", "has 4 slots, but the plan has 8"),
        ("a slots=0\nb slots=8\n", "must have the form HOST slots=N"),
        ("a slots=8\n-oProxyCommand=x slots=8\n", "must have the form HOST slots=N"),
    ],
)
def test_hostfiles_that_do_not_fit_the_plan(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "hostfile").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_hostfile(tmp_path / "hostfile", HARDWARE)


def test_a_hostfile_as_deepspeed_reads_it(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("# machines\n\n10.0.0.1 slots=8  # rack 1\nworker-2 slots=8\n")
    assert read_hostfile(tmp_path / "hostfile", HARDWARE) == ("10.0.0.1", "worker-2")
