"""Results that are computed when a test first needs them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class OnDemand(dict[Key, Value]):
    """A dictionary that computes a missing value once; a failure is raised again at each later access."""

    def __init__(self, make: Callable[[Key], Value]) -> None:
        super().__init__()
        self._make = make
        self._failures: dict[Key, Exception] = {}

    def __missing__(self, key: Key) -> Value:
        if key in self._failures:
            raise self._failures[key]
        try:
            value = self[key] = self._make(key)
        except Exception as error:
            self._failures[key] = error
            raise
        return value
