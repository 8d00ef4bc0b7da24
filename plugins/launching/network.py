"""Network interfaces for launchers and ranks: loopback on a single node, else the route to the other nodes.

Seen with torch 2.13.0: gloo listens on the address of the host's own name, which is 127.0.1.1 in Debian's `/etc/hosts`,
so that ranks of two such nodes cannot connect. NCCL uses the first interface, which may be a container's.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import psutil

from ...ds_configs.specs.errors import ConfigError, UsageError

_MAIN_ADDRESS = ("--main_process_ip", "--master-addr")
"""Flags of Accelerate and torchrun for several nodes."""


def main_address(command: Sequence[str]) -> str | None:
    """Return the main address in a launch command; `None` for one node.

    >>> main_address(["torchrun", "--nnodes=2", "--master-addr", "node-1", "script.py"])
    'node-1'
    """
    # Words after `-m` belong to the module.
    end = command.index("-m") if "-m" in command else len(command)
    flags = [index for index, word in enumerate(command[:end]) if word in _MAIN_ADDRESS]
    return command[flags[0] + 1] if flags else None


def meet(main: str | None) -> None:
    """Make this launcher and its ranks listen on the interface to the other nodes; call it before they start.

    Raises:
        UsageError: the main node's name cannot be resolved, or there is no route to it.
    """
    if main is None:
        # torchrun's `--local-addr`, where ranks connect.
        os.environ.setdefault("PET_LOCAL_ADDR", "127.0.0.1")
        stay_on_loopback()
        return
    address = own_address(main)
    os.environ.setdefault("PET_LOCAL_ADDR", address)
    interfaces = psutil.net_if_addrs().items()
    interface = next((name for name, entries in interfaces for entry in entries if entry.address == address), None)
    if interface is not None:
        for name in INTERFACES:
            os.environ.setdefault(name, interface)


def own_address(main: str) -> str:
    """Return this node's address on the route to another.

    Raises:
        UsageError: the other node's name cannot be resolved, or there is no route to it.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(main, 9, type=socket.SOCK_DGRAM)[0]
        # Connecting a datagram socket only reads the routing table; nothing is sent.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        rule, fix = f"cannot be reached from {socket.gethostname()} ({error.strerror})", "name the main node's address"
        raise UsageError(ConfigError(where="main_address", value=main, rule=rule, fix=fix)) from None


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables with the interface of a backend."""


def stay_on_loopback() -> None:
    """On a single node, make collectives of this rank listen on loopback only; call it before ranks connect."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        for name in INTERFACES:
            os.environ.setdefault(name, "lo")
