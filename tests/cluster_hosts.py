"""Two hosts of their own addresses on this machine: network, host name, processes and `/dev/shm` apart, files shared.

Needs root and Debian's iproute2 and util-linux. What ran in them ends with them.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from shardwright.plugins.launching.launch import cpu_rank_environment

NAMES = ("shardwright-1", "shardwright-2")
_BRIDGE = "shardwright-b"
_NETWORK = "10.83.7."
_LOCK = "/run/shardwright-hosts.lock"
_NOT_INHERITED = ("TMPDIR", "SHARDWRIGHT_LAUNCH_TOKEN")
"""A directory of the session is none of a host's."""
_WITH_SERVER = Path(__file__).parent / "warm_ranks" / "with_server.py"


class Hosts:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.addresses = {name: f"{_NETWORK}{index}" for index, name in enumerate(NAMES, start=1)}
        self._inits: dict[str, subprocess.Popen[bytes]] = {}

    def make(self) -> None:
        """Build the network; what a run that was killed left of it goes first."""
        self.remove()
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{_NETWORK}254/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        names = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        (self.directory / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        for index, (name, address) in enumerate(self.addresses.items()):
            _ip("netns", "add", name)
            _ip("link", "add", f"shardwright-v{index}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"shardwright-v{index}", "master", _BRIDGE, "up")
            for words in (["addr", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                _ip("-netns", name, *words)
            _ip("-netns", name, "link", "set", "lo", "up")

    def start(self, name: str, script: str) -> None:
        """Start a host with a shell script as its first process, with which all others end, warm ones among them."""
        mounts = f"mount --bind {shlex.quote(str(self.directory / 'hosts'))} /etc/hosts; mount -t tmpfs tmpfs /dev/shm"
        # What ranks import is there by the time that they start.
        warm = shlex.join([sys.executable, str(_WITH_SERVER), "/bin/sh", "-c", f'"$PYTHON_EXEC" -c pass & {script}'])
        whole = f"hostname {name}; {mounts}; exec {warm}"
        apart = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (self.directory / f"{name}.log").open("ab") as log:
            self._inits[name] = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{name}", *apart, "/bin/sh", "-c", whole],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_of_hosts(cpu_rank_environment()),
            )

    def kill(self, name: str) -> None:
        self._inits[name].kill()
        self._inits[name].wait()

    def remove(self) -> None:
        for name, init in self._inits.items():
            if init.poll() is None:
                self.kill(name)
        for name in NAMES:
            _ip("netns", "del", name, check=False)
        # The kernel takes its own time for what a network namespace held.
        for index in range(len(NAMES)):
            _ip("link", "del", f"shardwright-v{index}", check=False)
        _ip("link", "del", _BRIDGE, check=False)


def environment(**changes: str) -> dict[str, str]:
    """Return the variables of a command that concerns the hosts."""
    return _of_hosts(os.environ) | changes


def _of_hosts(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in _NOT_INHERITED}


@contextmanager
def two_hosts(directory: Path) -> Iterator[Hosts]:
    """Make the network of two hosts, and take everything away in the end; another run on this machine is waited for."""
    hosts = Hosts(directory)
    with FileLock(_LOCK):
        hosts.make()
        try:
            yield hosts
        finally:
            hosts.remove()


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


def logs(directory: Path, names: Sequence[str] = NAMES) -> str:
    return "".join((directory / f"{name}.log").read_text(errors="replace") for name in names)
