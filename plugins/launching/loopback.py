"""Rendezvous of one node on loopback: neither launcher nor rank listens where another machine can reach it.

Seen with torch 2.13.0: a `TCPStore` listens on every interface, also where its host is `127.0.0.1`, unless it is given
a socket that is bound already; gloo and NCCL choose an interface by the host's name. Whoever reaches a store can write
into it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from functools import partial
from importlib import import_module
from typing import Any

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the interface of a backend."""
_BACKLOG = 2048


def stay_on_loopback() -> None:
    """Let this rank or launcher, if its node is the only one, listen on loopback alone; call it before ranks meet."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        for name in INTERFACES:
            os.environ.setdefault(name, "lo")
    from torch import distributed
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous

    # `torch.distributed.rendezvous` is a function that hides the module of its name.
    rendezvous = import_module("torch.distributed.rendezvous")
    plain = distributed.TCPStore
    if isinstance(plain, partial):
        return
    modules: tuple[Any, ...] = (distributed, rendezvous, c10d_rendezvous_backend, static_tcp_rendezvous)
    for module in modules:
        module.TCPStore = partial(_store, plain)


def _store(plain: Any, host_name: str, port: int, *args: Any, **kwargs: Any) -> Any:
    """Return a store whose server, where its host is loopback, listens there alone."""
    # Its fourth argument, behind the world size.
    is_master = args[1] if len(args) > 1 else kwargs.get("is_master", False)
    if is_master and _is_loopback(host_name):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            # A server of this process that is shared, or an error that torch is to report.
            listener.close()
        else:
            listener.listen(_BACKLOG)
            kwargs["master_listen_fd"] = listener.fileno()
            port = listener.getsockname()[1]
            listener.detach()
    return plain(host_name, port, *args, **kwargs)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
