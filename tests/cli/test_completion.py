"""Completion in the shells that people use: each runs on a terminal and gets the keys of a user."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardwright.cli.main import run

SHELLS = {"bash": ("bash", "--noprofile", "-i"), "zsh": ("zsh", "-i")}
READY = "echo rea''dy\n"
"""Prints `ready`, which its echo does not contain."""
PATHS, ZERO = ("models/",), ("--zero-quantized-weights", "--zero-quantized-gradients")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the home directory of a user who installed completion for both shells."""
    home = tmp_path_factory.mktemp("home")
    (home / "work" / "models" / "tiny").mkdir(parents=True)
    # A directory of a command's name must not get in the way.
    (home / "work" / "plan").mkdir()
    (home / ".zshrc").write_text("autoload -Uz compinit && compinit -u -D\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        for name in ("ZSH", "ZSH_CUSTOM"):
            patch.delenv(name, raising=False)
        for shell in ("bash", "zsh"):
            assert run(["--install-completion", "--shell", shell]) == 0
    return home


@pytest.fixture(scope="module", params=["bash", pytest.param("zsh", marks=pytest.mark.needs("zsh"))])
def terminal(request: pytest.FixtureRequest, home: Path) -> Iterator[int]:
    """Run a shell in `home/work`, and return its terminal."""
    terminal, end = pty.openpty()
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb", "LC_ALL": "C.UTF-8"}
    process = subprocess.Popen(
        SHELLS[request.param],
        cwd=home / "work",
        env=environment,
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
    )
    os.close(end)
    os.set_blocking(terminal, False)
    # A first tab in bash that needs a second one lists candidates immediately.
    start = "bind 'set show-all-if-ambiguous on'; " if request.param != "zsh" else ""
    os.write(terminal, f"{start}{READY}".encode())
    try:
        shown_until_ready(terminal)
        yield terminal
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def shown_until_ready(terminal: int) -> str:
    shown, deadline = "", time.monotonic() + 60
    while "ready\r\n" not in shown:
        assert time.monotonic() < deadline, shown
        try:
            shown += os.read(terminal, 65536).decode(errors="replace")
        except BlockingIOError:
            time.sleep(0.01)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[\x07\x08]", "", shown)


@pytest.mark.parametrize(
    ("line", "candidates", "absent"),
    [
        ("shardwright pl", ("plan ",), ("models/", "plan/")),
        ("shardwright plan --zero-quantized-", ZERO, ("--strategy",)),
        ("shardwright plan m --strategy=zero3", ("zero3", "zero3-hpz"), ("fsdp2", "models/")),
        ("shardwright configs ", ("ls", "cp"), ("models/",)),
        ("shardwright plan mod", PATHS, ()),
        ("shardwright train m --dataset mod", PATHS, ()),
        ("shardwright train m --output-dir mod", PATHS, ()),
    ],
)
def test_a_shell_completes(line: str, candidates: tuple[str, ...], absent: tuple[str, ...], terminal: int) -> None:
    # Ctrl+U discards the line.
    os.write(terminal, f"{line}\t\x15{READY}".encode())
    shown = shown_until_ready(terminal).partition(READY.strip())[0]
    assert all(candidate in shown for candidate in candidates), shown
    assert not any(candidate in shown.replace(line, "") for candidate in absent), shown
