"""`distill`: a distillation from its settings to the report beside the student."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ....ds_configs.specs.settings import settings_of
from ....plugins.launching.notes import Notify, OnProgress
from ...runs.run import run_training
from .run_files import DistillSettings
from .run_inputs import prepare_distillation
from .run_report import DistillationOutcome


def distill(
    teacher: str,
    student: str,
    output_dir: str | Path,
    *,
    resume: bool = False,
    force: bool = False,
    notify: Notify = lambda _: None,
    on_progress: OnProgress = lambda _what, _done, _total: None,
    **settings: Any,
) -> DistillationOutcome:
    """Teach a student what a teacher knows: plan, launch ranks, evaluate before and after, save with a model card.

    Nothing is printed on stdout. Example:
    ``shardwright.distill("teacher", "student", "taught", dataset="python-help", max_steps=100).result.after``

    Args:
        teacher: Hub id or directory; weights are read from safetensors.
        student: Hub id or directory, or a `config.json` for random weights.
        output_dir: Where the student goes, with plan and report.
        resume: Go on from the last checkpoint in `output_dir`.
        force: Write into a directory that holds other files.
        notify: Receives remarks.
        on_progress: Receives `step`, the optimizer steps that are done, and how many there are.
        settings: Fields of `DistillSettings`, which are the flags of `shardwright distill`.

    Returns:
        Everything measured; `to_dict()` is what `--format json` prints.

    Raises:
        UsageError: everything wrong with the settings.
        RefusedInputError: files of a model are corrupt or unsafe.
        DoesNotFitError: no layout fits.
        ShardwrightError: a rank failed; says which and why.
    """
    place = Path(output_dir)
    with redirect_stdout(sys.stderr):
        found = settings_of(DistillSettings, settings)
        prepared = prepare_distillation(found, teacher, student, place, notify=notify, force=force, resume=resume)
        return run_training(prepared, place, resume=resume, force=force, notify=notify, on_progress=on_progress)
