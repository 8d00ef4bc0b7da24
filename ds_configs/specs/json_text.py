"""JSON that people write or edit: no key twice, of which Python keeps the last, and no number that JSON lacks."""

from __future__ import annotations

import json
import math
from typing import Any


def strict_json(text: str | bytes) -> Any:
    """Return what JSON reads in a text.

    Raises:
        ValueError: it is no JSON, states a key twice, or a number that is not finite.

    >>> strict_json('{"save_steps": NaN}')
    Traceback (most recent call last):
    ValueError: NaN is not a finite number
    """
    try:
        return json.loads(text, object_pairs_hook=_mapping, parse_constant=_number, parse_float=_number)
    except RecursionError:
        raise ValueError("values nest too deeply") from None


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return found


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value
