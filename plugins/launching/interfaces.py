"""The network interface by which a node's ranks meet those of other nodes, or loopback where it is the only one.

Seen with torch 2.13.0: gloo listens where the host's own name resolves to, which Debian's `/etc/hosts` says is
127.0.1.1, so that ranks of two such nodes never meet; NCCL takes the first interface, which may be a container's.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import psutil

from ...ds_configs.specs.errors import Fault, UsageError
from .loopback import INTERFACES, stay_on_loopback

_MAIN_ADDRESS = ("--main_process_ip", "--master-addr")
"""Flags of Accelerate and torchrun, which several nodes have."""


def main_address(command: Sequence[str]) -> str | None:
    """Return where the ranks of a launch line meet; `None` for one node.

    >>> main_address(["torchrun", "--nnodes=2", "--master-addr", "node-1", "script.py"])
    'node-1'
    """
    # What follows `-m` or a script is that one's own.
    end = command.index("-m") if "-m" in command else len(command)
    found = [index for index, word in enumerate(command[:end]) if word in _MAIN_ADDRESS]
    return command[found[0] + 1] if found else None


def meet(main: str | None) -> None:
    """Let this launcher and its ranks listen where the ranks of the other nodes reach them; call it before they start.

    Raises:
        UsageError: the main node's name is not known here, or there is no way to it.
    """
    if main is None:
        # torchrun's `--local-addr`, by which ranks know where to meet.
        os.environ.setdefault("PET_LOCAL_ADDR", "127.0.0.1")
        stay_on_loopback()
        return
    address = own_address(main)
    os.environ.setdefault("PET_LOCAL_ADDR", address)
    interface = interface_of(address)
    if interface is not None:
        for name in INTERFACES:
            os.environ.setdefault(name, interface)


def own_address(main: str) -> str:
    """Return this node's address on the way to another.

    Raises:
        UsageError: its name is not known here, or there is no way to it.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(main, 9, type=socket.SOCK_DGRAM)[0]
        # Nothing is sent: connecting a datagram socket asks the routing table alone.
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect(place)
            return str(asked.getsockname()[0])
    except OSError as error:
        rule, fix = f"cannot be reached from {socket.gethostname()} ({error.strerror})", "name the main node's address"
        raise UsageError(Fault(where="main_address", value=main, rule=rule, fix=fix)) from None


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address; `None` where none shows it."""
    named = psutil.net_if_addrs()
    return next((name for name, found in named.items() for each in found if each.address == address), None)
