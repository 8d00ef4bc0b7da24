"""Help of every command: examples that parse, and no line longer than the terminal."""

from __future__ import annotations

import shlex

import pytest
from shardwright.cli.commands import configuration
from shardwright.cli.main import EXAMPLES, build_app, run
from shardwright.cli.settings import resolve


def test_every_command_has_examples() -> None:
    assert {name for name in build_app() if not name.startswith("-")} == set(EXAMPLES)


def test_examples_parse() -> None:
    app = build_app()
    for command, examples in EXAMPLES.items():
        for example in examples:
            called, _ = resolve(app, [command, *shlex.split(example)])
            assert called.__module__.startswith("shardwright.cli.commands"), example


def test_help_fits_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    # cyclopts 5.4 keeps the first console of an App, and this one lives as long as its module.
    monkeypatch.setattr(configuration.app, "_fallback_console", None)
    for command, examples in EXAMPLES.items():
        assert run([command, "--help"]) == 0
        shown = capsys.readouterr().out
        options, _, end = shown.partition("Examples:")
        assert max(map(len, shown.splitlines())) <= 40, command
        assert "env var" not in options and "--no-force" not in options, command
        said = " ".join(end.split())
        for example in examples:
            assert f"shardwright {command} {example}".rstrip() in said
        assert f"SHARDWRIGHT_{command.upper().replace('-', '_')}_" in said.replace(" ", "")
