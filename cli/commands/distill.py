"""`shardwright distill`: plan, launch and report a distillation with one command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...trainers.distillation.command.run_files import DistillSettings
from ..machines import TrainingMachineOptions
from ..options import TrainingOptions
from ..settings import FILLED, Options, grouped
from ..training_shown import launched_command

if TYPE_CHECKING:
    from ...trainers.distillation.command.run_inputs import PreparedDistillation
    from ...trainers.distillation.command.run_report import DistillationOutcome


grouped(DistillSettings)
grouped(TrainingMachineOptions)
grouped(TrainingOptions)


def distill_command(
    teacher: str,
    student: str,
    *,
    settings: Annotated[DistillSettings, Options] = FILLED,
    options: Annotated[TrainingOptions, Options],
    machines: Annotated[TrainingMachineOptions, Options] = FILLED,
) -> int:
    """Teach a student what a teacher knows: plan, train, evaluate before and after, save with a model card.

    Example: shardwright distill Qwen/Qwen3-8B Qwen/Qwen3-0.6B --dataset python-help --output-dir taught

    Parameters
    ----------
    teacher
        Hub id or directory; weights are read from safetensors.
    student
        Hub id or directory, or a config.json for random weights.
    """
    from ...trainers.distillation.command.run_inputs import prepare_distillation

    def prepare(**how: Any) -> PreparedDistillation:
        return prepare_distillation(settings, teacher, student, options.output_dir, **how)

    return launched_command(prepare, options, machines, settings, show_distillation)


def show_distillation(outcome: DistillationOutcome, output_dir: Path) -> None:
    """Print the comparison of the student before and after with its teacher, and where everything lies."""
    from rich.text import Text

    from ...plugins.huggingface_hub.cards import CARD_FILE
    from ...trainers.distillation.command.run_report import CHART_FILE, comparison
    from ...trainers.runs.report import REPORT_FILE
    from ..show import console, print_rows, show_next

    out = console()
    label, hardware = outcome.plan.chosen.strategy.label, outcome.plan.hardware.name
    out.print(Text.assemble((outcome.student, "bold"), f"  taught by {outcome.teacher}, {label} on {hardware}"))
    out.print()
    figures = ("student before", "student after", "teacher")
    rows = [
        (row.name, row.before, Text(row.after, style="bold green"), row.teacher) for row in comparison(outcome.result)
    ]
    on = f"{outcome.statistics.evaluation_samples} held-out samples"
    print_rows(out, (on, *figures), rows, block_title=on, figures=figures)
    out.print()
    out.print(outcome.speed_line(outcome.result))
    files = ", ".join(str(output_dir / name) for name in (REPORT_FILE, CARD_FILE, CHART_FILE))
    out.print(f"Student in {output_dir}; see {files}", markup=False)
    if outcome.settings.method == "full":
        show_next("shardwright", "quantize", output_dir, "--scheme", "W4A16", "--output-dir", f"{output_dir}-w4")
