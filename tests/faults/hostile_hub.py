"""A Hub on loopback that misbehaves in one way at a time; `HF_ENDPOINT` sends huggingface_hub to it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hub_server import COMMIT, HubHandler, serving

CONFIG = json.dumps({
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260,
}).encode()  # fmt: skip
FAULTS = ("401", "403-gated", "404", "429", "500", "503", "redirect-loop", "silence", "drip", "wrong-length",
          "empty", "garbage", "reset", "huge-config")  # fmt: skip
_STATUS = {"401": 401, "403-gated": 403, "404": 404, "429": 429, "500": 500, "503": 503}


class _Handler(HubHandler):
    fault: str

    def do_GET(self) -> None:
        fault = self.fault
        asks_for_config = "/resolve/" in self.path
        if fault in _STATUS:
            headers = {"X-Error-Code": "GatedRepo"} if fault == "403-gated" else {}
            self._answer(_STATUS[fault], b"{}", headers)
        elif fault == "redirect-loop":
            self._answer(302, b"", {"Location": self.path})
        elif fault == "silence":
            time.sleep(3600)
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.connection.close()
        elif not asks_for_config and fault != "drip":
            bodies = {"empty": b"", "garbage": b"<html>"}
            info = json.dumps({"id": "org/model", "modelId": "org/model", "sha": COMMIT, "siblings": []}).encode()
            self._answer(200, bodies.get(fault, info))
        elif fault == "drip":
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            for _ in range(3600):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(1)
        elif fault == "wrong-length":
            self._answer(200, CONFIG, {"Content-Length": str(len(CONFIG) + 500)})
        else:
            self._answer(200, b"[" * 20_000_000 if fault == "huge-config" else CONFIG)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.answer(status, body, {"ETag": '"abc"', "X-Repo-Commit": COMMIT, **(headers or {})})


@contextmanager
def hostile_hub(fault: str) -> Iterator[str]:
    """Yield the address of a Hub that answers every question in this way."""
    assert fault in FAULTS, fault
    with serving(_Handler, fault=fault) as address:
        yield address
