"""YAML with line numbers, built from parser events: no tag, alias or nesting runs code or exhausts memory."""

from __future__ import annotations

from typing import Any

import yaml

from .tree import Entry, Node, Parsed, Problem, UnreadableError, check_limits, mapping

# libyaml is about ten times faster; the pure Python parser is the fallback where PyYAML was built without it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PREFIX = "tag:yaml.org,2002:"
_MERGE = f"{_PREFIX}merge"
_LARGEST_BITS = 1000
"""Of an integer; `1:1:1` is one to the base 60, which grows to more digits than Python writes."""
_STANDARD = {f"{_PREFIX}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}


def parse_yaml(text: str) -> Parsed:
    """Parse YAML as `yaml.safe_load` does, keeping lines and reporting what it would hide."""
    problems: list[Problem] = []
    try:
        return Parsed(root=_Builder(problems).build(text), problems=tuple(problems))
    except UnreadableError as error:
        return Parsed(root=None, problems=(*problems, error.problem))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        return Parsed(root=None, problems=(*problems, Problem(line=line, rule=f"not valid YAML: {error.problem}")))
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        return Parsed(root=None, problems=(*problems, Problem(line=1, rule=f"not valid YAML: {reason}")))


class _Builder:
    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        self.anchors: dict[str, Node] = {}
        self.size = 0
        self.documents = 0
        self.loader: Any = yaml.SafeLoader("")

    def build(self, text: str) -> Node:
        """Fold the event stream into a tree with an explicit stack, out of reach of the recursion limit."""
        stack: list[tuple[Any, list[Node]]] = []
        root: Node | None = None
        for event in yaml.parse(text, Loader=_LOADER):
            line = _line(event.start_mark)
            if isinstance(event, yaml.DocumentStartEvent):
                self.documents += 1
                if self.documents > 1:
                    raise UnreadableError(Problem(line=line, rule="the file holds more than one YAML document"))
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
            raise UnreadableError(Problem(line=1, rule="the file is empty"))
        return root

    def finished(self, event: Any, stack: list[tuple[Any, list[Node]]], line: int) -> Node | None:
        """Return the node that this event completes, if any."""
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                rule = f"the alias *{event.anchor} stands before or inside the value that it names"
                raise UnreadableError(Problem(line=line, rule=rule))
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
                node = mapping(self.entries(children), start_line, self.problems)
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
                raise UnreadableError(Problem(line=key.line, rule="a key must be a word, not a list or mapping"))
            if isinstance(key.scalar, _Merge):
                merged += [entry for source in value.items or (value,) for entry in source.entries]
                continue
            if not isinstance(key.scalar, str):
                self.problems.append(
                    Problem(line=key.line, value=key.scalar, rule="a key must be a string", fix="quote the key")
                )
            entries.append(Entry(key=str(key.scalar), line=key.line, node=value))
        present = {entry.key for entry in entries}
        for entry in merged:
            if entry.key not in present:
                present.add(entry.key)
                entries.append(entry)
        return entries

    def check_tag(self, tag: str | None, line: int) -> None:
        if tag not in (None, "!") and tag not in _STANDARD:
            rule = "tags that build objects are refused; `yaml.safe_load` refuses them too"
            raise UnreadableError(Problem(line=line, value=tag, rule=rule, fix="write the plain value"))

    def scalar(self, event: Any, line: int) -> object:
        """Turn the text into the value that `yaml.safe_load` gives."""
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
            self.problems.append(
                Problem(line=line, value=event.value[:80], rule="YAML cannot read this value", fix="quote it")
            )
            return event.value


def _line(mark: Any) -> int:
    return 1 if mark is None else int(mark.line) + 1


class _Merge:
    """The key `<<`."""
