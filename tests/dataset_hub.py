"""A Hub on loopback that holds one dataset: its files by name, read whole or in ranges."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "ada/notes"
_CHUNK_BYTES = 2**16


@dataclass
class DatasetHub:
    """What is there, and what was sent of it."""

    files: Mapping[str, bytes]
    address: str = ""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes that went over the wire, by name of a file."""


class _Handler(BaseHTTPRequestHandler):
    hub: DatasetHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._file(with_body=False)

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        path = unquote(address.path)
        if re.fullmatch(rf"/api/datasets/{NAME}(/revision/[^/]+)?", path):
            siblings = [{"rfilename": name} for name in self.hub.files]
            self._answer(200, {"id": NAME, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []})
        elif path.startswith(f"/api/datasets/{NAME}/tree/"):
            folder = path.removeprefix(f"/api/datasets/{NAME}/tree/").partition("/")[2]
            recursive = parse_qs(address.query).get("recursive") == ["true"]
            listed = []
            for entry in self._entries():
                parents = [str(parent) for parent in PurePosixPath(entry["path"]).parents]
                if (folder or ".") in (parents if recursive else parents[:1]):
                    listed.append(entry)
            if listed or not folder:
                self._answer(200, listed)
            else:
                self._answer(404, {"error": "not found"}, {"X-Error-Code": "EntryNotFound"})
        else:
            self._file(with_body=True)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
        self._answer(200, [entry for entry in self._entries() if entry["path"] in asked])

    def _entries(self) -> list[dict[str, Any]]:
        folders = {str(folder) for name in self.hub.files for folder in PurePosixPath(name).parents} - {"."}
        sizes = dict.fromkeys(sorted(folders), 0) | {name: len(content) for name, content in self.hub.files.items()}
        return [
            {"type": "directory" if name in folders else "file", "path": name, "size": size, "oid": f"{index:040x}"}
            for index, (name, size) in enumerate(sizes.items())
        ]

    def _file(self, *, with_body: bool) -> None:
        path, root = unquote(urlsplit(self.path).path), f"/datasets/{NAME}/resolve/"
        name = path.removeprefix(root).partition("/")[2]
        content = self.hub.files.get(name) if path.startswith(root) else None
        if content is None:
            self._answer(404, {"error": "not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        last = min(int(asked[2]) if asked and asked[2] else len(content) - 1, len(content) - 1)
        part = content[first : last + 1]
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"', "Accept-Ranges": "bytes", "Content-Length": len(part)}
        for header, value in headers.items():
            self.send_header(header, str(value))
        self.end_headers()
        # Readers hang up when they have enough.
        with suppress(ConnectionError):
            for start in range(0, len(part) if with_body else 0, _CHUNK_BYTES):
                self.wfile.write(part[start : start + _CHUNK_BYTES])
                self.hub.sent[name] = self.hub.sent.get(name, 0) + len(part[start : start + _CHUNK_BYTES])

    def _answer(self, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def dataset_hub(files: Mapping[str, bytes]) -> Iterator[DatasetHub]:
    """Yield a Hub that serves the files of `NAME` as long as the block runs; `HF_ENDPOINT` sends a process to it."""
    hub = DatasetHub(files=files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
