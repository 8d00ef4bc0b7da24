"""The checkpoints of a launched training, and which of them it goes on from."""

from __future__ import annotations

from pathlib import Path

CHECKPOINTS = "checkpoints"
"""Directory of the checkpoints inside an output directory."""


def last_checkpoint(output_dir: Path) -> Path | None:
    """Return the checkpoint with the most optimizer steps; `None` where there is none."""
    directory = output_dir / CHECKPOINTS
    if not directory.is_dir():
        return None
    from transformers.trainer_utils import get_last_checkpoint

    found = get_last_checkpoint(str(directory))
    return None if found is None else Path(found)
