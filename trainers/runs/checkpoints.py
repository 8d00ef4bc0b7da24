"""The checkpoints of a launched training, and which of them it goes on from."""

from __future__ import annotations

from pathlib import Path

from ..checkpoints.selection import checkpoints, newest_whole

CHECKPOINTS = "checkpoints"
"""Directory of the checkpoints inside an output directory."""


def last_checkpoint(output_dir: Path) -> Path | None:
    """Return the newest whole checkpoint; `None` where there is none at all.

    Raises:
        RefusedInputError: there are some, but none is whole; says why of each.
    """
    directory = output_dir / CHECKPOINTS
    return newest_whole(directory).path if checkpoints(directory) else None
