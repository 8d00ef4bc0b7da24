"""Web servers on loopback that stand for the Hub."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        raise NotImplementedError

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, status: int, content: Any, headers: Mapping[str, Any] | None = None) -> None:
        """Send bytes, or anything else as JSON."""
        if not isinstance(content, bytes):
            content, headers = json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})}
        self.send_response(status)
        for name, value in ({"Content-Length": len(content)} | dict(headers or {})).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.write_body(content)

    def write_body(self, content: bytes) -> None:
        self.wfile.write(content)

    def answer_file(self, content: bytes, etag: str) -> None:
        """Send a file, or the range of it that the client asks for."""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(wanted[1]) if wanted else 0
        last = min(int(wanted[2]) if wanted and wanted[2] else len(content) - 1, len(content) - 1)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if wanted:
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.answer(206 if wanted else 200, content[first : last + 1], headers)


@contextmanager
def serving(handler: type[HubHandler], **attributes: Any) -> Iterator[str]:
    """Yield the address of a server whose handlers have these attributes, as long as the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), attributes))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
