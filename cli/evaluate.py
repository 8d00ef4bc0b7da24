"""`shardwright evaluate`: what a model is worth, beside the one that it was made from."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from ..ds_configs.specs.errors import Fault, UsageError

if TYPE_CHECKING:
    from ..plugins.lm_eval.tasks import TaskRequest
    from ..trainers.evaluation.evaluate import OnProgress
    from ..trainers.evaluation.result import Evaluation

_Flag = Parameter(negative="")


def evaluate_command(
    model: str,
    /,
    *,
    baseline: str | None = None,
    dataset: str | None = None,
    text: Annotated[list[Path] | None, _Flag] = None,
    split: str = "test",
    seq_len: int | None = None,
    stride: int | None = None,
    num_samples: int = 64,
    batch_size: int = 4,
    tasks: str | None = None,
    limit: int | None = None,
    few_shot: int | None = None,
    include_path: Path | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    device: str | None = None,
    speed: bool = True,
    revision: str | None = None,
    baseline_revision: str | None = None,
    dataset_revision: str | None = None,
    output_dir: Path | None = None,
    force: Annotated[bool, _Flag] = False,
    format: Literal["human", "json"] = "human",
) -> int:
    """Measure a model on a text, and how far it is from a baseline: perplexity, KL, agreement, size and speed.

    Example: shardwright evaluate quantized --baseline meta-llama/Llama-3.1-8B --text book.txt

    Parameters
    ----------
    model
        Hub id or local directory with safetensors weights, plain or quantized.
    baseline
        What it is compared with on the same tokens; usually what it was made from.
    dataset
        ID[:config][#N] of the Hub, a file or directory of rows, or python-help. Default: python-help.
    text
        A file of plain text; repeatable. Instead of --dataset.
    split
        Split of a Hub dataset.
    seq_len
        Tokens that are read together. Default: 2048, or fewer where a model has fewer positions.
    stride
        Tokens from one window's start to the next. Default: --seq-len, so that none is read twice.
    num_samples
        Windows to read, from the start of the text.
    batch_size
        Windows that are read together; no result depends on it.
    tasks
        Tasks of lm-evaluation-harness, such as hellaswag,arc_easy.
    limit
        Documents of each task.
    few_shot
        Solved examples before each question of a task.
    include_path
        Directory with task files of your own; the Python functions that they name are run.
    dtype
        Type to load weights as. Default: the stored one.
    device
        Such as cuda:0 or cpu. Default: an accelerator where there is one.
    speed
        Measure tokens/s and memory.
    revision
        Branch, tag or commit of a Hub model.
    baseline_revision
        The same of a Hub baseline.
    dataset_revision
        The same of a Hub dataset.
    output_dir
        Where REPORT.md, evaluation.json and evaluation.png go. Default: nothing is written.
    force
        Write into a directory that is not empty.
    format
        human or json; json prints one object on stdout.
    """
    from ..ds_configs.plan.write import output_faults, write_files
    from ..trainers.evaluation.evaluate import evaluate_model
    from ..trainers.evaluation.report import report_files
    from ..trainers.evaluation.text_windows import TextRequest

    faults = _conflicts(text, dataset, tasks, limit, few_shot, include_path)
    # Before hours are spent on what the report says.
    faults += [] if output_dir is None else output_faults(output_dir, force=force)
    if faults:
        raise UsageError(faults)
    request = TextRequest(
        files=tuple(text or ()),
        dataset=dataset or TextRequest().dataset,
        split=split,
        dataset_revision=dataset_revision,
        stride=stride,
        num_samples=num_samples,
    )
    with redirect_stdout(sys.stderr), progress_on_stderr() as on_progress:
        evaluation = evaluate_model(
            model,
            baseline=baseline,
            text=request,
            seq_len=seq_len,
            batch_size=batch_size,
            dtype=dtype,
            device=device,
            tasks=_task_request(tasks, limit, few_shot, include_path),
            revision=revision,
            baseline_revision=baseline_revision,
            measure_speeds=speed,
            notify=_note,
            on_progress=on_progress,
        )
        if output_dir is not None:
            write_files(report_files(evaluation), output_dir, force=force)
    if format == "json":
        where = None if output_dir is None else str(output_dir)
        print(json.dumps(evaluation.to_dict() | {"output_dir": where}, allow_nan=False))
    else:
        show_evaluation(evaluation, output_dir)
    return 0


def _conflicts(
    text: list[Path] | None,
    dataset: str | None,
    tasks: str | None,
    limit: int | None,
    few_shot: int | None,
    include_path: Path | None,
) -> list[Fault]:
    faults = []
    if text and dataset is not None:
        faults.append(Fault(where="--dataset", value=dataset, rule="cannot go with --text", fix="give one of them"))
    if tasks is not None and not _names(tasks):
        faults.append(Fault(where="--tasks", value=tasks, rule="names no task", fix="such as hellaswag,arc_easy"))
    for name, value in (("--limit", limit), ("--few-shot", few_shot), ("--include-path", include_path)):
        if tasks is None and value is not None:
            faults.append(Fault(where=name, value=str(value), rule="is for --tasks, which is not given"))
    return faults


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _task_request(
    tasks: str | None, limit: int | None, few_shot: int | None, include_path: Path | None
) -> TaskRequest | None:
    from ..plugins.lm_eval.tasks import TaskRequest

    if tasks is None:
        return None
    return TaskRequest(names=_names(tasks), limit=limit, few_shot=few_shot, include_path=include_path)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


@contextmanager
def progress_on_stderr() -> Iterator[OnProgress]:
    """Yield a function that tells what is read and how far: a bar on a terminal, else a line for each stage."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not sys.stderr.isatty():
        yield _printed
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("checking", total=None)

        def on_progress(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield on_progress


def _printed(stage: str, done: int, total: int) -> None:
    if done == total:
        print(f"note: {stage}: done", file=sys.stderr)


def show_evaluation(evaluation: Evaluation, output_dir: Path | None) -> None:
    """Print what was found, the model beside its baseline."""
    from rich.table import Table
    from rich.text import Text

    from ..ds_configs.plan.measurement import printable
    from ..trainers.evaluation.report import FILE_NAMES, rows, verdict
    from .show import console

    out, text, compared = console(), evaluation.text, evaluation.comparison is not None
    beside = "" if evaluation.baseline is None else f"  beside {printable(evaluation.baseline.name)}"
    out.print(Text(printable(evaluation.model.name), style="bold") + Text(beside))
    out.print(
        Text(
            f"{text.predicted_tokens:,} tokens of {printable(text.source)}: {text.windows:,} of "
            f"{text.available_windows:,} windows of {text.seq_len_tokens:,} tokens"
        )
    )
    out.print()
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("model", *(("baseline", "difference") if compared else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows(evaluation):
        cells = (row.baseline, row.difference) if compared else ()
        table.add_row(row.name, Text(row.model, style="bold"), *cells)
    out.print(table)
    out.print()
    if compared:
        out.print(Text(verdict(evaluation)))
    speed = evaluation.model.speed
    out.print(Text(f"{f'{speed.machine}; ' if speed else ''}{evaluation.seconds:.0f} s in all", style="dim"))
    if output_dir is None:
        out.print("No files written; give --output-dir")
    else:
        out.print(Text("Written: " + ", ".join(printable(str(output_dir / name)) for name in FILE_NAMES)))
