"""Help of a command as short as the terminal is: what an option does, what it takes, and its default."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

_NARROW = 60
"""Columns below which names and descriptions side by side would be two columns of words."""
_SAYS_NOTHING = frozenset({"False", '""', "()", "{}", "[]"})
"""Defaults of options that do nothing until they are stated."""


def short_help(console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
    """Print a group of options without what holds for every option: its variable, and `--no-` of a switch that is off.

    With cyclopts 5.4 the variables alone made the help of `train` half as long again; the end of every help states the
    rule. On a narrow terminal each description stands below its name.
    """
    from cyclopts.help import DefaultFormatter

    entries = [_shortened(entry) for entry in panel.entries]
    if console.width >= _NARROW or not entries:
        DefaultFormatter()(console, options, panel.copy(entries=entries))
        return
    from rich.padding import Padding
    from rich.text import Text

    console.print(panel.title, style="bold")
    for entry in entries:
        console.print(Text(" ".join(entry.display_labels_with_metavar), style="cyan"), overflow="fold")
        description = entry.description
        for told in _further(entry):
            description.append(Text(f"[{told}]"))
        console.print(Padding(description, (0, 0, 0, 2)))
    console.print()


def _shortened(entry: HelpEntry) -> HelpEntry:
    default = None if entry.default in _SAYS_NOTHING else entry.default
    negative = () if entry.default == "False" else entry.negative_names
    return entry.copy(env_var=None, default=default, negative_names=negative)


def _further(entry: HelpEntry) -> list[str]:
    """Return what stands in brackets after a description."""
    choices = ", ".join(entry.choices or ())
    default = f"default: {entry.default}" if entry.default else ""
    return [told for told in (choices, default, "required" if entry.required else "") if told]
