"""Terminal output as SVG, 80 columns wide: `python tools/screenshots.py FILE.svg COMMAND...`.

Runs the command as a terminal would and draws what it printed on stdout; fonts are the reader's own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WIDTH = 80
_FONTS = "Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def screenshot(shown: str, *, title: str, width: int = WIDTH) -> str:
    """Return what a terminal printed as an SVG; escape sequences are colours."""
    from io import StringIO

    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.text import Text

    # The format of rich 15 loads its font from the web.
    head, _, rest = CONSOLE_SVG_FORMAT.partition("@font-face")
    own = head + rest[rest.index(".{unique_id}-matrix") :].replace("Fira Code", _FONTS).replace(f"{_FONTS}, m", "m")
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown))
    return console.export_svg(title=title, code_format=own)


def main(place: str, *command: str) -> int:
    """Run a command and draw it."""
    environment = os.environ | {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if not done.stdout.strip():
        print(f"{place} stays as it is: the command printed nothing", file=sys.stderr)
        return done.returncode or 1
    Path(place).write_text(screenshot(done.stdout.rstrip(), title=" ".join(command)), encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
