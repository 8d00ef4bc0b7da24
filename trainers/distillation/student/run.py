"""`student`: a smaller model from a teacher's, in one call."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ....ds_configs.specs.settings import settings_of
from ....plugins.huggingface_hub.push import check_push, pushed
from ....plugins.launching.notes import Notify
from .maker import StudentReport, make_student, plan_student
from .request import StudentRequest


def student(
    teacher: str,
    output_dir: str | Path | None = None,
    *,
    revision: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    push_to_hub: str | None = None,
    private: bool = False,
    notify: Notify = lambda _: None,
    **request: Any,
) -> StudentReport:
    """Cut a smaller student out of a teacher: a model directory that loads everywhere, to be distilled into.

    Nothing is printed on stdout. Example: ``shardwright.student("teacher", "student", layers=16, intermediate=8192)``

    Args:
        teacher: Hub id or directory with safetensors weights.
        output_dir: Where the student goes; `None` is a dry run.
        revision: Branch, tag or commit of a Hub teacher.
        dry_run: Check everything and compute sizes; no weights are read.
        force: Replace the model in a directory that is not empty.
        push_to_hub: Hub repository that gets the student in the end.
        private: Make it private where it is new.
        notify: Receives remarks.
        request: Fields of `StudentRequest`, which are the flags of `shardwright student`.

    Returns:
        What was made; `to_dict()` is what `--format json` prints.

    Raises:
        UsageError: everything that is wrong with the request, at once.
        RefusedInputError: the teacher's config is unsafe or unknown, or its weights are missing or damaged.
    """
    place = None if output_dir is None else Path(output_dir)
    asked = settings_of(StudentRequest, request)
    with redirect_stdout(sys.stderr):
        check_push(push_to_hub)
        plan = plan_student(teacher, asked, revision=revision, output_dir=place, force=force)
        if dry_run or place is None:
            return StudentReport(plan=plan, output_dir=None)
        with pushed(place, push_to_hub, private=private, notify=notify):
            return make_student(plan, teacher, place, force=force)
