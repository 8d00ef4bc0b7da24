"""Turns of a run that SLURM queues again: whether the next one is worth it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ...ds_configs.plan.write import write_files
from ...ds_configs.specs.errors import ShardwrightError
from ..checkpoints.record import NotWholeError, read_record
from ..checkpoints.selection import checkpoints
from .script import stated_output

_FILE = "slurm-turns.json"
_FRUITLESS_TURNS = 2
"""In a row, after which a run ends: a node that was slow once may not be so again."""


def count_turn(plan_directory: Path, script: Path | None, arguments: Sequence[str], *, job: str) -> None:
    """Count a turn that was stopped before its time limit, by what it left in the output directory.

    Args:
        plan_directory: What `shardwright plan` wrote; remembers the turns.
        script: The user's own, whose checkpoints need no record; `None` for the plan's own training.
        arguments: Of the script or the training. A script that does not state its output directory has every turn.
        job: SLURM's number of it, the same in every turn.

    Raises:
        ShardwrightError: two turns in a row have left no new whole checkpoint.
    """
    stated = stated_output(arguments)
    if script is not None and stated is None:
        return
    output_directory = Path(stated or plan_directory / "model")
    steps = [step for step, path in checkpoints(output_directory).items() if script is not None or _is_whole(path)]
    newest, file = max(steps, default=0), plan_directory / _FILE
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if before.get("job") != job:
        before = {"step": 0, "fruitless": 0}
    fruitless = 0 if newest > before["step"] else before["fruitless"] + 1
    record = {"job": job, "step": newest, "fruitless": fruitless}
    write_files({_FILE: json.dumps(record) + "\n"}, plan_directory, force=True)
    if fruitless >= _FRUITLESS_TURNS:
        reached = f"is still at step {newest}" if newest else "has no whole checkpoint"
        raise ShardwrightError(
            f"job {job} {reached} after {fruitless} turns without progress and is not queued again: give it more than "
            "its start and the time to save, with --sbatch=--time=..."
        )


def _is_whole(checkpoint: Path) -> bool:
    try:
        read_record(checkpoint)
    except NotWholeError:
        return False
    return True
