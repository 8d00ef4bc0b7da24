"""Strict JSON with line numbers; `json.loads` gives none and keeps the last of duplicate keys."""

from __future__ import annotations

import bisect
import json
import re

from .tree import Entry, Node, Parsed, Problem, UnreadableError, check_limits, mapping

_STRINGS = json.JSONDecoder(strict=True)
_BLANK = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_WORDS: dict[str, object] = {"true": True, "false": False, "null": None}
_NOT_JSON = ("-Infinity", "Infinity", "NaN")
_COMMENTS = ("#", "//", "/*")


def parse_json(text: str) -> Parsed:
    """Parse JSON as Transformers and Accelerate do (`json.load`); DeepSpeed's hjson reader accepts more."""
    reader = _Reader(text)
    try:
        root = reader.document()
    except UnreadableError as error:
        return Parsed(root=None, problems=(*reader.problems, error.problem))
    return Parsed(root=root, problems=tuple(reader.problems))


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.problems: list[Problem] = []
        self.count = 0
        self.breaks = [match.start() for match in re.finditer("\n", text)]

    def line(self, position: int | None = None) -> int:
        return bisect.bisect_left(self.breaks, self.position if position is None else position) + 1

    def stop(self, rule: str, fix: str = "") -> UnreadableError:
        if not fix and self.text.startswith(_COMMENTS, self.position):
            fix = "remove the comment: only DeepSpeed's own reader knows comments"
        return UnreadableError(Problem(line=self.line(), rule=f"not valid JSON: {rule}", fix=fix))

    def peek(self) -> str:
        match = _BLANK.match(self.text, self.position)
        assert match is not None, "the pattern matches the empty string"
        self.position = match.end()
        return self.text[self.position : self.position + 1]

    def document(self) -> Node:
        if not self.peek():
            raise UnreadableError(Problem(line=1, rule="the file is empty"))
        root = self.value(0)
        if self.peek():
            raise self.stop("text follows the end of the document")
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
                self.problems.append(
                    Problem(line=line, value=word, rule="JSON has no such number", fix="write a finite number")
                )
                return 0
        match = _NUMBER.match(self.text, self.position)
        if match is None:
            raise self.stop("a value is missing" if self.peek() in ",]}" else "this is no value")
        line, self.position = self.line(), match.end()
        integer, fraction, exponent = match.groups()
        if fraction is None and exponent is None and len(integer) <= 300:
            return int(integer)
        number = float(match.group())
        if number in (float("inf"), float("-inf")):
            self.problems.append(
                Problem(line=line, value=match.group()[:40], rule="the number is too large for any reader")
            )
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
                raise self.stop("a key must stand in double quotes")
            key_line, key = self.line(), self.string()
            if self.peek() != ":":
                raise self.stop("a colon must follow the key")
            self.position += 1
            entries.append(Entry(key=key, line=key_line, node=self.value(depth + 1)))
            if self.separator("}"):
                return mapping(entries, line, self.problems)

    def separator(self, closing: str) -> bool:
        found = self.peek()
        if found == closing:
            self.position += 1
            return True
        if found != ",":
            raise self.stop(f"expected a comma or {closing!r}")
        comma = self.position
        self.position += 1
        if self.peek() == closing:
            self.position = comma
            raise self.stop("the last member is followed by a comma", "remove the comma")
        return False
