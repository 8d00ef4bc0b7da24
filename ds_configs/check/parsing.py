"""Parse JSON and YAML configurations into trees of values with line numbers."""

from __future__ import annotations

import bisect
import json
import re
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


_STRINGS = json.JSONDecoder(strict=True)
_BLANK = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_WORDS: dict[str, object] = {"true": True, "false": False, "null": None}
_NOT_JSON = ("-Infinity", "Infinity", "NaN")
_COMMENTS = ("#", "//", "/*")


class _JsonReader:
    """Reads JSON as strictly as `json.load` in Transformers and Accelerate; DeepSpeed's hjson parser accepts more."""

    def __init__(self, text: str, report: Report) -> None:
        self.text = text
        self.position = 0
        self.report = report
        self.count = 0
        self.breaks = [match.start() for match in re.finditer("\n", text)]

    def line(self, position: int | None = None) -> int:
        return bisect.bisect_left(self.breaks, self.position if position is None else position) + 1

    def stop(self, rule: str, fix: str = "") -> UnreadableError:
        if not fix and self.text.startswith(_COMMENTS, self.position):
            fix = "remove the comment: only DeepSpeed's parser supports comments"
        return UnreadableError(self.line(), f"not valid JSON: {rule}", fix)

    def peek(self) -> str:
        match = _BLANK.match(self.text, self.position)
        assert match is not None, "the pattern matches the empty string"
        self.position = match.end()
        return self.text[self.position : self.position + 1]

    def document(self) -> Node:
        if not self.peek():
            raise UnreadableError(1, "the file is empty")
        root = self.value(0)
        if self.peek():
            raise self.stop("there is text after the end of the document")
        return root

    def value(self, depth: int) -> Node:
        start, line = self.peek(), self.line()
        self.count += 1
        check_limits(self.count, depth, line)
        if start == "{":
            return self.mapping(depth, line)
        if start == "[":
            return self.sequence(depth, line)
        if start == '"':
            return Node(line=line, kind="scalar", scalar=self.string())
        for word, meaning in _WORDS.items():
            if self.text.startswith(word, self.position):
                self.position += len(word)
                return Node(line=line, kind="scalar", scalar=meaning)
        return Node(line=line, kind="scalar", scalar=self.number())

    def string(self) -> str:
        try:
            text, self.position = _STRINGS.raw_decode(self.text, self.position)
        except json.JSONDecodeError as error:
            self.position = min(error.pos, len(self.text))
            raise self.stop(error.msg[:1].lower() + error.msg[1:]) from None
        return str(text)

    def number(self) -> int | float:
        for word in _NOT_JSON:
            if self.text.startswith(word, self.position):
                line, self.position = self.line(), self.position + len(word)
                self.report.error("", "is not a JSON number", "write a finite number", value=word, line=line)
                return 0
        match = _NUMBER.match(self.text, self.position)
        if match is None:
            raise self.stop("a value is missing" if self.peek() in ",]}" else "this is not a value")
        line, self.position = self.line(), match.end()
        integer, fraction, exponent = match.groups()
        if fraction is None and exponent is None and len(integer) <= 300:
            return int(integer)
        number = float(match.group())
        if number in (float("inf"), float("-inf")):
            self.report.error("", "the number is too large", "reduce it", value=match.group()[:40], line=line)
            return 0
        return number

    def sequence(self, depth: int, line: int) -> Node:
        self.position += 1
        items: list[Node] = []
        if self.peek() == "]":
            self.position += 1
            return Node(line=line, kind="sequence")
        while True:
            items.append(self.value(depth + 1))
            if self.separator("]"):
                return Node(line=line, kind="sequence", items=tuple(items), size=1 + sum(item.size for item in items))

    def mapping(self, depth: int, line: int) -> Node:
        self.position += 1
        entries: list[Entry] = []
        if self.peek() == "}":
            self.position += 1
            return Node(line=line, kind="mapping")
        while True:
            if self.peek() != '"':
                raise self.stop("a key must be in double quotes")
            key_line, key = self.line(), self.string()
            if self.peek() != ":":
                raise self.stop("expected a colon after the key")
            self.position += 1
            entries.append(Entry(key=key, line=key_line, node=self.value(depth + 1)))
            if self.separator("}"):
                return mapping(entries, line, self.report)

    def separator(self, closing: str) -> bool:
        character = self.peek()
        if character == closing:
            self.position += 1
            return True
        if character != ",":
            raise self.stop(f"expected a comma or {closing!r}")
        comma = self.position
        self.position += 1
        if self.peek() == closing:
            self.position = comma
            raise self.stop("there is a comma after the last member", "remove the comma")
        return False


# libyaml is about ten times faster; the pure Python parser is the fallback where PyYAML was built without it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PREFIX = "tag:yaml.org,2002:"
_MERGE = f"{_PREFIX}merge"
_LARGEST_BITS = 1000
"""Largest integer. `1:1:1` is a base-60 integer, which can have more digits than Python prints."""
_STANDARD = {f"{_PREFIX}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}


class _YamlBuilder:
    """Builds what `yaml.safe_load` returns, but with line numbers, and reports what `safe_load` hides."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.anchors: dict[str, Node] = {}
        self.size = 0
        self.documents = 0
        self.loader: Any = yaml.SafeLoader("")

    def build(self, text: str) -> Node:
        """Build the tree from the event stream, with a stack of its own because of the recursion limit."""
        stack: list[tuple[Any, list[Node]]] = []
        root: Node | None = None
        for event in yaml.parse(text, Loader=_LOADER):
            line = _line(event.start_mark)
            if isinstance(event, yaml.DocumentStartEvent):
                self.documents += 1
                if self.documents > 1:
                    raise UnreadableError(line, "the file has more than one YAML document")
            if isinstance(event, yaml.CollectionStartEvent):
                check_limits(self.size, len(stack) + 1, line)
                self.check_tag(event.tag, line)
                stack.append((event, []))
                continue
            node = self.finished(event, stack, line)
            if node is None:
                continue
            self.size += node.size
            check_limits(self.size, len(stack), line)
            if stack:
                stack[-1][1].append(node)
            else:
                root = node
        if root is None:
            raise UnreadableError(1, "the file is empty")
        return root

    def finished(self, event: Any, stack: list[tuple[Any, list[Node]]], line: int) -> Node | None:
        """Return the node that an event completes, if any."""
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                rule = f"the alias *{event.anchor} is used before or inside the value that it names"
                raise UnreadableError(line, rule)
            return self.anchors[event.anchor]
        if isinstance(event, yaml.ScalarEvent):
            node = Node(line=line, kind="scalar", scalar=self.scalar(event, line))
            anchor = event.anchor
        elif isinstance(event, yaml.CollectionEndEvent):
            start, children = stack.pop()
            self.size -= sum(child.size for child in children)
            start_line, anchor = _line(start.start_mark), start.anchor
            if isinstance(event, yaml.SequenceEndEvent):
                size = 1 + sum(child.size for child in children)
                node = Node(line=start_line, kind="sequence", items=tuple(children), size=size)
            else:
                node = mapping(self.entries(children), start_line, self.report)
        else:
            return None
        if anchor:
            self.anchors[anchor] = node
        return node

    def entries(self, children: list[Node]) -> list[Entry]:
        entries: list[Entry] = []
        merged: list[Entry] = []
        for key, value in zip(children[::2], children[1::2], strict=True):
            if key.kind != "scalar":
                raise UnreadableError(key.line, "a key must be a string, not a list or mapping")
            if isinstance(key.scalar, _Merge):
                merged += [entry for source in value.items or (value,) for entry in source.entries]
                continue
            if not isinstance(key.scalar, str):
                self.report.error("", "a key must be a string", "quote the key", value=key.scalar, line=key.line)
            entries.append(Entry(key=str(key.scalar), line=key.line, node=value))
        present = {entry.key for entry in entries}
        for entry in merged:
            if entry.key not in present:
                present.add(entry.key)
                entries.append(entry)
        return entries

    def check_tag(self, tag: str | None, line: int) -> None:
        if tag not in (None, "!") and tag not in _STANDARD:
            rule = "tags that build objects are not supported, as in `yaml.safe_load`"
            raise UnreadableError(line, rule, "write a plain value", tag)

    def scalar(self, event: Any, line: int) -> object:
        """Return the value that `yaml.safe_load` returns."""
        tag = event.tag
        if tag in (None, "!"):
            tag = self.loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        else:
            self.check_tag(tag, line)
        if tag == _MERGE:
            return _Merge()
        try:
            if tag == f"{_PREFIX}int" and len(event.value) > _LARGEST_BITS:
                raise OverflowError
            value: object = self.loader.construct_object(yaml.ScalarNode(tag, event.value))
            if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
                raise OverflowError
            return value
        except (ValueError, yaml.YAMLError, KeyError, IndexError, OverflowError):
            self.report.error("", "is not a valid YAML value", "quote it", value=event.value[:80], line=line)
            return event.value


def _line(mark: Any) -> int:
    return 1 if mark is None else int(mark.line) + 1


class _Merge:
    """The key `<<`."""


MAXIMUM_BYTES = 1 << 20
"""Larger files are rejected without being parsed."""
_JSON_SUFFIXES = {".json", ".hjson"}
_YAML_SUFFIXES = {".yaml", ".yml"}


def parse(text: str | bytes, filename: str) -> Report:
    """Decode and parse a configuration, JSON by its suffix or first character, else YAML; report syntax errors."""
    report = Report(filename=filename)
    try:
        root = _tree(text, report)
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


def _tree(text: str | bytes, report: Report) -> Node:
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
    as_json = is_json(text, report.filename)
    if text.startswith("\ufeff"):
        text = text[1:]
        rule = "the file starts with a byte order mark" + (", which `json.load` rejects" if as_json else "")
        add = report.error if as_json else report.warning
        add("", rule, "save the file as UTF-8 without a byte order mark", line=1)
    if as_json:
        return _JsonReader(text, report).document()
    try:
        return _YamlBuilder(report).build(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        # PyYAML 6.0.4 has a limit of its own, above ours.
        is_deep = "nesting depth" in str(error.problem)
        raise UnreadableError(line, _TOO_DEEP if is_deep else f"not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UnreadableError(1, f"not valid YAML: {str(error).splitlines()[0]}") from None


def is_json(text: str, filename: str) -> bool:
    """Return whether the libraries would read this file as JSON."""
    suffix = PurePath(filename).suffix.lower()
    if suffix in _JSON_SUFFIXES or suffix in _YAML_SUFFIXES:
        return suffix in _JSON_SUFFIXES
    return text.lstrip("\ufeff \t\r\n").startswith(("{", "["))


def detect_kind(report: Report) -> Literal["deepspeed", "accelerate"]:
    """Return the format with more keys that the other does not have; the suffix decides a tie."""
    accelerate, deepspeed = ({*load_keys(name)["root"]["keys"]} for name in ("accelerate", "deepspeed"))
    keys = {entry.key for entry in report.root.entries}
    difference = len(keys & accelerate - deepspeed) - len(keys & deepspeed - accelerate)
    is_yaml = PurePath(report.filename).suffix.lower() in _YAML_SUFFIXES
    return "accelerate" if difference > 0 or (difference == 0 and is_yaml) else "deepspeed"
