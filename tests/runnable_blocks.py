"""Code blocks of the pages that run as they stand: what they show is what the commands print.

A block runs if the word `run` follows its language:

    ```console run          commands behind `$`, each followed by all that it prints; a line `…` stands for any lines
    ```python run           Python, followed by a block `text output` if it prints something
    ```json save FILE       a file that later blocks of the page read; any language

The blocks of a page run in turn in one directory. Models of the Hub that ds_configs/data/models knows are found there.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
from paths import ROOT
from shardwright.cli.main import run

COLUMNS = "80"
_FENCE = re.compile(r"^```(\S*) (run|save|output) ?(\S*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_OUTPUT = "```\n\n```text output\n"
_LEFT_OUT = "…"


class Block(NamedTuple):
    language: str
    mark: str
    """`run`, `save` or `output`."""
    name: str
    """The file of `save`."""
    text: str


def marked_blocks(page: Path) -> list[Block]:
    return [Block(*found.groups()) for found in _FENCE.finditer(page.read_text(encoding="utf-8"))]


def run_page(page: Path) -> Iterator[tuple[str, str, str]]:
    """Run a page's blocks in the working directory; yield what was run, shown and printed."""
    names: dict[str, object] = {"__name__": "page"}
    blocks = marked_blocks(page)
    for index, block in enumerate(blocks):
        if block.mark == "save":
            Path(block.name).write_text(block.text, encoding="utf-8")
        elif block.mark == "run" and block.language == "console":
            yield from _run_commands(block.text)
        elif block.mark == "run":
            printed = StringIO()
            with redirect_stdout(printed):
                exec(compile(block.text, str(page), "exec"), names)  # noqa: S102 - our own pages
            after = blocks[index + 1] if index + 1 < len(blocks) else block
            shows = after.mark == "output"
            yield block.text + _OUTPUT * shows, after.text * shows, printed.getvalue()


def _run_commands(session: str) -> Iterator[tuple[str, str, str]]:
    for step in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        lines = step.splitlines(keepends=True)
        last = next(index for index, line in enumerate(lines) if not line.endswith("\\\n"))
        command, shown = "".join(lines[: last + 1]), "".join(lines[last + 1 :])
        program, *arguments = shlex.split(command.replace("\\\n", " "))
        assert program == "shardwright", f"`{program}` is not run here"
        printed = StringIO()
        with redirect_stdout(printed), redirect_stderr(printed):
            run(arguments)
        yield command, shown, printed.getvalue()


def agrees(shown: str, printed: str) -> bool:
    """Whether printed lines are those that are shown, spaces at their ends apart."""
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    wanted = [line.rstrip() for line in shown.strip("\n").splitlines()]
    pattern = "\n".join(r"(?:.*\n)*?.*" if line == _LEFT_OUT else re.escape(line) for line in wanted)
    return re.fullmatch(pattern, "\n".join(lines)) is not None


def prepare(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a directory the working directory, and a Hub's cache of the models in tests/data beside it."""
    import huggingface_hub.constants as hub

    for variable in [name for name in os.environ if name.startswith("SHARDWRIGHT_")]:
        monkeypatch.delenv(variable)
    # What runs on this machine measured would move the plans.
    monkeypatch.setenv("SHARDWRIGHT_DATA_DIR", str(directory / "data"))
    # DeepSpeed prints that it has looked for an accelerator, when a block is the first to import it.
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    cache = directory / "hub"
    for number, model in enumerate(sorted((ROOT / "ds_configs" / "data" / "models").iterdir())):
        commit = f"{number:040x}"
        stored = cache / f"models--{model.name}"
        (stored / "refs").mkdir(parents=True)
        (stored / "refs" / "main").write_text(commit)
        (stored / "snapshots").mkdir()
        (stored / "snapshots" / commit).symlink_to(model)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", COLUMNS)
    work = directory / "work"
    work.mkdir()
    monkeypatch.chdir(work)


def with_real_output(page: Path) -> str:
    """A page whose commands show what they print now; what is shown in part is left as it is."""
    text = page.read_text(encoding="utf-8")
    for command, shown, printed in run_page(page):
        if _LEFT_OUT not in shown.splitlines() and not agrees(shown, printed):
            lines = "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())
            text = text.replace(command + shown, command + lines, 1)
    return text


if __name__ == "__main__":
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if marked_blocks(file):
            with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as made:
                prepare(Path(made), patch)
                file.write_text(with_real_output(file), encoding="utf-8")
