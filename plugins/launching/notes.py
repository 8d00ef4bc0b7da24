"""Messages of a running command: remarks, and how far it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

NOTE = "note: "
"""Begins a line with a remark. Of what ranks print, the process that launched them passes on such lines."""
Notify = Callable[[str], None]
"""Receives remarks."""
OnProgress = Callable[[str, int, int], None]
"""Receives what is done, how much of it is, and how much there is."""


def note_on_first_rank(text: str) -> None:
    """Print a remark on stderr, on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{NOTE}{' '.join(text.splitlines())}", file=sys.stderr, flush=True)
