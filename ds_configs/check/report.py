"""A parsed file with the findings about it, and the checks that both formats share: keys, types and combinations."""

from __future__ import annotations

import datetime
import difflib
import functools
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..legality.combinations import SETTINGS, cell, rejection
from ..specs.errors import ConfigError

MAXIMUM_FINDINGS = 200
"""More findings are not listed: they probably have one cause, or the file is not a configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One value of a configuration file."""

    line: int
    """Line on which the value starts, counted from 1."""
    kind: Literal["mapping", "sequence", "scalar"]
    """Which of `entries`, `items` and `scalar` has the content."""
    scalar: object = None
    entries: tuple[Entry, ...] = ()
    items: tuple[Node, ...] = ()
    size: int = 1
    """Values in this subtree, with aliases expanded."""

    def get(self, key: str) -> Node | None:
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
    line: int
    node: Node


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One error or warning."""

    kind: Literal["error", "warning"]
    """`error`: the run fails or ignores a setting; `warning`: a key has no effect or an unexpected one."""
    error: ConfigError

    def to_dict(self) -> dict[str, Any]:
        error = self.error
        return {
            "kind": self.kind,
            "where": error.where,
            "value": _json_value(error.value),
            "rule": error.rule,
            "fix": error.fix,
            "message": str(error),
        }


def _json_value(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    return value if isinstance(value, bool | int | str) or value is None else str(value)


@dataclass(kw_only=True, slots=True)
class Report:
    """A parsed file and the findings about it, each with its file name, line and key path."""

    filename: str
    root: Node = Node(line=1, kind="mapping")
    """The tree; an empty mapping if the file is not readable."""
    is_readable: bool = True
    """Whether the file is a mapping of keys to values."""
    findings: list[Finding] = field(default_factory=list)

    def in_order(self) -> tuple[Finding, ...]:
        """Return the first `MAXIMUM_FINDINGS` findings, sorted by line."""

        def line(finding: Finding) -> int:
            text = finding.error.where.rsplit(" ", 1)[0].rsplit(":", 1)[-1]
            return int(text) if text.isdigit() else 0

        ordered = sorted(self.findings, key=line)
        if len(ordered) <= MAXIMUM_FINDINGS:
            return tuple(ordered)
        rule = f"has more than {MAXIMUM_FINDINGS} findings; the others are not listed"
        more = Finding(kind="error", error=ConfigError(where=self.filename, rule=rule))
        return (*ordered[:MAXIMUM_FINDINGS], more)

    def node(self, path: str) -> Node | None:
        """Return the node at a dotted path; `None` if it is absent."""
        node: Node | None = self.root
        for key in path.split(".") if path else ():
            node = node.get(key) if node is not None else None
        return node

    def has(self, path: str) -> bool:
        return self.node(path) is not None

    def value(self, path: str) -> object:
        node = self.node(path)
        return node.scalar if node is not None else None

    def integer(self, path: str) -> int | None:
        """Return an integral number at the path; `None` for anything else."""
        return as_integer(self.value(path))

    def number(self, path: str) -> float | None:
        """Return a number at the path; `None` for anything else."""
        value = self.value(path)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def text(self, path: str) -> str | None:
        value = self.value(path)
        return value if isinstance(value, str) else None

    def true(self, path: str) -> bool:
        """Return whether the value is the boolean `true`."""
        return self.value(path) is True

    def line(self, path: str) -> int:
        """Return the line of the deepest existing part of the path."""
        node, line = self.root, self.root.line
        for key in path.split(".") if path else ():
            entry = next((entry for entry in node.entries if entry.key == key), None)
            if entry is None:
                break
            node, line = entry.node, entry.line
        return line

    def error(self, path: str, rule: str, fix: str = "", *, value: object = None, line: int = 0) -> None:
        self._add("error", path, rule, fix, value, line)

    def warning(self, path: str, rule: str, fix: str = "", *, value: object = None, line: int = 0) -> None:
        self._add("warning", path, rule, fix, value, line)

    def _add(self, kind: Literal["error", "warning"], path: str, rule: str, fix: str, value: object, line: int) -> None:
        shown = self.value(path) if value is None else value
        # A key path is shown as one line of printable characters.
        key = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in path[:200])
        where = f"{self.filename}:{line or self.line(path)} {key}{'...' * (len(path) > 200)}".rstrip()
        self.findings.append(Finding(kind=kind, error=ConfigError(where=where, value=shown, rule=rule, fix=fix)))


def as_integer(value: object) -> int | None:
    """Return a number without a fraction, such as 5e8, as an integer; `None` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if math.isfinite(value) and value == int(value) else None


Schema = dict[str, Any]
DATA = Path(__file__).resolve().parent.parent / "data"
TRUE_WORDS, FALSE_WORDS = {"y", "yes", "t", "true", "on", "1"}, {"n", "no", "f", "false", "off", "0"}
# Sizes end up in torch and NCCL, whose integers have 64 bits.
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
    schema: Schema = json.loads((DATA / f"{name}_keys.json").read_text(encoding="utf-8"))
    return schema


def nearest_key(name: str, known: list[str]) -> str:
    """Return a fix that suggests the closest known key, or an empty string."""
    lowered = {key.lower(): key for key in known}
    close = difflib.get_close_matches(name.lower()[:100], list(lowered), n=1, cutoff=0.6)
    return f"did you mean {lowered[close[0]]!r}?" if close else ""


class KeyWalker:
    """Compares a tree with a schema and records findings in a `Report`."""

    def __init__(
        self, report: Report, *, unknown: Callable[[str, Entry, Schema], None], auto: Callable[[str, Schema], None]
    ) -> None:
        self.report = report
        self.unknown = unknown
        """Called with the path, the entry and the schema of its section."""
        self.auto = auto
        """Called with the path and schema of a value `auto` that the schema does not allow."""

    def walk(self, node: Node, schema: Schema, path: str = "") -> None:
        """Check a value and all values below it."""
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
                rule = f"is another name of {known['alias_of']!r}, which is also set"
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
            self.report.error(path, "requires a Python object, which a file cannot have", fix, line=node.line)
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
    """Return whether a value has a JSON type: `5e8` is an integer; booleans and `"3"` are not."""
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
        return str(value).lower() in TRUE_WORDS | FALSE_WORDS
    if kind in ("string", "text"):
        return isinstance(value, str) or (kind == "text" and isinstance(value, int | float | datetime.date))
    if kind == "count":
        return isinstance(value, int)
    if kind == "integer":
        whole = as_integer(value)
        return whole is not None and abs(whole) < _INTEGER_LIMIT
    return kind == "number" and isinstance(value, int | float)


def advice(value: object, kinds: list[str]) -> str:
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
        return "quote the word: YAML parses yes, no, on, off, true and false as booleans"
    if isinstance(value, str) and "list" in kinds:
        return f"write [{value[:80]}]"
    if isinstance(value, float) and "count" in kinds and as_integer(value) is not None:
        return f"write {as_integer(value)}"
    return ""


_OPTIMIZERS = {
    "adam": "adamw_torch",
    "adamw": "adamw_torch",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "rmsprop": "rmsprop",
    "adafactor": "adafactor",
}
_MADE_BY_DEEPSPEED = frozenset({("sgd", "zero_offload"), ("rmsprop", "zero_offload")})
"""Accelerate replaces optimizers that the Trainer creates, but not those in the DeepSpeed JSON."""
_DEVICES = ("MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU")


def check_combinations(report: Report, settings: Iterable[tuple[str, str]], columns: Iterable[str]) -> None:
    """Warn about each pair that no test proves: of a setting of this file with its path, and a column of any file."""
    columns = list(columns)
    for setting, path in settings:
        rejected: dict[str, list[str]] = {}
        for column in columns:
            verdict = cell(setting, column)
            if not verdict.is_proven and (setting, column) not in _MADE_BY_DEEPSPEED:
                rejected.setdefault(verdict.reason, []).append(column)
        for reason, names in rejected.items():
            rule, fix = rejection(setting, names, reason)
            report.warning(path, f"{SETTINGS[setting]} {rule}", fix)


def settings_of_deepspeed(report: Report) -> Iterator[tuple[str, str]]:
    optimizer = _OPTIMIZERS.get((report.text("optimizer.type") or "").lower())
    if optimizer is not None:
        yield optimizer, "optimizer.type"
    for name, path in (("bf16", "bf16.enabled"), ("compile", "compile.deepcompile")):
        if report.true(path):
            yield name, path


def columns_of_deepspeed(report: Report) -> Iterator[str]:
    stage = report.integer("zero_optimization.stage") if report.has("zero_optimization.stage") else 0
    if stage in (0, 1, 2, 3):
        yield f"zero{stage}"
    devices = (report.text(f"zero_optimization.offload_{part}.device") for part in ("optimizer", "param"))
    if any(device in ("cpu", "nvme") for device in devices):
        yield "zero_offload"
    sizes = {"sp": "sequence_parallel_size", "tp": "tensor_parallel.autotp_size", "ep": "expert_parallel.autoep_size"}
    for name, path in sizes.items():
        enabled = name != "ep" or report.true("expert_parallel.enabled")
        if enabled and (report.integer(path) or 1) > 1:
            yield name


def settings_of_accelerate(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the settings that Accelerate passes to the processes."""
    kind = report.text("distributed_type")
    if report.text("mixed_precision") == "bf16":
        yield "bf16", "mixed_precision"
    for path in ("dynamo_config.dynamo_backend", "dynamo_config.backend"):
        if kind != "DEEPSPEED" and (report.text(path) or "no").lower() != "no":
            yield "compile", path
    path = "fsdp_config.fsdp_activation_checkpointing"
    if kind == "FSDP" and str(report.value(path)).lower() == "true":
        yield "gradient_checkpointing", path


def columns_of_accelerate(report: Report) -> Iterator[str]:
    """Yield the columns of an Accelerate YAML, without those of its DeepSpeed JSON."""
    kind = report.text("distributed_type")
    if kind in _DEVICES:
        yield "ddp"
    version = report.value("fsdp_config.fsdp_version") or report.value("fsdp_config.version")
    if kind == "FSDP" and str(version) == "2":
        yield "fsdp2"
        if str(report.value("fsdp_config.fsdp_offload_params")).lower() == "true":
            yield "fsdp2_offload"
    stage = report.integer("deepspeed_config.zero_stage")
    if kind == "DEEPSPEED" and stage in (0, 1, 2, 3):
        yield f"zero{stage}"
    for name in ("sp", "cp"):
        if (report.integer(f"parallelism_config.parallelism_config_{name}_size") or 1) > 1:
            yield name
