"""The checkpoints of a launched training, and which of them it goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import Fault, UsageError
from ..checkpoints.record import Reader, read_complete, read_whole
from ..checkpoints.resume_rules import compared, finished_faults
from ..checkpoints.selection import Selection, checkpoints, newest_whole

CHECKPOINTS = "checkpoints"
"""Directory of the checkpoints inside an output directory."""


def last_checkpoint(output_dir: Path) -> Path | None:
    """Return the newest checkpoint whose files are there; `None` where there is none at all.

    What launches the ranks looks at names and sizes alone; they read every byte, once, by `whole_checkpoint`.

    Raises:
        RefusedInputError: there are some, but none is whole; says why of each.
    """
    found = _newest(output_dir / CHECKPOINTS, read_complete)
    return None if found is None else found.path


def whole_checkpoint(output_dir: Path) -> Selection | None:
    """Return the newest whole checkpoint; raises and returns as `last_checkpoint`."""
    return _newest(output_dir / CHECKPOINTS, read_whole)


def refuse_to_resume(directory: Path, facts: Mapping[str, Any], *, steps: int) -> None:
    """Tell before a rank starts what forbids to go on from the newest checkpoint.

    Args:
        directory: Of the checkpoints.
        facts: What is known of the run that would go on, as `run_facts` names it.
        steps: Its optimizer steps; 0 or less where only its epochs are known.

    Raises:
        UsageError: all steps are done, or the run differs from the one that saved in what cannot be carried over.
        RefusedInputError: there are checkpoints, but none is whole.
    """
    # Every byte is read only before a refusal: the ranks would pass over a checkpoint that is damaged.
    try:
        refused = bool(_faults(_newest(directory, read_complete), facts, steps))
    except (OSError, ValueError):
        refused = True
    if refused and (faults := _faults(_newest(directory, read_whole), facts, steps)):
        raise UsageError(faults)


def _faults(found: Selection | None, facts: Mapping[str, Any], steps: int) -> list[Fault]:
    return [] if found is None else compared(found.record.facts, facts)[0] + finished_faults(found, facts, steps)


def _newest(directory: Path, read: Reader) -> Selection | None:
    return newest_whole(directory, read) if checkpoints(directory) else None
