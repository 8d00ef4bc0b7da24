"""Reads blocks of a configuration that may hold anything, and collects what takes their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

_LONGEST_NAME = 200
_MOST_TARGETS = 16
_MOST_GROUPS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One setting, and what becomes of it."""

    key: str
    """Path below the block, such as `weight_quantization.wq1.target_bits`."""
    note: str
    """What is equal, what differs, or why nothing takes its place."""


class Replacement:
    """Collects what replaces a block."""

    def __init__(self) -> None:
        self.scheme: tuple[int, bool] | None = None
        self.annealing: tuple[Any, ...] = ()
        self.rule = ""
        self.start_step = 0
        self.bit_schedule: list[tuple[int, int]] = []
        self.activations: tuple[int, bool] | None = None
        self.targets: list[str] = []
        self.student: list[str] = []
        self.callbacks: list[str] = []
        self.equivalents: list[Difference] = []
        self.dropped: list[Difference] = []

    def keep(self, key: str, note: str) -> None:
        """Note a setting that is taken over."""
        self.equivalents.append(Difference(key=key, note=note))

    def drop(self, key: str, note: str) -> None:
        """Note a setting without an equivalent."""
        self.dropped.append(Difference(key=key, note=note))


def groups_of(
    found: Replacement, where: str, block: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], list[str]]]:
    """Yield name, parameters and targets of each group of modules."""
    for name, group in list(mapping_of(block.get("different_groups")).items())[:_MOST_GROUPS]:
        key = shown_name(name)
        modules = patterns_of(found, f"{where}.{key}.modules", mapping_of(group).get("modules", "*"))
        yield key, mapping_of(mapping_of(group).get("params")), modules


def patterns_of(found: Replacement, key: str, modules: Any) -> list[str]:
    """Return targets for patterns that DeepSpeed searched for anywhere in a module's name."""
    listed = [modules] if isinstance(modules, str) else modules if isinstance(modules, list) else []
    # Targets are separated by commas where commands take them.
    usable = [
        each
        for each in listed
        if isinstance(each, str) and each.isprintable() and len(each) <= _LONGEST_NAME and "," not in each
    ]
    if len(usable) < len(listed) or len(listed) > _MOST_TARGETS:
        found.drop(key, f"has entries that are no names, or have a comma, or are more than {_MOST_TARGETS}")
    return ["Linear" if each in ("*", "") else f"re:.*{each}" for each in usable[:_MOST_TARGETS]]


def mapping_of(value: Any) -> Mapping[str, Any]:
    """Return a section; empty if it is none."""
    return value if isinstance(value, Mapping) else {}


def is_enabled(block: Mapping[str, Any]) -> bool:
    """Return whether a section is switched on."""
    return block.get("enabled") is True


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether a value is a whole number of at least 0 that fits in 31 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def count_of(value: Any, otherwise: int) -> int:
    """Return a whole number, or the default."""
    return value if is_count(value) else otherwise


def share_of(value: Any) -> float | None:
    """Return a share above 0, up to 1; `None` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value <= 1 else None


def shown_name(name: Any) -> str:
    """Return a name on one line that any terminal can show."""
    text = str(name)[:_LONGEST_NAME]
    return text if text.isprintable() else repr(text)
