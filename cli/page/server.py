"""Server of the page, by default on the loopback interface, without external resources."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Receive, Scope, Send

LARGEST_UPLOAD = "10mb"
"""Gradio rejects larger files during the upload; configurations of models are limited to 4 MiB."""
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' blob: data:; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'"
)
"""Browsers load only what this server sends. Gradio needs inline scripts and eval."""


class _Headers:
    """Middleware that adds the policy to every response."""

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


class _OwnOrigin:
    """Middleware that rejects requests from pages of another origin (scheme, host and port).

    Gradio 6.31.0 accepts requests with credentials from any page of this machine, whatever its port.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import Headers
        from starlette.responses import PlainTextResponse

        headers = Headers(scope=scope) if scope["type"] in ("http", "websocket") else Headers()
        scheme = {"ws": "http", "wss": "https"}.get(scope.get("scheme", ""), scope.get("scheme", "http"))
        own = f"{scheme}://{headers.get('host', '')}"
        if (origin := headers.get("origin", own)) == own:
            await self.app(scope, receive, send)
            return
        text = f"Origin {origin!r}: only pages of {own} may call this server. Open {own} in the browser.\n"
        await PlainTextResponse(text, status_code=403)(scope, receive, send)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0 selects a free one.

    Raises:
        UsageError: this machine has no such address.
        ShardwrightError: the port is in use, or not allowed for this user.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        rule = f"is not an address ({reason})"
        raise UsageError(ConfigError(where="host", value=host, rule=rule, fix="use 127.0.0.1")) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        fix = "pass another --port, or --port 0 for a free one" if port else "pass another --host"
        raise ShardwrightError(f"port = {port}: cannot listen at {host} ({reason}); {fix}") from None
    return listener


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_app(host: str) -> FastAPI:
    """Return the application; on loopback it accepts only host names of this machine.

    This blocks DNS rebinding, where the name of another site resolves to 127.0.0.1.
    """
    import gradio
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from .app import build_page, head, theme

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_OwnOrigin)
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
    """Serve the page until the process ends; call `announce` with its address when it listens.

    Raises:
        UsageError: this machine has no such host.
        ShardwrightError: gradio is not installed, or the port is in use.
    """
    if importlib.util.find_spec("gradio") is None:
        raise ShardwrightError("the page needs gradio, which is not installed; pip install 'shardwright[ui]'")
    with listening_socket(host, port) as listener, tempfile.TemporaryDirectory(prefix="shardwright-ui-") as uploads:
        # Before the imports, which read them.
        os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": uploads}
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        import uvicorn

        from .planned import known_models

        known_models()
        server = uvicorn.Server(uvicorn.Config(make_app(host), log_level="warning"))
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{listener.getsockname()[1]}")
        server.run(sockets=[listener])
