"""Parse JSON and YAML configurations into trees of values with line numbers."""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Literal

import yaml

from .report import Entry, Node, Report, load_keys

MAXIMUM_DEPTH = 64
"""Deeper nesting is rejected; real configurations stay below 8."""
_TOO_DEEP = f"values must not nest deeper than {MAXIMUM_DEPTH} levels"
MAXIMUM_NODES = 20_000
"""More values, with aliases expanded, are rejected; real configurations stay below 500."""


class UnreadableError(ValueError):
    """The text cannot be parsed: line, rule, fix and value of the finding that stopped the parser."""

    def __init__(self, line: int, rule: str, fix: str = "", value: object = None) -> None:
        self.line, self.rule, self.fix, self.value = line, rule, fix, value
        super().__init__(rule)


def mapping(entries: list[Entry], line: int, report: Report) -> Node:
    """Build a mapping and report duplicate keys, of which other parsers silently keep the last."""
    unique: dict[str, Entry] = {}
    for entry in entries:
        if entry.key in unique:
            first = unique[entry.key].line
            rule = f"the key is duplicated; it is first set on line {first}"
            report.error(entry.key, rule, "remove one of the two", line=entry.line)
        unique[entry.key] = entry
    kept = tuple(unique.values())
    return Node(line=line, kind="mapping", entries=kept, size=1 + sum(entry.node.size for entry in kept))


def check_limits(size: int, depth: int, line: int) -> None:
    if depth > MAXIMUM_DEPTH:
        raise UnreadableError(line, _TOO_DEEP)
    if size > MAXIMUM_NODES:
        raise UnreadableError(line, f"the file has more than {MAXIMUM_NODES} values (aliases expanded)")


_COMMENTS = ("#", "//", "/*")
_MOST_DIGITS = 300
_RULES = {
    "Expecting ',' delimiter": "expected a comma or a closing bracket",
    "Expecting ':' delimiter": "expected a colon after the key",
    "Expecting property name enclosed in double quotes": "a key must be in double quotes",
    "Expecting value": "expected a value",
    "Extra data": "there is text after the end of the document",
}
"""Rules for the messages of `json`."""


_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[{}\[\],:]|[^\s{}\[\],:"]++', re.DOTALL)
"""Strings, punctuation and other scalars of a JSON text."""


class _JsonReader:
    """Builds nodes of the tokens of a text that `json.loads` accepts, as Transformers and Accelerate read it.

    DeepSpeed's own parser (hjson) accepts more. Numbers that `json` would read as infinity or NaN are reported.
    """

    def __init__(self, text: str, report: Report) -> None:
        if not text.strip():
            raise UnreadableError(1, "the file is empty")
        self.report = report
        breaks = [match.start() for match in re.finditer("\n", text)]
        self.tokens: list[tuple[str, int]] = []
        """Tokens with their lines, last first."""
        values = depth = 0
        for match in _TOKEN.finditer(text):
            word, line = match[0], bisect.bisect_left(breaks, match.start()) + 1
            depth += (word in "{[") - (word in "]}")
            # What precedes a colon is a key.
            values += (word not in ",:]}") - (word == ":")
            check_limits(values, depth, line)
            self.tokens.append((word, line))
        self.tokens.reverse()
        try:
            json.loads(text, parse_int=len, parse_float=len, parse_constant=len)
        except json.JSONDecodeError as error:
            before = text[: error.pos].rstrip(" \t\r\n")
            if error.msg.startswith("Illegal trailing comma") or (
                before[-1:] == "," and text.startswith(("]", "}"), error.pos)
            ):
                line = bisect.bisect_left(breaks, len(before) - 1) + 1
                rule, fix = "not valid JSON: there is a comma after the last member", "remove the comma"
                raise UnreadableError(line, rule, fix) from None
            is_comment = text.startswith(_COMMENTS, error.pos)
            fix = "remove the comment: only DeepSpeed's parser supports comments" if is_comment else ""
            rule = "it has a comment" if is_comment else _RULES.get(error.msg, error.msg[:1].lower() + error.msg[1:])
            raise UnreadableError(error.lineno, f"not valid JSON: {rule}", fix) from None

    def node(self) -> Node:
        """Take the tokens of the next value."""
        word, line = self.tokens.pop()
        if word == "{":
            return mapping(list(self.members()), line, self.report)
        if word == "[":
            items = tuple(self.items())
            return Node(line=line, kind="sequence", items=items, size=1 + sum(item.size for item in items))
        return Node(line=line, kind="scalar", scalar=self.scalar(word, line))

    def members(self) -> Iterator[Entry]:
        while (word := self.tokens.pop())[0] != "}":
            if word[0] != ",":
                _, line = self.tokens.pop()
                yield Entry(key=json.loads(word[0]), line=line, node=self.node())

    def items(self) -> Iterator[Node]:
        while (word := self.tokens.pop())[0] != "]":
            if word[0] != ",":
                self.tokens.append(word)
                yield self.node()

    def scalar(self, word: str, line: int) -> object:
        if word in ("NaN", "Infinity", "-Infinity"):
            self.report.error("", "is not a JSON number", "write a finite number", value=word, line=line)
            return 0
        if not word.lstrip("-")[:1].isdigit():
            return json.loads(word)
        number = float(word)
        if math.isinf(number):
            self.report.error("", "the number is too large", "reduce it", value=word[:40], line=line)
            return 0
        return int(word) if len(word) <= _MOST_DIGITS and word.lstrip("-").isdecimal() else number


# libyaml is about ten times faster; the pure Python parser is the fallback where PyYAML was built without it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PREFIX = "tag:yaml.org,2002:"
_MERGE = f"{_PREFIX}merge"
_LARGEST_BITS = 1000
"""Largest integer. `1:1:1` is a base-60 integer, which can have more digits than Python prints."""
_PLAIN = {
    f"{_PREFIX}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge", "timestamp", "value")
}


class _YamlReader:
    """Builds what `yaml.safe_load` returns, but with line numbers, and reports what `safe_load` hides."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.constructor = yaml.SafeLoader("")
        self.nodes: dict[yaml.Node, Node | None] = {}
        """Nodes by what they are made of, since aliases repeat values; `None` while one is made."""

    def document(self, text: str) -> Node:
        depth = documents = 0
        # Composing recurses without a limit of its own.
        for event in yaml.parse(text, Loader=_LOADER):
            documents += isinstance(event, yaml.DocumentStartEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            line = _line(event)
            check_limits(0, depth, line)
            if documents > 1:
                raise UnreadableError(line, "the file has more than one YAML document")
        root = yaml.compose(text, Loader=_LOADER)
        if root is None:
            raise UnreadableError(1, "the file is empty")
        return self.node(root)

    def node(self, source: yaml.Node) -> Node:
        line = _line(source)
        if source in self.nodes:
            if (known := self.nodes[source]) is None:
                raise UnreadableError(line, "an alias is used before or inside the value that it names")
            return known
        self.nodes[source] = None
        if source.tag not in _PLAIN:
            rule = "tags that build objects are not supported, as in `yaml.safe_load`"
            raise UnreadableError(line, rule, "write a plain value", source.tag)
        if isinstance(source, yaml.MappingNode):
            node = mapping(self.entries(source), line, self.report)
        elif isinstance(source, yaml.SequenceNode):
            items = tuple(self.node(item) for item in source.value)
            node = Node(line=line, kind="sequence", items=items, size=1 + sum(item.size for item in items))
        else:
            node = Node(line=line, kind="scalar", scalar=self.scalar(source, line))
        check_limits(node.size, 0, line)
        self.nodes[source] = node
        return node

    def entries(self, source: yaml.MappingNode) -> list[Entry]:
        entries: list[Entry] = []
        merged: list[Entry] = []
        for key_source, value_source in source.value:
            key, value = self.node(key_source), self.node(value_source)
            if key.kind != "scalar":
                raise UnreadableError(key.line, "a key must be a string, not a list or mapping")
            if key_source.tag == _MERGE:
                merged += [entry for part in value.items or (value,) for entry in part.entries]
                continue
            if not isinstance(key.scalar, str):
                self.report.error("", "a key must be a string", "quote the key", value=key.scalar, line=key.line)
            entries.append(Entry(key=str(key.scalar), line=key.line, node=value))
        present = {entry.key for entry in entries}
        inherited = {entry.key: entry for entry in reversed(merged) if entry.key not in present}
        return [*entries, *reversed(inherited.values())]

    def scalar(self, source: yaml.Node, line: int) -> object:
        """Return the value that `yaml.safe_load` returns."""
        if source.tag == _MERGE:
            return source.value
        try:
            if source.tag == f"{_PREFIX}int" and len(source.value) > _LARGEST_BITS:
                raise OverflowError
            value: object = self.constructor.construct_object(source)
            if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
                raise OverflowError
            return value
        except (ValueError, yaml.YAMLError, KeyError, IndexError, OverflowError):
            self.report.error("", "is not a valid YAML value", "quote it", value=source.value[:80], line=line)
            return source.value


def _line(source: Any) -> int:
    return 1 if source.start_mark is None else int(source.start_mark.line) + 1


MAXIMUM_BYTES = 1 << 20
"""Larger files are rejected without being parsed."""
_JSON_SUFFIXES = {".json", ".hjson"}
_YAML_SUFFIXES = {".yaml", ".yml"}


def parse(text: str | bytes, filename: str) -> Report:
    """Decode and parse a configuration, JSON by its suffix or first character, else YAML; report syntax errors."""
    report = Report(filename=filename)
    try:
        size = len(text) if isinstance(text, bytes) else len(text.encode("utf-8", "surrogatepass"))
        if size > MAXIMUM_BYTES:
            raise UnreadableError(1, f"the file has {size} bytes, but a configuration may have at most {MAXIMUM_BYTES}")
        if isinstance(text, bytes):
            content = text
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                line = content.count(b"\n", 0, error.start) + 1
                raise UnreadableError(line, f"byte {error.start} is not UTF-8", "save the file as UTF-8") from None
        suffix = PurePath(filename).suffix.lower()
        as_json = suffix in _JSON_SUFFIXES
        if suffix not in _JSON_SUFFIXES | _YAML_SUFFIXES:
            as_json = text.lstrip("\ufeff \t\r\n").startswith(("{", "["))
        if text.startswith("\ufeff"):
            text = text[1:]
            rule = "the file starts with a byte order mark" + (", which `json.load` rejects" if as_json else "")
            add = report.error if as_json else report.warning
            add("", rule, "save the file as UTF-8 without a byte order mark", line=1)
        root = _JsonReader(text, report).node() if as_json else _YamlReader(report).document(text)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", str(error).splitlines()[0])
        # PyYAML 6.0.4 has a limit of its own, above ours.
        rule = _TOO_DEEP if "nesting depth" in str(problem) else f"not valid YAML: {problem}"
        report.is_readable = False
        report.error("", rule, line=1 if mark is None else mark.line + 1)
        return report
    except UnreadableError as error:
        report.is_readable = False
        report.error("", error.rule, error.fix, value=error.value, line=error.line)
        return report
    report.is_readable = root.kind == "mapping"
    if report.is_readable:
        report.root = root
    else:
        empty = root.kind == "scalar" and root.scalar is None
        rule = "the file is empty" if empty else "the file must be a mapping of keys to values"
        report.error("", rule, value=None if empty else root.plain(), line=root.line)
    return report


def detect_kind(report: Report) -> Literal["deepspeed", "accelerate", "trl"]:
    """Return the format with most keys that the others do not have; the suffix decides without TRL keys."""
    accelerate, deepspeed = ({*load_keys(name)["root"]["keys"]} for name in ("accelerate", "deepspeed"))
    trl, keys = {*load_keys("trl")["keys"]}, {entry.key for entry in report.root.entries}
    of_accelerate, of_deepspeed = len(keys & accelerate - deepspeed - trl), len(keys & deepspeed - accelerate - trl)
    if len(keys & trl - accelerate - deepspeed) > max(of_accelerate, of_deepspeed):
        return "trl"
    difference = len(keys & accelerate - deepspeed) - len(keys & deepspeed - accelerate)
    is_yaml = PurePath(report.filename).suffix.lower() in _YAML_SUFFIXES
    return "accelerate" if difference > 0 or (difference == 0 and is_yaml) else "deepspeed"
