"""`shardwright distill`: plan, launch and report a distillation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...trainers.distillation.command.settings import DistillSettings
from ..options import TrainingRun
from ..settings import FILLED, Options
from ..training import launched_command, show_outcome

if TYPE_CHECKING:
    from ...trainers.distillation.command.report import DistillationOutcome


def distill_command(
    teacher: str, student: str, *, settings: Options[DistillSettings] = FILLED, options: Options[TrainingRun]
) -> int:
    """Distill a teacher into a student: plan, train, evaluate before and after, save with a model card.

    Parameters
    ----------
    teacher
        Hub id or directory; weights are read from safetensors.
    student
        Hub id or directory; a config.json for random weights.
    """
    from ...trainers.distillation.command.task import prepare_distillation

    return launched_command(partial(prepare_distillation, settings, teacher, student), options, show_distillation)


def show_distillation(outcome: DistillationOutcome, output_dir: Path) -> None:
    from ...trainers.quantization.inputs import suggested_command
    from ..show import show_next

    made = f"distilled from {outcome.teacher}"
    show_outcome(outcome, output_dir, name=outcome.student, made=made, noun="Student")
    if outcome.settings.method == "full":
        show_next(*suggested_command(output_dir))
