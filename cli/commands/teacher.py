"""`shardwright cache-teacher` and `student`: what is made of a teacher before distillation."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ...ds_configs.specs.settings import RevisionFields
from ...ds_configs.specs.units import gigabytes
from ...trainers.distillation.student import StudentRequest
from ...trainers.distillation.teacher_cache import CacheSettings
from ..options import OutputDirectory, ResultDirectory
from ..progress import note, progress_on_stderr
from ..settings import FILLED, Options

if TYPE_CHECKING:
    from ...trainers.distillation.student import StudentReport


def cache_teacher_command(
    teacher: str,
    *,
    settings: Options[CacheSettings] = FILLED,
    options: Options[ResultDirectory] = FILLED,
) -> int:
    """Store the outputs of a teacher for a dataset, which `distill --teacher-cache` reads instead of running it.

    Run it again to resume after an interruption, or to add new samples.

    Parameters
    ----------
    teacher
        Hub id or directory; weights are read from safetensors.
    """
    from ...trainers.data.sources import PYTHON_HELP
    from ...trainers.distillation.teacher_cache import prepare_cache, run_cache_job

    if "dataset" not in settings.model_fields_set:
        note(f"using {PYTHON_HELP}, Python's help topics; pass the student's --dataset instead")
    with redirect_stdout(sys.stderr):
        output_dir = None if options.dry_run else options.output_dir
        job = prepare_cache(teacher, settings, output_dir)
        if output_dir is not None:
            with progress_on_stderr("loading the teacher"):
                run_cache_job(job, output_dir)
    key, tokens = job.key, sum(len(ids) for ids in job.samples)
    record: dict[str, Any] = {
        "schema_version": 1,
        "teacher": key.teacher,
        "samples": len(job.samples),
        "tokens": tokens,
        "bytes_per_token": key.bytes_per_token,
        "bytes": tokens * key.bytes_per_token,
        "top_k": key.top_k,
        "temperatures": list(key.temperatures),
        "vocab_size": key.vocab_size,
        "output_dir": None if output_dir is None else str(output_dir),
    }
    if options.as_json:
        print(json.dumps(record))
        return 0
    temperatures = ", ".join(f"{temperature:g}" for temperature in key.temperatures)
    print(f"{tokens:,} tokens in {len(job.samples):,} samples, {key.bytes_per_token} bytes each: ", end="")
    print(f"{gigabytes(tokens * key.bytes_per_token)} GB")
    print(f"top {key.top_k} of {key.vocab_size:,} tokens and the sum of the others, at temperature {temperatures}")
    print("Dry run: nothing was run or written." if output_dir is None else f"Stored in {output_dir}")
    return 0


class StudentFlags(OutputDirectory, RevisionFields):
    dry_run: bool = Field(False, description="Check and print everything; write nothing")


def student_command(
    teacher: str,
    *,
    request: Options[StudentRequest] = FILLED,
    options: Options[StudentFlags] = FILLED,
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
