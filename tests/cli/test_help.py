"""Examples at the end of every command's help: three each, with flags that the command has."""

from __future__ import annotations

import re
import shlex

import pytest
from shardwright.cli.examples import EXAMPLES
from shardwright.cli.main import build_app, run


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_ends_with_three_examples_that_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    known = set(re.findall(r"--[a-z][a-z-]*", shown.partition("Examples:")[0]))
    assert len(EXAMPLES[command]) == 3
    for rest in EXAMPLES[command]:
        own = shlex.split(rest)
        # What stands behind two hyphens, and all that follows a script, is for the script.
        own = own[: own.index("--")] if "--" in own else own
        own = own[:2] if command == "launch" else own
        assert {word for word in own if word.startswith("--")} <= known, rest
        assert f"shardwright {command} {rest}".rstrip().split()[-1] in shown


def test_every_command_with_a_choice_has_examples() -> None:
    commands = {name for name in build_app() if not name.startswith("-")}
    assert commands - set(EXAMPLES) == {"env", "serve"}
