"""`shardwright distill`: plan, launch and report a distillation with one command."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from .model_settings import resolve_model
from .training_flags import ENVIRONMENT, TrainingFlags
from .training_shown import note, progress_on_stderr, show_dry_run

if TYPE_CHECKING:
    from ..trainers.distillation.command.run_report import Outcome


def distill_command(
    teacher: str,
    student: str,
    *,
    hidden_states: float | None = None,
    attention: float | None = None,
    on_policy: float | None = None,
    max_new_tokens: int | None = None,
    prompt_tokens: int | None = None,
    cross_tokenizer: Annotated[bool | None, Parameter(negative="")] = None,
    teacher_cache: str | None = None,
    flags: TrainingFlags,
) -> int:
    """Teach a student what a teacher knows: plan, train, evaluate before and after, save with a model card.

    Example: shardwright distill Qwen/Qwen3-8B Qwen/Qwen3-0.6B --dataset python-help --output-dir taught

    Parameters
    ----------
    teacher
        Hub id or directory; weights are read from safetensors.
    student
        Hub id or directory, or a config.json for random weights.
    hidden_states
        Weight of matched hidden states. Default 0, none.
    attention
        Weight of matched attention relations. Default 0, none.
    on_policy
        Share of micro-batches that the student completes itself. Default 0.
    max_new_tokens
        Longest completion of the student. Default 128.
    prompt_tokens
        Tokens of a sample that the student completes. Default: those before its first label, of plain text half.
    cross_tokenizer
        Compare models of different tokenizers.
    teacher_cache
        Directory that cache-teacher wrote; no teacher runs while the student trains.
    """
    given = locals() | vars(flags)
    from ..trainers.distillation.command.run_files import DistillSettings
    from ..trainers.distillation.command.run_inputs import prepare_distillation
    from ..trainers.runs.run import run_training

    settings = resolve_model(DistillSettings, given, file=flags.config, environment=ENVIRONMENT)
    output_dir, as_json = flags.output_dir, flags.format == "json"
    # Libraries that log to stdout must not stand in the report.
    with redirect_stdout(sys.stderr):
        prepared = prepare_distillation(settings, teacher, student, output_dir, notify=note, **flags.how)
    if flags.dry_run:
        files = [output_dir / name for name in prepared.file_names]
        show_dry_run(prepared.settings, prepared.plan, prepared.samples, files, as_json=as_json)
        return 0
    with redirect_stdout(sys.stderr), progress_on_stderr() as on_step:
        outcome = run_training(prepared, output_dir, resume=flags.resume, notify=note, on_step=on_step)
    if as_json:
        print(json.dumps(outcome.to_dict() | {"output_dir": str(output_dir)}))
    else:
        show_outcome(outcome, output_dir)
    return 0


def show_outcome(outcome: Outcome, output_dir: Path) -> None:
    """Print the comparison of the student before and after with its teacher, and where everything lies."""
    from rich.table import Table
    from rich.text import Text

    from ..trainers.distillation.command.run_report import CHART_FILE, comparison
    from ..trainers.runs.report import CARD_FILE, REPORT_FILE
    from .show import console

    out = console()
    label, hardware = outcome.plan.chosen.strategy.label, outcome.plan.hardware.name
    out.print(Text(outcome.student, style="bold") + Text(f"  taught by {outcome.teacher}, {label} on {hardware}"))
    out.print()
    table = Table(box=None, pad_edge=False)
    table.add_column(f"{outcome.statistics.evaluation_samples} held-out samples")
    for name in ("student before", "student after", "teacher"):
        table.add_column(name, justify="right")
    for row in comparison(outcome.result):
        table.add_row(row.name, row.before, Text(row.after, style="bold green"), row.teacher)
    out.print(table)
    out.print()
    out.print(outcome.speed_line(outcome.result))
    files = ", ".join(str(output_dir / name) for name in (REPORT_FILE, CARD_FILE, CHART_FILE))
    out.print(f"Student in {output_dir}; see {files}", markup=False)
