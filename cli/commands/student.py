"""`shardwright student`: prune a teacher to a smaller student for distillation."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydantic import Field

from ...ds_configs.specs.settings import RevisionFields
from ...trainers.distillation.student import StudentRequest
from ..options import OutputDirectory
from ..settings import FILLED, Options

if TYPE_CHECKING:
    from ...trainers.distillation.student import StudentReport


class Flags(OutputDirectory, RevisionFields):
    dry_run: bool = Field(False, description="Check and print everything; write nothing")


def student_command(
    teacher: str,
    *,
    request: Options[StudentRequest] = FILLED,
    options: Options[Flags] = FILLED,
) -> int:
    """Prune a teacher to a smaller student: a model directory for distillation.

    Parameters
    ----------
    teacher
        Hub id or local model directory with safetensors weights.
    """
    from ...trainers.distillation.student import student

    report = student(teacher, **options.model_dump(exclude={"format", "config"}), **request.model_dump())
    if options.as_json:
        output_dir = None if report.output_dir is None else str(options.output_dir)
        print(json.dumps(report.to_dict() | {"output_dir": output_dir}))
    else:
        show_student(report)
    return 0


def show_student(made: StudentReport) -> None:
    from rich.table import Table
    from rich.text import Text

    from ...ds_configs.plan.measurement import printable
    from ...ds_configs.specs.units import human_count
    from ..show import console, show_next

    out = console()
    table = Table(box=None, pad_edge=False)
    for name, justify in (("", "left"), ("teacher", "right"), ("student", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_row("layers", f"{made.stack.count:,}", f"{len(made.kept_layers):,}")
    teacher, student = made.teacher_widths, made.student_widths
    if teacher is not None and student is not None:
        for word, name in {"hidden size": "hidden_size", "MLP channels": "intermediate_size"}.items():
            table.add_row(word, f"{teacher[name]:,}", f"{student[name]:,}")
    share = made.student_parameters / made.teacher_parameters
    counts = [f"{human_count(count)}" for count in (made.teacher_parameters, made.student_parameters)]
    table.add_row("parameters", *counts, f"{share:.1%}")
    out.print(Text(printable(made.source.name), style="bold"))
    out.print(table)
    if len(made.kept_layers) < made.stack.count:
        out.print("layers kept:", ", ".join(map(str, made.kept_layers)))
    if made.output_dir is None:
        out.print("No files written; pass --output-dir without --dry-run")
    else:
        out.print(Text(f"Student in {printable(str(made.output_dir))}"))
        after = ("--dataset", "YOUR_DATA", "--output-dir", "OUTPUT")
        show_next("shardwright", "distill", made.source.name, made.output_dir, *after)
