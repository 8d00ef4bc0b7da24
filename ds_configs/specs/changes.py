"""`Change`: one value that was rewritten, and the copy of a mapping that collects them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeGuard

_MOST_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One value that was scaled.

    >>> str(Change(where="hidden_size", before=4096, after=128))
    'hidden_size 4096 -> 128'
    """

    where: str
    """Key path of the value."""
    before: object
    """What it was; `None` when it was absent."""
    after: object
    """What it is now; `None` when it was removed."""

    def __str__(self) -> str:
        return f"{self.where} {_shown(self.before)} -> {_shown(self.after)}"


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict) or (isinstance(value, list) and len(value) > _MOST_SHOWN):
        return f"({len(value)} entries)"
    return str(value)


class Rewriting:
    """A copy of a mapping to write into; every value that becomes another one is recorded."""

    def __init__(self, values: Mapping[str, Any], *, path: str = "", changes: list[Change] | None = None) -> None:
        self.values: dict[str, Any] = dict(values) if path else deepcopy(dict(values))
        self.changes: list[Change] = [] if changes is None else changes
        self._path = path

    def get(self, key: str) -> Any:
        """Return the present value of a key, or `None`."""
        return self.values.get(key)

    def put(self, key: str, value: Any) -> None:
        """Write a value and record it unless it was there already."""
        before = self.values.get(key)
        if key in self.values and before == value:
            return
        self.values[key] = value
        self.changes.append(Change(where=self._path + key, before=before, after=value))

    def drop(self, key: str) -> None:
        """Remove a value that is neither absent nor null."""
        if self.values.get(key) is not None:
            self.changes.append(Change(where=self._path + key, before=self.values.pop(key), after=None))

    def inside(self, key: str) -> Rewriting | None:
        """Return the copy of a nested mapping, which becomes part of this one; `None` when there is none."""
        nested = self.values.get(key)
        if not isinstance(nested, dict):
            return None
        inner = Rewriting(nested, path=f"{self._path}{key}.", changes=self.changes)
        self.values[key] = inner.values
        return inner


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is an integer above zero."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
