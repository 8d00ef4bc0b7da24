"""`shardwright train`: plan, launch and report a training run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...trainers.training.settings import TrainSettings
from ..options import TrainingRun
from ..settings import FILLED, Options
from ..training import launched_command, show_outcome

if TYPE_CHECKING:
    from ...trainers.training.report import TrainOutcome


def train_command(model: str, *, settings: Options[TrainSettings] = FILLED, options: Options[TrainingRun]) -> int:
    """Train a model on your data: plan, launch, evaluate before and after, save with a model card.

    Parameters
    ----------
    model
        Hub id or directory; a config.json for random weights.
    """
    from ...trainers.training.task import prepare_train

    return launched_command(partial(prepare_train, settings, model), options, show_training)


def show_training(outcome: TrainOutcome, output_dir: Path) -> None:
    from ...trainers.quantization.inputs import suggested_command
    from ..show import show_next

    made = f"on {outcome.statistics.source}"
    show_outcome(outcome, output_dir, name=outcome.model, made=made, noun="Model")
    if outcome.settings.method == "full":
        show_next(*suggested_command(output_dir))
    else:
        show_next("shardwright", "merge", output_dir, "--output-dir", f"{output_dir}-merged")
