"""Markdown out of the Jinja templates of the rooms, in which every value stays one cell and one piece of code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.units import gigabytes

if TYPE_CHECKING:
    from jinja2 import Environment

_LINE_ENDS = re.compile(r"[\r\n]+")
_PIPES = re.compile(r"(\\*)\|")
"""A backslash before a pipe would escape the backslash that escapes the pipe."""


def render(template: str, **values: Any) -> str:
    """Return a filled template.

    Args:
        template: Its path below `trainers/`, such as `qat/command/templates/report.md.j2`; includes are named alike.
        values: What it names; a name without a value is an error.
    """
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1]),
        # Escapes of HTML would show in Markdown; what Markdown would misread passes `table` and `code`.
        autoescape=False,  # noqa: S701
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["table"] = table
    environment.filters |= {"code": code, "gigabytes": gigabytes, "thousands": "{:,}".format}
    return environment


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table.

    >>> print(table(("a", "b"), [(1, "x|y")]))
    | a | b |
    |---|---|
    | 1 | x\\|y |
    """

    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(_LINE_ENDS.sub(" ", _PIPES.sub(r"\1\1\|", str(cell))) for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def code(value: object) -> str:
    """Return a value as code in a line of text, fenced by more backticks than stand in it.

    >>> code("model"), code("a`b")
    ('`model`', '`` a`b ``')
    """
    text = _LINE_ENDS.sub(" ", str(value))
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{text}{space}{fence}"
