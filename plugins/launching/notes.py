"""Remarks of a training run, told once for all ranks."""

from __future__ import annotations

import os
import sys


def note(text: str) -> None:
    """Print a remark on stderr, on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)
