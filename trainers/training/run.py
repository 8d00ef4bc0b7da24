"""`train`: a training on the user's data from its settings to the report beside the model."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ...ds_configs.specs.settings import settings_of
from ...plugins.launching.notes import Notify, OnProgress
from ..runs.run import run_training
from .inputs import prepare_train
from .report import TrainOutcome
from .settings import TrainSettings


def train(
    model: str,
    output_dir: str | Path,
    *,
    resume: bool = False,
    force: bool = False,
    notify: Notify = lambda _: None,
    on_progress: OnProgress = lambda _what, _done, _total: None,
    **settings: Any,
) -> TrainOutcome:
    """Train a model on a dataset: plan, launch ranks, evaluate before and after, save with a model card.

    Nothing is printed on stdout. Example:
    ``shardwright.train("model", "tuned", dataset="chats.jsonl", method="lora", max_steps=100).result.after``

    Args:
        model: Hub id or directory, or a `config.json` for random weights.
        output_dir: Where the model goes, with plan and report.
        resume: Go on from the last checkpoint in `output_dir`.
        force: Write into a directory that holds other files.
        notify: Receives remarks.
        on_progress: Receives `step`, the optimizer steps that are done, and how many there are.
        settings: Fields of `TrainSettings`, which are the flags of `shardwright train`.

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
        found = settings_of(TrainSettings, settings)
        prepared = prepare_train(found, model, place, notify=notify, force=force, resume=resume)
        return run_training(prepared, place, resume=resume, force=force, notify=notify, on_progress=on_progress)
