"""`shardwright train`: plan, launch and report a training run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ...trainers.training.settings import TrainSettings
from ..machines import MachineOptions
from ..options import TrainingOptions
from ..settings import FILLED, Options, grouped
from ..training import launched_command, show_outcome

if TYPE_CHECKING:
    from ...trainers.runs.settings import RunRequest
    from ...trainers.training.report import TrainOutcome
    from ...trainers.training.task import PreparedTrain


grouped(TrainSettings)
grouped(MachineOptions)


@grouped
class TrainOptions(TrainingOptions):
    """Options for runs that restart unattended, in addition to those of every training."""

    resume_or_anew: bool = Field(False, description="As --resume, but start over if no checkpoint is complete")


def train_command(
    model: str,
    *,
    settings: Annotated[TrainSettings, Options] = FILLED,
    options: Annotated[TrainOptions, Options],
    machines: Annotated[MachineOptions, Options] = FILLED,
) -> int:
    """Train a model on your data: plan, launch, evaluate before and after, save with a model card.

    Parameters
    ----------
    model
        Hub id or directory; a config.json for random weights.
    """
    from ...trainers.training.task import prepare_train

    def prepare(request: RunRequest) -> PreparedTrain:
        if options.resume_or_anew:
            request = replace(request, resume=True, or_anew=True)
        return prepare_train(settings, model, request)

    return launched_command(prepare, options, machines, show_training)


def show_training(outcome: TrainOutcome, output_dir: Path) -> None:
    from ...trainers.quantization.inputs import suggested_command
    from ..show import show_next

    made = f"on {outcome.statistics.source}"
    show_outcome(outcome, output_dir, name=outcome.model, made=made, noun="Model")
    if outcome.settings.method == "full":
        show_next(*suggested_command(output_dir))
    else:
        show_next("shardwright", "merge", output_dir, "--output-dir", f"{output_dir}-merged")
