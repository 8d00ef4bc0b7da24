"""A teacher on a server of vLLM: its likeliest tokens at every labelled position, over HTTP.

`prompt_logprobs` of `/v1/completions` has, for each token of a prompt, the K likeliest tokens at its position, and the
token itself. Its values are log-probabilities at temperature 1: neither the temperature of a request nor
`--logprobs-mode processed_logprobs` changes them (vllm/v1/worker/gpu/sample/prompt_logprob.py). `max_tokens` is 1,
because every request generates; that token is ignored.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
import threading
import time
from bisect import bisect
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from http.client import HTTPException
from itertools import groupby
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from ..losses.objective import TopKTargets

API_KEY = "VLLM_API_KEY"
"""Environment variable with the key of the server, which vLLM's server reads too; it is never written to a file."""
SERVED_TOP_K = 20
"""Log-probabilities that vLLM allows by default (`--max-logprobs`)."""
TIMEOUT_SECONDS = 120.0
_CHECK_SECONDS = 10.0
"""Until a server that does not answer is reported before a run."""
_REQUEST_TOKENS = 16_384
"""Tokens of a request: its answer has about 60 bytes for each of them and each log-probability."""
_REQUESTS = 8
"""Simultaneous requests of a rank."""
_ROUNDING = 2.0**-24
"""Rounding error of the sum of a distribution in fp32: a smaller remaining mass is not known."""
_LARGEST = 1e-3
"""Above this a value is no log-probability, even after rounding."""
_LOWEST = -60.0
"""Of log-probabilities minus the largest one, as in a cache; vLLM sends -9999 for a probability of 0."""
_INPUTS = {"input_ids", "attention_mask", "position_ids"}
_KERNEL_INPUTS = ("cu_seq_lens_", "max_length_")
"""Names of the inputs that tell attention kernels where documents begin, as `position_ids` do."""


def server_address(url: str, *, allow_remote_http: bool) -> str:
    """Return the address of a server without `/v1`.

    Raises:
        UsageError: it is no URL, has a password, or would send the data unencrypted to another machine.
    """
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_valid = False
    error = None
    if not is_valid or parts.query or parts.fragment:
        error = "is not the URL of a server", "pass one such as http://localhost:8000"
    elif "@" in parts.netloc:
        # Not shown: reports and logs would contain the password.
        fix = f"pass the URL without it, and set {API_KEY} to the key of the server"
        raise UsageError(ConfigError(where="teacher_url", rule="must not contain a user or a password", fix=fix))
    elif parts.scheme == "http" and not allow_remote_http and not _is_loopback(parts.hostname or ""):
        error = (
            "would send the samples unencrypted to another machine",
            "use https, a tunnel (ssh -L 8000:localhost:8000 HOST), or pass --allow-remote-http",
        )
    if error is not None:
        raise UsageError(ConfigError(where="teacher_url", value=url, rule=error[0], fix=error[1]))
    return url.rstrip("/").removesuffix("/v1")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class _Document:
    """Tokens to send, and the positions whose next token is taught."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]


class ServedTeacher:
    """A teacher on a server with vLLM's completions API, for `DistillationTrainer(teacher=...)`.

    Each rank requests the samples of its own batches. A request that fails is repeated, with growing pauses, until
    `timeout_seconds` have passed.

    Args:
        url: Address of the server, with or without `/v1`.
        model: Name of a model in its `/v1/models`.
        vocab_size: Tokens of the student's tokenizer; the teacher's distributions are restricted to them.
        top_k: Likeliest tokens to request for each position.
        timeout_seconds: Time until a server that does not answer ends the run.
        allow_remote_http: Whether an address of another machine may be unencrypted.

    Raises:
        UsageError: the address is not valid, or not encrypted.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        vocab_size: int,
        top_k: int = SERVED_TOP_K,
        timeout_seconds: float = TIMEOUT_SECONDS,
        allow_remote_http: bool = False,
    ) -> None:
        self.url = server_address(url, allow_remote_http=allow_remote_http)
        self.model, self.vocab_size, self.top_k = model, vocab_size, top_k
        self.timeout_seconds = timeout_seconds
        self._slots = threading.Semaphore(_REQUESTS)
        self._pending: dict[_Document, Future[list[Any]]] = {}

    def prefetch(self, batches: Iterable[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]) -> None:
        """Request answers for the micro-batches of a step, as arguments of `read`; drop those of earlier steps."""
        self._pending = {}
        for batch in batches:
            self._pending |= self._requested(documents(*batch))

    def read(self, inputs: dict[str, Any], labels_N: torch.Tensor, rows_N: torch.Tensor) -> TopKTargets:
        """Return the teacher's distributions after `rows_N`, ascending flat indices of `input_ids` [B, S].

        The K tokens and the mass of all others add up to one. K is smaller than `top_k` if the teacher finds tokens
        likely that the student does not have: these are removed, and the others scaled up.

        Raises:
            UsageError: a batch has more than tokens.
            ShardwrightError: the server fails, or sends no valid log-probabilities.
        """
        import torch

        from ..losses.objective import TopKTargets

        needed = documents(inputs, labels_N, rows_N)
        requested = self._pending | self._requested([each for each in needed if each not in self._pending])
        answers = [row for document in needed for row in requested[document].result()]
        count = min((len(likeliest) for likeliest, _ in answers), default=self.top_k)
        if count == 0:
            raise self._failure("its likeliest tokens are no tokens of the student; use models of one family")
        ids_NK = torch.tensor([[token for token, _ in row[:count]] for row, _ in answers], dtype=torch.int64)
        values = [[value for _, value in row[:count]] for row, _ in answers]
        log_p_NK = torch.tensor(values, dtype=torch.float64).reshape(-1, count)
        beyond_N = torch.tensor([beyond for _, beyond in answers], dtype=torch.float64)
        log_p_NK = torch.maximum(log_p_NK, log_p_NK[:, :1] + _LOWEST)
        others = self.vocab_size - count
        # Each other token is at most as likely as the least likely of the K.
        most_N = others * log_p_NK[:, -1].exp()
        tail_N = (1 - beyond_N - log_p_NK.exp().sum(dim=1)).clamp(min=_ROUNDING).minimum(most_N)
        log_sum_N = (log_p_NK.exp().sum(dim=1) + tail_N).log()
        return TopKTargets(
            ids_NK=ids_NK.reshape(-1, count).to(rows_N.device),
            log_probabilities_NK=(log_p_NK - log_sum_N[:, None]).float().to(rows_N.device),
            tail_log_probability_N=(tail_N.log() - log_sum_N).float().to(rows_N.device),
            temperature=1.0,
        )

    def check(
        self, tokenizer: PreTrainedTokenizerBase, *, longest_tokens: int, texts: Sequence[str], chosen: str | None
    ) -> None:
        """Select the served model, and check it with requests before a run.

        Args:
            tokenizer: The student's.
            longest_tokens: Tokens of the longest sample, with completions of the student.
            texts: Texts that both must split into the same tokens.
            chosen: The requested name of a model; `None` for the only one.

        Raises:
            UsageError: the server has no such model, another tokenizer, or too low limits; all errors together.
            ShardwrightError: the server cannot be reached, or sends no valid log-probabilities.
        """
        from ..data.models import PROBE_TEXT

        models = self._request("/v1/models", limit_seconds=_CHECK_SECONDS)
        served = {model["id"]: model for model in _entries(models, "data") if "id" in model}
        names = ", ".join(sorted(served)) or "none"
        if chosen is None and len(served) != 1:
            rule, fix = f"must be one of the {len(served)} served models: {names}", "pass its name before the student"
            raise UsageError(ConfigError(where="teacher", rule=rule, fix=fix))
        if chosen is not None and chosen not in served:
            rule, fix = f"is not served by {self.url}, which has: {names}", "pass one of them, or omit it"
            raise UsageError(ConfigError(where="teacher", value=chosen, rule=rule, fix=fix))
        self.model = chosen or next(iter(served))
        errors: list[ConfigError] = []
        most = served[self.model].get("max_model_len")
        if isinstance(most, int) and longest_tokens >= most:
            rule = f"the server reads at most {most} tokens, one of which it generates; samples have {longest_tokens}"
            fix = f"serve with --max-model-len {longest_tokens + 1}, or lower --seq-len or --max-new-tokens"
            errors.append(ConfigError(where="teacher_url", value=self.url, rule=rule, fix=fix))
        special = "".join(map(str, tokenizer.all_special_tokens))
        for text in filter(None, (PROBE_TEXT, special, *texts)):
            own = tokenizer(text, add_special_tokens=False)["input_ids"]
            body = {"model": self.model, "prompt": text, "add_special_tokens": False}
            others = self._request("/tokenize", body, limit_seconds=_CHECK_SECONDS).get("tokens")
            if own != others:
                at = next((at for at, pair in enumerate(zip(own, others or (), strict=False)) if len({*pair}) > 1), -1)
                first = "counts differ" if at < 0 else f"token {at} is {own[at]} and {(others or own)[at]}"
                rule = f"student and served teacher split {text[:40]!r} differently: {first}"
                errors.append(ConfigError(where="tokenizer", rule=rule, fix="use models of one family"))
                break
        if errors:
            raise UsageError(errors)
        ids = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"][: max(2, longest_tokens)]
        self._answers([_Document(tokens=tuple(ids), positions=tuple(range(len(ids) - 1)))])

    def _requested(self, needed: Sequence[_Document]) -> dict[_Document, Future[list[Any]]]:
        """Request answers in the background, in groups of about `_REQUEST_TOKENS`."""
        groups: list[dict[_Document, Future[list[Any]]]] = [{}]
        for document in dict.fromkeys(needed):
            if sum(len(each.tokens) for each in groups[-1]) >= _REQUEST_TOKENS:
                groups.append({})
            groups[-1][document] = Future()

        def work(group: dict[_Document, Future[list[Any]]]) -> None:
            try:
                with self._slots:
                    answers = self._answers(list(group))
            except BaseException as error:
                for future in group.values():
                    future.set_exception(error)
                return
            for future, rows in zip(group.values(), answers, strict=True):
                future.set_result(rows)

        # Not a pool: the interpreter would wait for its threads, and so for a server, after another error of the rank.
        for group in filter(None, groups):
            threading.Thread(target=work, args=(group,), daemon=True).start()
        return {document: future for group in groups for document, future in group.items()}

    def _answers(self, group: Sequence[_Document]) -> list[list[tuple[list[tuple[int, float]], float]]]:
        """Return, for each position of each document, the likeliest tokens and the mass of those that were removed."""
        body = {
            "model": self.model,
            "prompt": [document.tokens for document in group],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": self.top_k,
        }
        content = self._request("/v1/completions", body, limit_seconds=self.timeout_seconds)
        choices = sorted(_entries(content, "choices"), key=lambda choice: choice.get("index", 0))
        if len(choices) != len(group):
            raise self._failure(f"sent {len(choices)} answers to {len(group)} prompts")
        return [self._rows(document, choice) for document, choice in zip(group, choices, strict=True)]

    def _rows(self, document: _Document, choice: dict[str, Any]) -> list[tuple[list[tuple[int, float]], float]]:
        positions = choice.get("prompt_logprobs")
        if not isinstance(positions, list) or len(positions) != len(document.tokens):
            count = len(positions) if isinstance(positions, list) else "no"
            rule = f"sent prompt_logprobs of {count} tokens for a prompt of {len(document.tokens)}"
            raise self._failure(f"{rule}; serve the teacher with vLLM")
        rows = []
        for position in document.positions:
            entries = positions[position + 1]
            if not isinstance(entries, dict) or str(document.tokens[position + 1]) not in entries:
                raise self._failure("sent log-probabilities of other tokens than those of the prompt")
            values: list[tuple[int, float]] = []
            for token, entry in entries.items():
                value = entry.get("logprob") if isinstance(entry, dict) else entry
                if not isinstance(value, (int, float)) or math.isnan(value):
                    raise self._failure(
                        "sent NaN as a log-probability; serve it in bf16 or fp32, and check its weights"
                    )
                values.append((int(token), value))
            values.sort(key=lambda pair: (-pair[1], pair[0]))
            likeliest = values[: self.top_k]
            if likeliest[0][1] > _LARGEST or sum(math.exp(value) for _, value in likeliest) > 1 + _LARGEST:
                raise self._failure("sent logits instead of log-probabilities; serve it without --logprobs-mode")
            if len(likeliest) < min(self.top_k, self.vocab_size):
                rule = f"sent {len(likeliest)} log-probabilities of a token instead of {self.top_k}"
                raise self._failure(f"{rule}; pass --teacher-top-k {len(likeliest)}, or raise its --max-logprobs")
            known = [(token, value) for token, value in likeliest if token < self.vocab_size]
            beyond = sum(math.exp(value) for token, value in likeliest if token >= self.vocab_size)
            rows.append((known, beyond))
        return rows

    def _failure(self, rule: str) -> ShardwrightError:
        return ShardwrightError(f"teacher {self.url}: {rule}")

    def _request(self, path: str, body: dict[str, Any] | None = None, *, limit_seconds: float) -> dict[str, Any]:
        """Return the JSON object that the server answers; a request that fails for now is repeated.

        Raises:
            UsageError: the server does not allow as many log-probabilities.
            ShardwrightError: it cannot be reached within the limit, or rejects the request.
        """
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key := os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data=data, headers=headers)  # noqa: S310
        # A proxy of this machine's environment does not know this machine's loopback.
        proxies = [ProxyHandler({})] if _is_loopback(urlsplit(self.url).hostname or "") else []
        opener = build_opener(_NoRedirects(), *proxies)
        start, pause = time.monotonic(), 0.5
        while True:
            try:
                # Half of the time, so that a connection that is lost silently is tried again.
                with opener.open(request, timeout=limit_seconds / 2) as response:
                    content = json.loads(response.read())
                if isinstance(content, dict):
                    return content
                raise self._failure(f"sent no JSON object for {path}; serve the teacher with vLLM")
            except HTTPError as error:
                problem = self._problem(path, error)
                if error.code < 500 and error.code not in (408, 429):
                    raise problem from None
                reason = f"answers {error.code} to {path}"
            except (OSError, HTTPException) as error:
                cause = error.reason if isinstance(error, URLError) else error
                reason = f"cannot be reached ({getattr(cause, 'strerror', None) or cause or type(cause).__name__})"
            except ValueError as error:
                if isinstance(error, ShardwrightError):
                    raise
                raise self._failure(f"sent no JSON for {path}; serve the teacher with vLLM") from None
            if time.monotonic() - start + pause > limit_seconds:
                fix = "start it, or check --teacher-url"
                if path == "/v1/completions":
                    fix = "start it again, and resume from the last checkpoint with --resume"
                raise self._failure(f"{reason} for {time.monotonic() - start:.0f} s; {fix}")
            time.sleep(pause)
            pause = min(2 * pause, 15.0)

    def _problem(self, path: str, error: HTTPError) -> ShardwrightError:
        """Return the error for a request that the server rejects."""
        try:
            content = json.loads(error.read())
            detail = content.get("error", content)
            message = detail if isinstance(detail, str) else detail.get("message") or str(detail.get("detail", ""))
        except (OSError, HTTPException, ValueError, AttributeError):
            message = ""
        message = " ".join(message.split())[:200]
        if limit := re.search(r"max allowed:? (\d+)", message):
            rule = f"the server allows {limit[1]} log-probabilities of a token"
            fix = f"use --teacher-top-k {limit[1]}, or serve with --max-logprobs {self.top_k}"
            return UsageError(ConfigError(where="teacher_top_k", value=self.top_k, rule=rule, fix=fix))
        if error.code in (401, 403):
            return self._failure(f"rejects the request ({error.code}); set {API_KEY} to the key of the server")
        if error.code == 404 and path != "/v1/completions":
            return self._failure(f"has no {path} (404); serve the teacher with vLLM")
        if 300 <= error.code < 400:
            return self._failure(f"redirects {path} ({error.code}); pass the address that it redirects to")
        return self._failure(f"answers {error.code} to {path}" + (f" ({message})" if message else ""))


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirect, which could take samples and key to another machine."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None


def _entries(content: dict[str, Any], name: str) -> list[dict[str, Any]]:
    entries = content.get(name)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def documents(inputs: dict[str, Any], labels_N: torch.Tensor, rows_N: torch.Tensor) -> list[_Document]:
    """Return the documents of a batch that contain `rows_N`, in the order of these rows.

    A document starts where `position_ids` restart or padding ends, and is sent up to its last label.

    Raises:
        UsageError: models read more than tokens, or a mask hides tokens inside a document.
    """
    errors = []
    if others := sorted(name for name in inputs.keys() - _INPUTS if not name.startswith(_KERNEL_INPUTS)):
        rule = f"a served teacher reads only tokens, and the batch also has {', '.join(others)}"
        errors.append(ConfigError(where="teacher", rule=rule, fix="load the teacher, without --teacher-url"))
    ids_BS = inputs["input_ids"].tolist()
    position_ids, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    positions_BS = None if position_ids is None else position_ids.expand(len(ids_BS), -1).tolist()
    mask_BS = mask.tolist() if mask is not None and mask.dim() == 2 else None
    made: list[_Document] = []
    labelled: dict[int, list[tuple[int, int]]] = {}
    for flat, label in zip(rows_N.tolist(), labels_N.tolist(), strict=True):
        row, position = divmod(flat, len(ids_BS[0]))
        labelled.setdefault(row, []).append((position, label))
    for row, pairs in labelled.items():
        first = 0 if mask_BS is None else next((at for at, counts in enumerate(mask_BS[row]) if counts), 0)
        starts = [first]
        if positions_BS is not None:
            starts += [at for at, position in enumerate(positions_BS[row]) if position == 0 and at > first]
        for start, own in groupby(pairs, key=lambda pair: starts[max(0, bisect(starts, pair[0]) - 1)]):
            positions, labels = zip(*own, strict=True)
            if mask_BS is not None and 0 in mask_BS[row][start : positions[-1] + 1]:
                rule = "hides tokens inside a sample, which a served teacher reads"
                errors.append(ConfigError(where="attention_mask", rule=rule, fix="pad samples at one end"))
            tokens = (*ids_BS[row][start : positions[-1] + 1], labels[-1])
            made.append(_Document(tokens=tokens, positions=tuple(position - start for position in positions)))
    if errors:
        raise UsageError(errors)
    return made
