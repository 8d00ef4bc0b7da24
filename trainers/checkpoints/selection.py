"""Selection of the checkpoint to resume from, and the fate of those that are not whole or not needed.

Nothing that could hold somebody's work is deleted unasked: what a run cannot go on from is renamed, and named on
stderr.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...ds_configs.specs.errors import Fault, RefusedInputError, UsageError
from .record import RECORD, CheckpointRecord, NotWholeError, Reader, read_record, read_whole

_NAME = re.compile(r"checkpoint-(\d+)")
FEWEST_KEPT = 2
"""Whole checkpoints that stay, whatever `save_total_limit` says: the newest may lie on a disk that is about to fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The checkpoint to go on from."""

    path: Path
    """Its directory."""
    record: CheckpointRecord
    """What it holds and who saved it."""
    skipped: tuple[str, ...]
    """Newer ones that are not whole, each with the reason."""


def checkpoints(output_dir: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by their steps, in order, whole or not."""
    found = {}
    for path in output_dir.glob("checkpoint-*"):
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def newest_whole(output_dir: Path, read: Reader = read_whole) -> Selection:
    """Return the newest checkpoint of a run that is whole, as `read` tells.

    Raises:
        UsageError: there is no checkpoint.
        RefusedInputError: none is whole; every one is named with its fault.
    """
    skipped: list[tuple[Path, str]] = []
    for path in reversed(checkpoints(output_dir).values()):
        try:
            record = read(path)
        except NotWholeError as error:
            skipped.append((path, str(error)))
            continue
        return Selection(path=path, record=record, skipped=tuple(f"{path.name} {why}" for path, why in skipped))
    if skipped:
        raise RefusedInputError([_not_whole(path, why) for path, why in skipped])
    fix = "train with save_steps first, or do not resume"
    raise UsageError(Fault(where="resume", value=str(output_dir), rule="holds no checkpoint to resume from", fix=fix))


def named_checkpoint(path: Path) -> Selection:
    """Return a checkpoint that the user named.

    Raises:
        UsageError: it is no directory.
        RefusedInputError: it is not whole.
    """
    if not path.is_dir():
        raise UsageError(Fault(where="resume_from_checkpoint", value=str(path), rule="is not a directory"))
    try:
        return Selection(path=path, record=read_whole(path), skipped=())
    except NotWholeError as error:
        raise RefusedInputError(_not_whole(path, str(error))) from None


def _not_whole(path: Path, why: str) -> Fault:
    fix = "resume from another, or start anew from its weights by naming it as the model"
    return Fault(where=str(path), rule=f"is not a whole checkpoint: {why}", fix=fix)


def set_aside(output_dir: Path, *, after_step: int, notify: Callable[[str], None]) -> None:
    """Rename what a run must not write into: checkpoints past the step where it begins, and those cut short."""
    for step, path in checkpoints(output_dir).items():
        try:
            read_record(path)
        except NotWholeError as error:
            _rename(path, "incomplete", f"{path.name} {error}", notify)
            continue
        if step > after_step:
            _rename(path, "superseded", f"{path.name} is of an earlier run past step {after_step}", notify)


def _rename(path: Path, word: str, why: str, notify: Callable[[str], None]) -> None:
    target = path.with_name(f"{word}-{path.name}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{word}-{path.name}-{number}")
    path.rename(target)
    notify(f"{why}: kept as {target.name}")


def rotate(output_dir: Path, *, limit: int | None, best: str | None, notify: Callable[[str], None]) -> None:
    """Delete the oldest whole checkpoints until `limit` are left, but never the best, nor more than all but two."""
    if limit is None or limit <= 0:
        return
    whole = [path for path in checkpoints(output_dir).values() if (path / RECORD).is_file()]
    kept = max(limit, FEWEST_KEPT)
    protected = {path.name for path in whole[-FEWEST_KEPT:]} | ({Path(best).name} if best else set())
    excess = len(whole) - kept
    for path in whole:
        if excess <= 0:
            return
        if path.name in protected:
            continue
        # Without its record it is not whole at any moment of the deletion.
        (path / RECORD).unlink()
        try:
            shutil.rmtree(path)
        except OSError as error:
            notify(f"{path.name} could not be deleted ({error.strerror})")
        excess -= 1
