"""A Hub on loopback with a few small models, sound and broken; `HF_ENDPOINT` sends huggingface_hub to it."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from typing import ClassVar
from urllib.parse import parse_qs

from hub_server import COMMIT, HubHandler, serving
from paths import CONFIGS

CONFIG = json.loads((CONFIGS / "meta-llama--Llama-3.1-8B/config.json").read_text())
CONFIG |= {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
PARAMETERS = 128 * 64 * 2 + 64 + 2 * 64 + 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96


def header_of(elements: int, dtype: str = "BF16") -> bytes:
    text = json.dumps({"x": {"dtype": dtype, "shape": [elements], "data_offsets": [0, 2 * elements]}}).encode()
    return len(text).to_bytes(8, "little") + text


FILES: dict[str, dict[str, bytes]] = {
    "org/plain": {"config.json": json.dumps(CONFIG).encode()},
    "org/agrees": {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": header_of(PARAMETERS)},
    "org/differs": {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": header_of(2 * PARAMETERS)},
    "org/junk-header": {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"\2" + bytes(7) + b"[]"},
    "org/odd-header": {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": (12).to_bytes(8, "little") + b'{"x": [1,2]}',
    },
    "org/sharded": {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": {"x": "a.safetensors"}}).encode(),
        "a.safetensors": header_of(PARAMETERS),
    },
    "org/junk-index": {"config.json": json.dumps(CONFIG).encode(), "model.safetensors.index.json": b"[1, 2"},
    "org/adapter": {"adapter_config.json": b"{}"},
    "org/junk-config": {"config.json": b'{"model_type": "llama", "num_hidden_layers": -1}'},
}
ERRORS: dict[str, tuple[int, str] | tuple[int, str, str]] = {
    "org/gated": (403, "GatedRepo"),
    "org/gated401": (401, "GatedRepo"),
    "org/private": (401, "RepoNotFound"),
    "org/denied": (403, ""),
    "org/bad-token": (401, "", "Invalid credentials in Authorization header"),
    "org/broken": (500, ""),
    "org/busy": (429, ""),
}


class Hub(HubHandler):
    """As much of the Hub as planning asks for: `/api/models`, its search, and `/resolve` with ranges."""

    asked: ClassVar[list[tuple[float, str]]] = []
    """When, and for what."""

    def do_GET(self) -> None:
        part = " in part" if "Range" in self.headers else ""
        self.asked.append((time.time(), f"{self.command} {self.path}{part}"))
        path, _, query = self.path.partition("?")
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repository = "/".join(parts[2:4] if api else parts[:2])
        if parts == ["api", "models"]:
            words = parse_qs(query)["search"][0]
            self.send(json.dumps([{"id": name} for name in FILES if words in name]).encode())
        elif repository in ERRORS:
            self.fail(*ERRORS[repository])
        elif repository not in FILES:
            self.fail(404, "RepoNotFound")
        elif api and parts[4:5] == ["tree"]:
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": format(len(content), "040x")}
                for name, content in FILES[repository].items()
            ]
            self.send(json.dumps(listed).encode())
        elif api:
            revision = parts[5] if parts[4:5] == ["revision"] else "main"
            if revision in ("main", COMMIT):
                files = [{"rfilename": name} for name in FILES[repository]]
                self.send(json.dumps({"id": repository, "sha": COMMIT, "siblings": files}).encode())
            else:
                self.fail(404, "RevisionNotFound")
        elif parts[2] != "resolve" or parts[3] not in ("main", COMMIT):
            self.fail(404, "RevisionNotFound")
        elif "/".join(parts[4:]) not in FILES[repository]:
            self.fail(404, "EntryNotFound")
        else:
            self.send(FILES[repository]["/".join(parts[4:])])

    def fail(self, status: int, code: str, message: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self.answer(status, b"", {name: text for name, text in headers.items() if text})

    def send(self, content: bytes) -> None:
        self.answer_file(content, format(hash(content) % 2**64, "016x"))


def readable_hub() -> AbstractContextManager[str]:
    return serving(Hub)
