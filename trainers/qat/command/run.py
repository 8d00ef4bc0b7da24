"""`qat`: a quantization-aware training from its settings to the report beside the checkpoint."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ....ds_configs.specs.settings import settings_of
from ....plugins.launching.notes import Notify, OnProgress
from ...runs.run import run_training
from .inputs import prepare_qat
from .request import QATSettings
from .run_report import QATOutcome


def qat(
    model: str,
    output_dir: str | Path,
    *,
    resume: bool = False,
    force: bool = False,
    notify: Notify = lambda _: None,
    on_progress: OnProgress = lambda _what, _done, _total: None,
    **settings: Any,
) -> QATOutcome:
    """Train a model with the numbers of its quantized checkpoint, and write exactly these numbers.

    Nothing is printed on stdout. Example:
    ``shardwright.qat("model", "trained-w4", scheme="W4A16", dataset="python-help").result.trained``

    Args:
        model: Hub id or directory; weights are read from safetensors.
        output_dir: Where the checkpoint goes, with plan and report.
        resume: Go on from the last checkpoint in `output_dir`.
        force: Write into a directory that holds other files.
        notify: Receives remarks.
        on_progress: Receives `step`, the optimizer steps that are done, and how many there are.
        settings: Fields of `QATSettings`, which are the flags of `shardwright qat`.

    Returns:
        Everything measured; `to_dict()` is what `--format json` prints.

    Raises:
        UsageError: everything wrong with the settings.
        RefusedInputError: files of a model are corrupt, unsafe or quantized already.
        DoesNotFitError: no layout fits.
        ShardwrightError: a rank failed; says which and why.
    """
    place = Path(output_dir)
    with redirect_stdout(sys.stderr):
        prepared = prepare_qat(
            settings_of(QATSettings, settings), model, place, notify=notify, force=force, resume=resume
        )
        return run_training(prepared, place, resume=resume, force=force, notify=notify, on_progress=on_progress)
