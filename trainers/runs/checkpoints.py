"""The checkpoints of a launched training, and which of them it goes on from."""

from __future__ import annotations

from pathlib import Path

from ..checkpoints.record import Reader, read_complete, read_whole
from ..checkpoints.selection import Selection, checkpoints, newest_whole

CHECKPOINTS = "checkpoints"
"""Directory of the checkpoints inside an output directory."""


def last_checkpoint(output_dir: Path) -> Path | None:
    """Return the newest checkpoint whose files are there; `None` where there is none at all.

    What launches the ranks looks at names and sizes alone; they read every byte, once, by `whole_checkpoint`.

    Raises:
        RefusedInputError: there are some, but none is whole; says why of each.
    """
    found = _newest(output_dir, read_complete)
    return None if found is None else found.path


def whole_checkpoint(output_dir: Path) -> Selection | None:
    """Return the newest whole checkpoint; raises and returns as `last_checkpoint`."""
    return _newest(output_dir, read_whole)


def _newest(output_dir: Path, read: Reader) -> Selection | None:
    directory = output_dir / CHECKPOINTS
    return newest_whole(directory, read) if checkpoints(directory) else None
