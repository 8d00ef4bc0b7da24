"""One time limit for the Hub: a word after five seconds, an error when nothing has come for long enough.

Seen with huggingface_hub 1.33: its time limits count from one byte to the next and every failure is tried again, so
that a server that answers drop by drop, or not at all, held `plan` for more than 400 s without a word.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...ds_configs.specs.errors import ShardwrightError

Result = TypeVar("Result")
FIRST_WORD_SECONDS, NEXT_WORD_SECONDS = 5.0, 30.0
_LIMIT_FACTOR = 6
"""Times `HF_HUB_DOWNLOAD_TIMEOUT`, 10 s where nobody sets it."""
_LEAST_BYTES = 10_000
"""What must arrive within the limit for a download to go on."""
_POLL_SECONDS = 0.1


class HubTimeoutError(ShardwrightError):
    """The Hub did not answer in time."""


def limit_seconds() -> float:
    """Return how long the Hub may leave a question open."""
    from huggingface_hub import constants

    return float(_LIMIT_FACTOR * constants.HF_HUB_DOWNLOAD_TIMEOUT)


def within_limit(
    work: Callable[[], Result], what: str, *, limit: float | None = None, arrived: Callable[[], int] | None = None
) -> Result:
    """Ask the Hub, and give up when it does not answer.

    Args:
        work: Asks, and returns the answer.
        what: Named while it waits, such as `model ORG/NAME`.
        limit: Seconds; `None` for `limit_seconds`.
        arrived: Bytes that have come so far, where a download may take long; the limit begins anew as they come.

    Raises:
        HubTimeoutError: the limit has passed; `work` is left to itself and ends with the process.
    """
    limit = limit_seconds() if limit is None else limit
    answer: list[Any] = []
    failure: list[BaseException] = []

    def ask() -> None:
        try:
            answer.append(work())
        except BaseException as error:
            failure.append(error)

    # The process does not wait for it at its end.
    thread = threading.Thread(target=ask, name="hub", daemon=True)
    began = moved = time.monotonic()
    thread.start()
    next_word, seen = began + FIRST_WORD_SECONDS, 0
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        now = time.monotonic()
        if arrived is not None and now - moved >= limit / 2 and (came := arrived()) >= seen + _LEAST_BYTES:
            seen, moved = came, now
        if now - moved >= limit:
            fix = "try again later, raise HF_HUB_DOWNLOAD_TIMEOUT, or give a local directory"
            raise HubTimeoutError(f"{what}: the Hub did not answer within {limit:g} s; {fix}")
        if now >= next_word and thread.is_alive():
            print(f"waiting for the Hub: {what}, {now - began:.0f} s", file=sys.stderr, flush=True)
            next_word = now + NEXT_WORD_SECONDS
    if failure:
        raise failure[0]
    found: Result = answer[0]
    return found


def fetch_snapshot(repository: str, *, revision: str | None = None, patterns: Sequence[str]) -> Path:
    """Return the local directory of a model's files, fetched where they are not in the cache.

    Raises:
        HubTimeoutError: nothing came for as long as `limit_seconds`.
        Exception: whatever connection, cache or disk raise.
    """
    from huggingface_hub import snapshot_download

    def fetch() -> Path:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))

    return within_limit(fetch, f"files of {repository}", arrived=_cached_bytes(repository))


def _cached_bytes(repository: str) -> Callable[[], int]:
    """Return a function that counts what a model's folder in the cache holds, unfinished files included."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"

    def count() -> int:
        total = 0
        for path in folder.glob("blobs/*"):
            try:
                total += path.stat().st_size
            except OSError:
                continue
        return total

    return count
