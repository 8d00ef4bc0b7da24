"""Walks of docs/explain/architecture.md, followed through the code: each step calls the next, and rooms are counted."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest
from paths import ROOT
from runnable_blocks import prepare
from shardwright.cli.main import run

PAGE = (ROOT / "docs" / "explain" / "architecture.md").read_text(encoding="utf-8")


class Step(NamedTuple):
    """A function of a walk, and the step that calls it."""

    path: str
    function: str
    """`name`, or `Class.name`."""
    caller: Step | None

    @property
    def room(self) -> str:
        return str(Path(self.path).parent)

    @property
    def is_entry(self) -> bool:
        """Whether a function of another room is called; a method belongs to a value that came back."""
        return "." not in self.function and (self.caller is None or self.caller.room != self.room)


def walks() -> list[tuple[list[Step], dict[str, int]]]:
    """Each walk with the rooms that its table says are entered more than once."""
    found = []
    for block, after in re.findall(r"^```text walk\n(.*?)^```\n(.*?)(?=^#)", PAGE, flags=re.DOTALL | re.MULTILINE):
        above: list[Step] = []
        steps = []
        for indent, path, function in re.findall(r"^( *)([\w/]+\.py):([\w.]+)", block, flags=re.MULTILINE):
            depth = len(indent) // 2
            step = Step(path, function, above[depth - 1] if depth else None)
            above[depth:] = [step]
            steps.append(step)
        assert len(steps) == len(block.splitlines()), "a line of a walk is not `file.py:function`"
        stated = re.findall(r"^\| `([\w/]+)` \| (\d+) times \|", after, flags=re.MULTILINE)
        found.append((steps, {room: int(count) for room, count in stated}))
    return found


WALKS = walks()
PLAN = WALKS[0]


@cache
def definitions(path: str) -> dict[str, ast.AST]:
    """Functions, classes and methods of a file, by name."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{n.name}": n for n in node.body if isinstance(n, ast.FunctionDef)}
    return found


@cache
def imported(path: str) -> dict[str, tuple[str, str]]:
    """Names that a file imports from the package, in functions too: the file and the name that they stand for."""
    found = {}
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            home = Path(path).parents[node.level - 1].joinpath(*node.module.split(".")).with_suffix(".py")
            found |= {alias.asname or alias.name: (str(home), alias.name) for alias in node.names}
    return found


def mentioned(path: str, function: str) -> tuple[set[str], set[str]]:
    """Names and attributes in a function and in the functions of its file that it leads to."""
    names: set[str] = set()
    attributes: set[str] = set()
    left, seen = [function], set()
    while left:
        current = left.pop()
        if current in seen or current not in definitions(path):
            continue
        seen.add(current)
        for node in ast.walk(definitions(path)[current]):
            if isinstance(node, ast.Name):
                names.add(node.id)
                left.append(node.id)
            elif isinstance(node, ast.Attribute):
                attributes.add(node.attr)
    return names, attributes


def leads_to(caller: Step, step: Step) -> bool:
    """Whether the code of a step, with its helpers in the same file, names the next one as what it really is."""
    names, attributes = mentioned(caller.path, caller.function)
    if "." in step.function:
        return step.function.rpartition(".")[2] in attributes
    if caller.path == step.path:
        return step.function in names
    if any(imported(caller.path).get(name) == (step.path, step.function) for name in names):
        return True
    # Commands are loaded by the text that names them.
    source = (ROOT / caller.path).read_text(encoding="utf-8")
    return "build_app" in names and f'"{Path(step.path).stem}:{step.function}"' in source


@pytest.mark.parametrize(
    "step", [step for steps, _ in WALKS for step in steps], ids=lambda step: f"{step.path}:{step.function}"
)
def test_each_step_exists_and_is_reached_from_its_caller(step):
    assert step.function in definitions(step.path)
    assert step.caller is None or leads_to(step.caller, step), f"{step.caller[:2]} does not lead to it"


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk[0][0].function)
def test_rooms_are_entered_as_often_as_the_page_says(walk):
    steps, stated = walk
    entered = Counter(step.room for step in steps if step.is_entry)
    assert {room: count for room, count in entered.items() if count > 1} == stated


def test_a_plan_really_takes_this_walk(tmp_path, monkeypatch):
    """The steps of the page are called in its order, each while its caller has not returned."""
    prepare(tmp_path, monkeypatch)
    wanted = {(str(ROOT / step.path), step.function.rpartition(".")[2]): step for step in PLAN[0]}
    first_calls: list[Step] = []

    def step_of(frame: FrameType) -> Step | None:
        return wanted.get((frame.f_code.co_filename, frame.f_code.co_name))

    def note(frame: FrameType, event: str, _: object) -> None:
        step = step_of(frame) if event == "call" else None
        if step is None or step in first_calls:
            return
        outer = frame.f_back
        while outer is not None and step_of(outer) != step.caller:
            outer = outer.f_back
        if outer is not None or step.caller is None:
            first_calls.append(step)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        code = run(["plan", "meta-llama/Llama-3.1-8B", "--hardware", "8xA100-80GB", "--output-dir", "plan"])
    finally:
        sys.setprofile(before)
    assert code == 0
    assert first_calls == PLAN[0]
