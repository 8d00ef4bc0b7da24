"""The shape of a parsed configuration: nodes that remember their line, whatever syntax they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAXIMUM_DEPTH = 64
"""Nesting beyond this is refused; real configurations stay below 8."""
MAXIMUM_NODES = 20_000
"""Values beyond this, with aliases expanded, are refused; real configurations stay below 500."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One value of a configuration file."""

    line: int
    """Line on which the value starts, counted from 1."""
    kind: Literal["mapping", "sequence", "scalar"]
    """Whether `entries`, `items` or `scalar` holds the content."""
    scalar: object = None
    """Python value of a scalar."""
    entries: tuple[Entry, ...] = ()
    """Members of a mapping in file order; of duplicate keys only the last."""
    items: tuple[Node, ...] = ()
    """Members of a sequence."""
    size: int = 1
    """Values in this subtree, with aliases expanded."""

    def get(self, key: str) -> Node | None:
        """Return the value under `key`, or `None`."""
        return next((entry.node for entry in self.entries if entry.key == key), None)

    def plain(self) -> object:
        """Return the subtree as dictionaries, lists and scalars."""
        if self.kind == "mapping":
            return {entry.key: entry.node.plain() for entry in self.entries}
        return [item.plain() for item in self.items] if self.kind == "sequence" else self.scalar


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One key of a mapping with its value."""

    key: str
    """The key."""
    line: int
    """Line of the key, counted from 1."""
    node: Node
    """The value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that no reader of the file can overlook."""

    line: int
    """Line of the problem, counted from 1."""
    rule: str
    """What must hold."""
    fix: str = ""
    """What to write instead."""
    key: str = ""
    """The key concerned; empty for a problem of the syntax."""
    value: object = None
    """The offending text; `None` when there is none to show."""
    warning: bool = False
    """Whether the file still works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """Result of parsing a text."""

    root: Node | None
    """The tree; `None` when the text cannot be read at all."""
    problems: tuple[Problem, ...]
    """Everything wrong with the syntax."""


class UnreadableError(ValueError):
    """The text has no tree; carries the one problem that stopped the parser."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.rule)


def mapping(entries: list[Entry], line: int, problems: list[Problem]) -> Node:
    """Build a mapping, reporting duplicate keys; readers silently keep the last of them or stop."""
    unique: dict[str, Entry] = {}
    for entry in entries:
        if entry.key in unique:
            first = unique[entry.key].line
            problems.append(
                Problem(
                    line=entry.line,
                    key=entry.key,
                    rule=f"the key stands twice, first on line {first}",
                    fix="remove one of the two",
                )
            )
        unique[entry.key] = entry
    kept = tuple(unique.values())
    return Node(line=line, kind="mapping", entries=kept, size=1 + sum(entry.node.size for entry in kept))


def check_limits(size: int, depth: int, line: int) -> None:
    """Raise when a tree grows beyond what a configuration can be."""
    if depth > MAXIMUM_DEPTH:
        raise UnreadableError(Problem(line=line, rule=f"values nest deeper than {MAXIMUM_DEPTH} levels"))
    if size > MAXIMUM_NODES:
        raise UnreadableError(
            Problem(line=line, rule=f"the file holds more than {MAXIMUM_NODES} values, aliases expanded")
        )
