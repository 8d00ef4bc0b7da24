"""Server of the page: on the loopback interface unless another address is asked for, with nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Receive, Scope, Send

LARGEST_UPLOAD = "10mb"
"""Beyond it Gradio refuses a file while it comes; configurations of models are refused from 4 MiB on."""
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' blob: data:; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'"
)
"""What browsers load: nothing but what this server sends. Gradio's program has scripts in its page and evaluates."""


class _Headers:
    """Middleware that adds the policy to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import MutableHeaders

        async def with_policy(message: object) -> None:
            assert isinstance(message, dict)
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = POLICY
                headers["Referrer-Policy"] = "no-referrer"
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        await self.app(scope, receive, with_policy)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0 takes a free one.

    Raises:
        UsageError: there is no such address on this machine.
        ShardwrightError: the port is taken, or not for this user.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            Fault(where="host", value=host, rule=f"is no address ({reason})", fix="use 127.0.0.1")
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        fix = "give another --port, or --port 0 for a free one" if port else "give another --host"
        raise ShardwrightError(f"port = {port}: cannot be listened on at {host} ({reason}); {fix}") from None
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_app(host: str) -> FastAPI:
    """Return the program of the server; on loopback it answers to names of this machine alone.

    A page of somebody else's, whose name leads to 127.0.0.1, would otherwise be answered too.
    """
    import gradio
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from .app import build_page, head, theme

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    if is_loopback(host):
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "::1", "[::1]", host])
    app.add_middleware(_Headers)
    mounted: FastAPI = gradio.mount_gradio_app(
        app,
        build_page(),
        path="/",
        footer_links=[],
        run_history=False,
        max_file_size=LARGEST_UPLOAD,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        show_error=False,
        theme=theme(),
        head=head(),
    )
    return mounted


def serve(host: str, port: int, *, announce: Callable[[str], None]) -> None:
    """Serve the page until the process is told to end; `announce` gets its address when it is there.

    Raises:
        UsageError: there is no such host on this machine.
        ShardwrightError: gradio is not installed, or the port cannot be had.
    """
    if importlib.util.find_spec("gradio") is None:
        raise ShardwrightError("the page needs gradio, which is not installed; pip install 'shardwright[ui]'")
    with listening_socket(host, port) as listener, tempfile.TemporaryDirectory(prefix="shardwright-ui-") as uploads:
        # Before these libraries are imported, which ask for them.
        os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": uploads}
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        import uvicorn

        from .planned import known_models

        known_models()
        server = uvicorn.Server(uvicorn.Config(make_app(host), log_level="warning"))
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{listener.getsockname()[1]}")
        server.run(sockets=[listener])
