"""Messages of a running command: remarks, and how far it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

Notify = Callable[[str], None]
"""Receives remarks."""
OnProgress = Callable[[str, int, int], None]
"""Receives what is done, how much of it is, and how much there is."""


def note_on_first_rank(text: str) -> None:
    """Print a remark on stderr, on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)
