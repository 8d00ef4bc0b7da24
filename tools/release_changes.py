"""Stored facts that differ between releases of Transformers, for the tools that write `ds_configs/data`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.ds_configs.specs.errors import ConfigError, UsageError
from shardwright.ds_configs.specs.model import is_within, merged

CHANGE_HELP = "write what differs as a change for these releases, such as '>=5.18'; the facts of others stay"
"""Of the tools' option `--change`."""


def facts_in(document: Mapping[str, Any], release: str) -> Any:
    """Return what a data file says of a release, without its `changes`."""
    facts: Any = {name: value for name, value in document.items() if name != "changes"}
    for specifier, patch in document.get("changes", {}).items():
        facts = merged(facts, patch) if is_within(release, specifier) else facts
    return facts


def with_facts(document: Mapping[str, Any], facts: Mapping[str, Any], *, release: str, change: str | None) -> Any:
    """Return the content of a data file that holds new facts.

    Args:
        document: What the file holds.
        facts: What it should say of the installed release.
        release: The installed release.
        change: Specifier of the releases that differ; `None` to state the facts of all releases without a change.

    Raises:
        UsageError: the installed release has changes, or is not one of `change`.
    """
    changes: dict[str, Any] = dict(document.get("changes", {}))
    applied = [specifier for specifier in changes if is_within(release, specifier)]
    where = f"transformers {release}"
    if change is None:
        if applied:
            rule, fix = f"has changes of its own ({', '.join(applied)})", "pass one of them, or another, as --change"
            raise UsageError(ConfigError(where=where, rule=rule, fix=fix))
        return {**facts, "changes": changes} if changes else facts
    if not is_within(release, change):
        raise UsageError(
            ConfigError(where="change", value=change, rule=f"does not hold for {where}, which is installed")
        )
    others = {specifier: patch for specifier, patch in changes.items() if specifier != change}
    changes[change] = patch_between(facts_in({**document, "changes": others}, release), facts)
    return {**document, "changes": changes}


def patch_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch that makes one mapping of another; coefficients differ by one column of their rows."""
    patch: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        known = before.get(name)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            if inner := patch_between(known, value):
                patch[name] = inner
        elif name not in before or known != value:
            patch[name] = _column_patch(known, value) or value
    return patch


def _column_patch(before: Any, after: Any) -> dict[str, Any] | None:
    """Return the patch of rows that differ in one column, `None` for others; the order of rows does not count."""
    shapes = [
        [len(row) for row in rows] if isinstance(rows, list) and all(isinstance(row, list) for row in rows) else None
        for rows in (before, after)
    ]
    if shapes[0] != shapes[1] or not shapes[0] or not all(type(n) in (int, float) for row in before for n in row):
        return None
    for column in range(shapes[0][0]):
        rest, left = [[*row[:column], *row[column + 1 :]] for row in before], list(after)
        added = []
        for row, others in zip(before, rest, strict=True):
            # Of rows with equal others, the smallest first on both sides.
            matches = [each for each in left if [*each[:column], *each[column + 1 :]] == others]
            if not matches:
                break
            left.remove(min(matches))
            added.append(min(matches)[column] - row[column])
        else:
            return {"column": column, "add": added}
    return None
