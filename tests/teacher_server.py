"""A loopback server with the requests of vLLM that a served teacher needs, answered by a model in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from hub_server import HubHandler, serving
from shardwright.trainers.losses.objective import TopKTargets

NAME = "teacher-served"
_RUNNING: list[ExitStack] = []


def top_k_of(model: Any, ids: list[int], k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the likeliest tokens [S, K] after each token and their log-probabilities, and those [S, V] of all."""
    with torch.no_grad():
        log_p_SV = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float(), dim=-1)
    top = log_p_SV.topk(min(k, log_p_SV.shape[1]), dim=-1)
    return top.indices, top.values, log_p_SV


@dataclass(kw_only=True)
class State:
    """What the server serves, and how it fails."""

    model: Any
    tokenizer: Any
    max_logprobs: int = 20
    sent_logprobs: int | None = None
    """Log-probabilities that are sent at most, whatever is requested."""
    max_model_len: int = 64
    names: tuple[str, ...] = (NAME,)
    key: str = ""
    """Required from clients."""
    status: Callable[[str], int] = lambda path: 200
    """Status of the answer to a path; 0 closes the connection without one."""
    changed: Callable[[dict[str, Any]], Any] = lambda content: content
    """Changes an answer with completions."""
    requests: list[tuple[str, Any]] = field(default_factory=list)
    """Paths and bodies, in order."""
    lock: Any = field(default_factory=threading.Lock)


class TeacherHandler(HubHandler):
    state: State

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = json.loads(self.read_body() or b"null")
        state = self.state
        with state.lock:
            state.requests.append((self.path, body))
        status = state.status(self.path)
        if status == 0:
            self.close_connection = True
            return
        if state.key and self.headers.get("Authorization") != f"Bearer {state.key}":
            status = 401
        if status != 200:
            self.answer(status, {"error": {"message": "made to fail", "code": status}}, {"Location": "/elsewhere"})
        elif self.path == "/v1/models":
            self.answer(200, {"data": [{"id": name, "max_model_len": state.max_model_len} for name in state.names]})
        elif self.path == "/tokenize":
            ids = state.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
            self.answer(200, {"count": len(ids), "tokens": ids})
        else:
            self.complete(body)

    def complete(self, body: dict[str, Any]) -> None:
        state = self.state
        k, prompts = body["prompt_logprobs"], body["prompt"]
        if k > state.max_logprobs:
            rule = f"Requested prompt logprobs of {k}, which is greater than max allowed: {state.max_logprobs}"
            self.answer(400, {"error": {"message": rule, "type": "BadRequestError", "code": 400}})
            return
        if any(len(ids) + body["max_tokens"] > state.max_model_len for ids in prompts):
            self.answer(400, {"error": {"message": "maximum context length", "code": 400}})
            return
        with state.lock:
            sent = state.sent_logprobs or k
            choices = [
                {"index": at, "prompt_logprobs": self.prompt_logprobs(ids, sent)} for at, ids in enumerate(prompts)
            ]
        # In another order, and with NaN as Python's JSON writes it.
        self.answer(200, state.changed({"choices": choices[::-1]}))

    def prompt_logprobs(self, ids: list[int], k: int) -> list[Any]:
        """Return, as vLLM, the K likeliest tokens at each token of a prompt and the token itself; none at the first."""
        ids_SK, values_SK, log_p_SV = top_k_of(self.state.model, ids, k)
        positions: list[Any] = [None]
        for before, token in enumerate(ids[1:]):
            entries = zip(ids_SK[before].tolist(), values_SK[before].tolist(), strict=True)
            position = {str(other): {"logprob": value, "rank": rank} for rank, (other, value) in enumerate(entries, 1)}
            position.setdefault(str(token), {"logprob": log_p_SV[before, token].item(), "rank": 999})
            positions.append(position)
        return positions


@contextmanager
def served(state: State) -> Iterator[str]:
    """Yield the address of a server with this state, as long as the block runs."""
    with serving(TeacherHandler, state=state) as url:
        yield url


def serve(state: State) -> str:
    """Return the address of a server with this state, which runs as long as this process."""
    stack = ExitStack()
    _RUNNING.append(stack)
    return stack.enter_context(served(state))


def loaded_top_k(model: Any, k: int, vocab_size: int) -> Any:
    """Return a stand-in for `ServedTeacher` that runs the loaded teacher, with exact tails in fp64."""
    from shardwright.trainers.distillation import ServedTeacher

    class LoadedTopK(ServedTeacher):
        def prefetch(self, batches: Any) -> None: ...

        def read(self, inputs: Any, labels_N: torch.Tensor, rows_N: torch.Tensor) -> TopKTargets:
            with torch.no_grad():
                logits = model(**{name: inputs[name] for name in inputs}).logits
            logits_NV = logits.reshape(-1, logits.shape[-1])[rows_N, :vocab_size]
            log_p_NV = torch.log_softmax(logits_NV.double(), dim=-1)
            top = log_p_NV.topk(min(k, vocab_size), dim=-1)
            return TopKTargets(
                ids_NK=top.indices,
                log_probabilities_NK=top.values.float(),
                tail_log_probability_N=log_p_NV.scatter(1, top.indices, -torch.inf).logsumexp(-1).float(),
                temperature=1.0,
            )

    return LoadedTopK("http://localhost:1", model="loaded", vocab_size=vocab_size, top_k=k)
