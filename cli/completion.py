"""Scripts for shell completion."""

from __future__ import annotations

from typing import Any

from cyclopts import App

_ENDINGS = {
    "bash": ("\ncomplete -F ", "\ncomplete -o default -F "),
    "zsh": ("  esac\n}\n", "  esac || { compset -P '--*='; _files }\n}\n"),
}
"""Last lines of a script, and those that let the shell complete paths where the script has no candidates."""
_BASH_FILES = 'COMPREPLY=( $(compgen -f -- "${cur}") )'
"""Completes a directory with a space behind it, not a slash."""


class CompletingApp(App):
    """Application whose scripts complete paths as shells do without a script, unless there are candidates.

    Seen with cyclopts 5.4.0 and 5.5.2: models and datasets, which are texts, are not completed.
    """

    __slots__ = ()

    def generate_completion(self, **stated: Any) -> str:
        """Return the script for a shell."""
        script = super().generate_completion(**stated).replace(_BASH_FILES, "COMPREPLY=()")
        generated, completed = _ENDINGS["zsh" if script.startswith("#compdef") else "bash"]
        return completed.join(script.rsplit(generated, 1))
