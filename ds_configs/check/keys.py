"""Checks keys, types and ranges against the shipped description of what each library accepts."""

from __future__ import annotations

import datetime
import difflib
import functools
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .report import MAXIMUM_FINDINGS, Report, as_integer
from .tree import Entry, Node

Schema = dict[str, Any]
_DATA = Path(__file__).resolve().parent.parent / "data"
_FLAG_WORDS = {"y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0"}
# Beyond int64: sizes end up in torch and NCCL, which have no such integers.
_INTEGER_LIMIT = 1 << 63
_TYPE_NAMES = {
    "boolean": "true or false",
    "integer": "an integer",
    "count": "an integer",
    "number": "a number",
    "string": "a string",
    "text": "a string",
    "flag": "true or false",
    "list": "a list",
    "object": "a mapping",
    "null": "null",
}


@functools.cache
def load_keys(name: str) -> Schema:
    """Return the description of `deepspeed` or `accelerate` keys."""
    schema: Schema = json.loads((_DATA / f"{name}_keys.json").read_text(encoding="utf-8"))
    return schema


def nearest_key(name: str, known: list[str]) -> str:
    """Return advice that names the closest known key, or an empty string."""
    lowered = {key.lower(): key for key in known}
    close = difflib.get_close_matches(name.lower()[:100], list(lowered), n=1, cutoff=0.6)
    return f"did you mean {lowered[close[0]]!r}?" if close else ""


class KeyWalker:
    """Compares a tree with a schema and reports into a `Report`."""

    def __init__(
        self,
        report: Report,
        *,
        unknown: Callable[[str, Entry, Schema], None],
        auto: Callable[[str, Schema], None],
    ) -> None:
        self.report = report
        self.unknown = unknown
        """Called with the path, the entry and the schema of its section."""
        self.auto = auto
        """Called with the path and schema of a value `auto` that the schema does not list."""

    def walk(self, node: Node, schema: Schema, path: str = "") -> None:
        """Check one value and everything below it."""
        if "keys" not in schema:
            self.check_value(node, schema, path)
        elif node.kind == "mapping":
            self.walk_mapping(node, schema, path)
        elif node.kind == "scalar" and node.scalar is None and schema.get("nullable"):
            return
        elif node.kind == "scalar" and node.scalar == "auto":
            self.auto(path, schema)
        else:
            self.report.error(path, "must be a mapping", value=node.plain(), line=node.line)

    def walk_mapping(self, node: Node, schema: Schema, path: str) -> None:
        keys, prefix = schema["keys"], schema.get("prefix", "")
        for entry in node.entries:
            if len(self.report.findings) > MAXIMUM_FINDINGS:
                return
            child = f"{path}.{entry.key}" if path else entry.key
            known = keys.get(entry.key) or (keys.get(prefix + entry.key) if prefix else None)
            if known is None:
                self.unknown(child, entry, schema)
                continue
            if "deprecated" in known:
                instead = f"write {known['deprecated']!r}" if known["deprecated"] else "remove it"
                self.report.warning(child, "the key is deprecated", instead, line=entry.line)
            if "alias_of" in known and node.get(known["alias_of"]) is not None:
                rule = f"is another name of {known['alias_of']!r}, which stands beside it"
                self.report.error(child, rule, "remove one of the two", line=entry.line)
            self.walk(entry.node, known, child)

    def check_value(self, node: Node, schema: Schema, path: str) -> None:
        kinds = schema["types"]
        if node.kind == "scalar" and node.scalar == "auto" and "auto" not in schema.get("choices", ()):
            if not schema.get("auto"):
                self.auto(path, schema)
            return
        if "unsettable" in kinds:
            fix = "remove the key"
            self.report.error(path, "takes a Python object, which no file can hold", fix, line=node.line)
            return
        if not any(has_type(node, kind) for kind in kinds):
            value = node.plain()
            wanted = " or ".join(dict.fromkeys(_TYPE_NAMES[kind] for kind in kinds))
            if choices := schema.get("choices"):
                wanted = "one of " + ", ".join(str(choice) for choice in choices)
            shown = value if value is not None else "null"
            self.report.error(path, f"must be {wanted}", advice(value, kinds), value=shown, line=node.line)
            return
        self.check_range(node, schema, path)

    def check_range(self, node: Node, schema: Schema, path: str) -> None:
        value = node.scalar
        for item in node.items if "items" in schema else ():
            self.check_value(item, schema["items"], path)
        if value is None or node.kind != "scalar":
            return
        if choices := schema.get("choices"):
            folded = {str(choice).lower() for choice in choices}
            chosen = value in choices or (schema.get("ignore_case") and str(value).lower() in folded)
            if isinstance(value, str) is not isinstance(choices[0], str) or not chosen:
                listed = ", ".join(str(choice) for choice in choices)
                fix = nearest_key(value, choices) if isinstance(value, str) and isinstance(choices[0], str) else ""
                self.report.error(path, f"must be one of {listed}", fix, value=value, line=node.line)
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        bounds = (
            ("min", "at least", operator.ge),
            ("above", "greater than", operator.gt),
            ("max", "at most", operator.le),
            ("below", "less than", operator.lt),
        )
        for label, words, holds in bounds:
            if label in schema and not holds(value, schema[label]):
                self.report.error(path, f"must be {words} {schema[label]:g}", value=value, line=node.line)


def has_type(node: Node, kind: str) -> bool:
    """Say whether a value has a JSON type; booleans are no integers, `5e8` is an integer, `"3"` is not."""
    value = node.scalar
    if kind == "any":
        return True
    if node.kind != "scalar":
        return kind == ("object" if node.kind == "mapping" else "list")
    if kind in ("boolean", "null"):
        return isinstance(value, bool) if kind == "boolean" else value is None
    if isinstance(value, bool):
        return kind == "flag"
    if kind == "flag":
        return str(value).lower() in _FLAG_WORDS
    if kind in ("string", "text"):
        return isinstance(value, str) or (kind == "text" and isinstance(value, int | float | datetime.date))
    if kind == "count":
        return isinstance(value, int)
    if kind == "integer":
        whole = as_integer(value)
        return whole is not None and abs(whole) < _INTEGER_LIMIT
    return kind == "number" and isinstance(value, int | float)


def advice(value: object, kinds: list[str]) -> str:
    """Return what to write instead of a value of the wrong type."""
    numeric = {"integer", "count", "number"} & set(kinds)
    if isinstance(value, str) and numeric:
        try:
            number = float(value)
        except ValueError:
            return ""
        whole = as_integer(number)
        return f"write {whole if whole is not None else value} without quotes" if whole is not None else ""
    if isinstance(value, str) and "boolean" in kinds and value.lower() in ("true", "false"):
        return f"write {value.lower()} without quotes"
    if isinstance(value, bool) and {"string", "text"} & set(kinds):
        return "quote the word: YAML reads yes, no, on, off, true and false as booleans"
    if isinstance(value, float) and "count" in kinds and as_integer(value) is not None:
        return f"write {as_integer(value)}"
    return ""
