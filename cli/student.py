"""`shardwright student`: a smaller student from a teacher, as the starting point of a distillation."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from ..ds_configs.specs.errors import Fault, UsageError

if TYPE_CHECKING:
    from ..trainers.distillation.student.maker import StudentReport

_Flag = Parameter(negative="")


def student_command(
    teacher: str,
    /,
    *,
    output_dir: Path | None = None,
    layers: int | None = None,
    keep_layers: str | None = None,
    hidden: int | None = None,
    intermediate: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    importance: Literal["magnitude", "activation"] = "magnitude",
    text: Annotated[list[Path] | None, _Flag] = None,
    low_rank: int | None = None,
    low_rank_energy: float | None = None,
    sparsity: float | None = None,
    prune: Literal["magnitude", "l1"] = "magnitude",
    granularity: Literal["unstructured", "row"] = "unstructured",
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    revision: str | None = None,
    dry_run: Annotated[bool, _Flag] = False,
    force: Annotated[bool, _Flag] = False,
    format: Literal["human", "json"] = "human",
) -> int:
    """Cut a smaller student out of a teacher: a model directory that loads everywhere, to be distilled into.

    Example: shardwright student meta-llama/Llama-3.1-8B --layers 16 --intermediate 8192 --output-dir student

    Parameters
    ----------
    teacher
        Hub id or local model directory with safetensors weights.
    output_dir
        Where the student goes.
    layers
        Layers to keep, evenly spread; the first and the last stay.
    keep_layers
        Numbers of the layers to keep, such as 0,3,7.
    hidden
        Width of the residual stream.
    intermediate
        Channels inside the MLP.
    heads
        Query heads of each layer.
    kv_heads
        Key/value heads of each layer. Default: as many query heads on each as the teacher has.
    importance
        What decides which channels and heads stay: the weights, or what they do with a text.
    text
        A file that activations are measured on; repeatable. Default: Python's help.
    low_rank
        Rank of every weight matrix inside the layers; the dense product is stored.
    low_rank_energy
        Share of the squared singular values that every matrix keeps, instead of a rank.
    sparsity
        Share of zeros in every weight matrix inside the layers.
    prune
        magnitude leaves what stays as it is; l1 shrinks it as an L1 penalty does.
    granularity
        unstructured for single weights, row for whole outputs.
    dtype
        Stored type. Default: that of the teacher.
    revision
        Branch, tag or commit of a Hub teacher.
    dry_run
        Check and print sizes; read and write no weights.
    force
        Replace the model in a directory that is not empty.
    format
        human or json; json prints one object on stdout.
    """
    from ..trainers.distillation.student.maker import StudentReport, make_student, plan_student
    from ..trainers.distillation.student.request import StudentRequest

    request = StudentRequest(
        layers=layers,
        keep_layers=None if keep_layers is None else _numbers(keep_layers),
        hidden_size=hidden,
        intermediate_size=intermediate,
        heads=heads,
        key_value_heads=kv_heads,
        importance=importance,
        text=tuple(text or ()),
        low_rank=low_rank,
        low_rank_energy=low_rank_energy,
        sparsity=sparsity,
        prune=prune,
        granularity=granularity,
        dtype=dtype,
    )
    with redirect_stdout(sys.stderr):
        plan = plan_student(teacher, request, revision=revision, output_dir=output_dir, force=force)
        if dry_run or output_dir is None:
            report = StudentReport(plan=plan, output_dir=None)
        else:
            report = make_student(plan, teacher, output_dir, force=force)
    if format == "json":
        print(json.dumps(report.to_dict() | {"output_dir": None if report.output_dir is None else str(output_dir)}))
    else:
        show_student(report)
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise UsageError(Fault(where="--keep-layers", value=text, rule="must be numbers such as 0,3,7"))
    return tuple(int(word) for word in words)


def show_student(report: StudentReport) -> None:
    """Print what stayed of the teacher."""
    from rich.table import Table
    from rich.text import Text

    from ..ds_configs.plan.measurement import printable
    from ..ds_configs.specs.units import human_count
    from .show import console

    plan, out = report.plan, console()
    table = Table(box=None, pad_edge=False)
    for name, justify in (("", "left"), ("teacher", "right"), ("student", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for words in _size_rows(report):
        table.add_row(*words)
    share = plan.student_parameters / plan.teacher_parameters
    counts = [f"{human_count(count)}" for count in (plan.teacher_parameters, plan.student_parameters)]
    table.add_row("parameters", *counts, f"{share:.1%}")
    out.print(Text(printable(plan.source.name), style="bold"))
    out.print(table)
    if plan.stack is not None and len(plan.kept_layers) < plan.stack.count:
        out.print("layers kept:", ", ".join(map(str, plan.kept_layers)))
    for line in _thinned_lines(report):
        out.print(line, markup=False)
    if report.output_dir is None:
        out.print("No files written; give --output-dir without --dry-run")
    else:
        out.print(Text(f"Student in {printable(str(report.output_dir))}"))


def _size_rows(report: StudentReport) -> list[tuple[str, str, str]]:
    plan = report.plan
    rows = [] if plan.stack is None else [("layers", f"{plan.stack.count:,}", f"{len(plan.kept_layers):,}")]
    before, after = plan.teacher_widths, plan.student_widths
    if before is not None and after is not None:
        names = {
            "hidden size": "hidden_size",
            "MLP channels": "intermediate_size",
            "query heads": "heads",
            "key/value heads": "key_value_heads",
        }
        rows += [(word, f"{getattr(before, name):,}", f"{getattr(after, name):,}") for word, name in names.items()]
    return rows


def _thinned_lines(report: StudentReport) -> list[str]:
    lines = []
    found: list[dict[str, Any]] = list(report.low_rank.values())
    if found:
        ranks, energies = [entry["rank"] for entry in found], [entry["energy"] for entry in found]
        kept = f"{min(energies):.1%} to {max(energies):.1%}"
        lines.append(f"rank {min(ranks)} to {max(ranks)} in {len(found)} matrices, {kept} of the energy kept")
        lines.append("the dense products are stored: the file is no smaller")
    if report.zeros:
        mean = sum(report.zeros.values()) / len(report.zeros)
        lines.append(f"zeros in {len(report.zeros)} matrices: {mean:.1%} on average")
    return lines
