"""A Hub on loopback that holds one dataset: its files by name, read whole or in ranges."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from hub_server import COMMIT, HubHandler, serving

NAME = "ada/notes"
_CHUNK_BYTES = 2**16


@dataclass
class DatasetHub:
    """What is there, and what was sent of it."""

    files: Mapping[str, bytes]
    address: str = ""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes that went over the wire, by name of a file."""


class _Handler(HubHandler):
    hub: DatasetHub
    _sends = ""
    """Name of the file that is the body of the answer."""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        path = unquote(address.path)
        if re.fullmatch(rf"/api/datasets/{NAME}(/revision/[^/]+)?", path):
            siblings = [{"rfilename": name} for name in self.hub.files]
            self.answer(200, {"id": NAME, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []})
        elif path.startswith(f"/api/datasets/{NAME}/tree/"):
            folder = path.removeprefix(f"/api/datasets/{NAME}/tree/").partition("/")[2]
            recursive = parse_qs(address.query).get("recursive") == ["true"]
            listed = []
            for entry in self._entries():
                parents = [str(parent) for parent in PurePosixPath(entry["path"]).parents]
                if (folder or ".") in (parents if recursive else parents[:1]):
                    listed.append(entry)
            if listed or not folder:
                self.answer(200, listed)
            else:
                self.answer(404, {"error": "not found"}, {"X-Error-Code": "EntryNotFound"})
        else:
            self._file()

    def do_POST(self) -> None:
        body = self.read_body().decode()
        asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
        self.answer(200, [entry for entry in self._entries() if entry["path"] in asked])

    def _entries(self) -> list[dict[str, Any]]:
        folders = {str(folder) for name in self.hub.files for folder in PurePosixPath(name).parents} - {"."}
        sizes = dict.fromkeys(sorted(folders), 0) | {name: len(content) for name, content in self.hub.files.items()}
        return [
            {"type": "directory" if name in folders else "file", "path": name, "size": size, "oid": f"{index:040x}"}
            for index, (name, size) in enumerate(sizes.items())
        ]

    def _file(self) -> None:
        path, root = unquote(urlsplit(self.path).path), f"/datasets/{NAME}/resolve/"
        name = path.removeprefix(root).partition("/")[2]
        content = self.hub.files.get(name) if path.startswith(root) else None
        if content is None:
            self.answer(404, {"error": "not found"}, {"X-Error-Code": "EntryNotFound"})
        else:
            self._sends = name
            self.answer_file(content, name)

    def write_body(self, content: bytes) -> None:
        # Readers hang up when they have enough.
        with suppress(ConnectionError):
            for start in range(0, len(content), _CHUNK_BYTES):
                chunk = content[start : start + _CHUNK_BYTES]
                self.wfile.write(chunk)
                if self._sends:
                    self.hub.sent[self._sends] = self.hub.sent.get(self._sends, 0) + len(chunk)
        self._sends = ""


@contextmanager
def dataset_hub(files: Mapping[str, bytes]) -> Iterator[DatasetHub]:
    """Yield a Hub that serves the files of `NAME` as long as the block runs; `HF_ENDPOINT` sends a process to it."""
    hub = DatasetHub(files=files)
    with serving(_Handler, hub=hub) as hub.address:
        yield hub
