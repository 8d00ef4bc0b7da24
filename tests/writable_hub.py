"""A Hub on loopback that takes uploads: who asks, new repositories, files in git and in LFS, commits."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hub_server import COMMIT, HubHandler, serving
from huggingface_hub import constants

REFUSING = "hf_unknown"
READING = "hf_reads"
WRITING = "hf_" + "NeverShowThisToken" * 2


@dataclass
class WritableHub:
    address: str = ""
    repositories: dict[str, bool] = field(default_factory=dict)
    """Whether each is private."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Contents by name, of commits; of LFS files the pointer's id."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """LFS contents by id."""
    failing_uploads: int = 0
    """LFS uploads to answer with an error."""


class _Handler(HubHandler):
    hub: WritableHub

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        name = "/".join(self.path.split("/")[3:5])
        if self.path.endswith("/auth-check/write") and token != WRITING:
            self.answer(403, {"error": "Forbidden"})
        else:
            repository = {"id": name, "sha": COMMIT, "siblings": [], "private": False}
            self.answer(200 if name in self.hub.repositories else 404, repository)

    def do_POST(self) -> None:
        body = self.read_body()
        if self.headers.get("Authorization") == f"Bearer {REFUSING}":
            self.answer(401, {"error": "Invalid user token."})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'ada'}/{asked['name']}"
            if name == "lab/closed":
                self.answer(403, {"error": "You don't have the rights to create a model under this namespace"})
                return
            status = 409 if name in self.hub.repositories else 200
            self.hub.repositories.setdefault(name, asked.get("visibility") == "private")
            self.answer(status, {"url": f"{self.hub.address}/{name}", "name": name})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            ways = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in asked}
            modes = [{"path": path, "uploadMode": way, "shouldIgnore": False} for path, way in ways.items()]
            self.answer(200, {"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [self._lfs_answer(asked) for asked in json.loads(body)["objects"]]
            self.answer(200, {"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    self.hub.files[line["value"]["path"]] = line["value"]["oid"].encode()
            where = f"{self.hub.address}/ada/tuned/commit/{COMMIT}"
            self.answer(200, {"success": True, "commitOid": COMMIT, "commitUrl": where, "hookOutput": ""})
        else:
            self.answer(200, {})

    def _lfs_answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        found = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] in self.hub.objects:
            return found
        return found | {"actions": {"upload": {"href": f"{self.hub.address}/lfs/{asked['oid']}"}}}

    def do_PUT(self) -> None:
        body = self.read_body()
        if self.hub.failing_uploads:
            self.hub.failing_uploads -= 1
            self.answer(400, {})
            return
        self.hub.objects[self.path.rpartition("/")[2]] = body
        self.answer(200, {})


@contextmanager
def writable_hub() -> Iterator[WritableHub]:
    """Yield the Hub of this process, whose token may write, as long as the block runs."""
    hub = WritableHub()
    with serving(_Handler, hub=hub) as hub.address, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.address)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setenv("HF_TOKEN", WRITING)
        yield hub
