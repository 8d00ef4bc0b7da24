"""Help of every command: examples that parse, and no line longer than the terminal."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from shardwright.cli.commands import env
from shardwright.cli.help import EXAMPLES
from shardwright.cli.main import build_app, run
from shardwright.cli.settings import resolve


def test_every_command_has_examples() -> None:
    assert {name for name in build_app() if not name.startswith("-")} == set(EXAMPLES)


def test_examples_parse() -> None:
    for command, examples in EXAMPLES.items():
        for example in examples:
            called, _ = resolve(build_app(), [command, *shlex.split(example)])
            assert called.__module__.startswith("shardwright.cli.commands"), example


def test_help_fits_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    # cyclopts 5.4 keeps the first console of an App, and this one lives as long as its module.
    monkeypatch.setattr(env.app, "_fallback_console", None)
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


def test_completion_is_installed_for_the_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(["--install-completion", "--shell", "bash"]) == 0
    assert "shardwright" in capsys.readouterr().out
    (script,) = (path for path in tmp_path.rglob("shardwright*") if path.is_file())
    assert "cache-teacher" in script.read_text()
