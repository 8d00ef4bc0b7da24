"""Place of an interrupted quantization's finished layers: beside the output, so that one disk holds both."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...ds_configs.specs.errors import Fault

_SUFFIX = ".journal"


def journal_directory(output_dir: Path) -> Path:
    """Return the directory of the journal that belongs to an output directory."""
    place = output_dir.resolve()
    return place.with_name(place.name + _SUFFIX)


def journal_faults(output_dir: Path, *, resume: bool, force: bool) -> list[Fault]:
    """Return what stands between a new run and the journal of an older one."""
    journal = journal_directory(output_dir)
    if resume and not journal.is_dir():
        rule = f"there is no journal at {journal} to go on from"
        return [Fault(where="--resume", rule=rule, fix="drop --resume to start")]
    if journal.is_dir() and not resume and not force:
        rule = "holds the finished layers of an interrupted run"
        fix = "use --resume to go on from there, or --force to start from the beginning"
        return [Fault(where=str(journal), rule=rule, fix=fix)]
    return []


def discard_journal(output_dir: Path) -> None:
    """Remove the journal of a run that is done or is started anew."""
    shutil.rmtree(journal_directory(output_dir), ignore_errors=True)
