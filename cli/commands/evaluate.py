"""`shardwright evaluate`: what a model is worth, beside the one that it was made from."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ...ds_configs.specs.errors import Fault, UsageError
from ...ds_configs.specs.settings import Names, Paths
from ..command_line import command_line
from ..machines import ReplicaOptions, run_on_hosts, tell_place
from ..options import ReportOptions
from ..progress import note, progress_on_stderr
from ..settings import FILLED, Options, grouped

if TYPE_CHECKING:
    from ...plugins.lm_eval.tasks import TaskRequest
    from ...trainers.evaluation.result import Evaluation


@grouped
class EvaluateOptions(ReportOptions):
    """Measures, and the text that they are taken on."""

    group = "Evaluation"

    baseline: str | None = Field(
        None, description="What it is compared with on the same tokens; usually what it was made from"
    )
    dataset: str | None = Field(
        None,
        description="ID[:config][#N] of the Hub, a file or directory of rows, or python-help. Default: python-help",
    )
    text: Paths = Field((), description="Files of plain text, instead of a dataset")
    split: str = Field("test", description="Split of a Hub dataset")
    seq_len: int | None = Field(
        None, description="Tokens that are read together. Default: 2048, or fewer where a model has fewer positions"
    )
    stride: int | None = Field(
        None, description="Tokens from one window's start to the next. Default: seq-len, so that none is read twice"
    )
    num_samples: int = Field(64, description="Windows to read, from the start of the text")
    batch_size: int = Field(4, description="Windows that are read together; no result depends on it")
    tasks: Names | None = Field(None, description="Tasks of lm-evaluation-harness, such as hellaswag,arc_easy")
    limit: int | None = Field(None, description="Documents of each task")
    few_shot: int | None = Field(None, description="Solved examples before each question of a task")
    include_path: Path | None = Field(
        None, description="Directory with task files of your own; the Python functions that they name are run"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type to load weights as; auto: the stored one"
    )
    device: str | None = Field(None, description="Such as cuda:0 or cpu. Default: an accelerator where there is one")
    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="Who reads: Transformers here, or vLLM in its own environment, found on PATH"
    )
    speed: bool = Field(True, description="Measure tokens/s and memory")
    revision: str | None = Field(None, description="Branch, tag or commit of a Hub model")
    baseline_revision: str | None = Field(None, description="The same of a Hub baseline")
    dataset_revision: str | None = Field(None, description="The same of a Hub dataset")


grouped(ReplicaOptions)


def evaluate_command(
    model: str,
    *,
    options: Annotated[EvaluateOptions, Options] = FILLED,
    machines: Annotated[ReplicaOptions, Options] = FILLED,
) -> int:
    """Measure a model on a text, and how far it is from a baseline: perplexity, KL, agreement, size and speed.

    Example: shardwright evaluate quantized --baseline meta-llama/Llama-3.1-8B --text book.txt

    Parameters
    ----------
    model
        Hub id or local directory with safetensors weights, plain or quantized.
    """
    from ...ds_configs.plan.output import output_faults, reserved
    from ...trainers.evaluation.evaluate import evaluate_model
    from ...trainers.evaluation.text_windows import TextRequest

    if machines.on == "ssh":
        return run_on_hosts(machines)
    replicas = machines.replicas()
    output_dir = options.output_dir if replicas.result_is_here else None
    force, faults = options.force, _conflicts(options)
    # Before hours are spent on what the report says.
    faults += [] if output_dir is None else output_faults(output_dir, force=force, sources=_sources(options, model))
    if faults:
        raise UsageError(faults)
    request = TextRequest(
        files=options.text,
        dataset=_dataset(options),
        split=options.split,
        dataset_revision=options.dataset_revision,
        stride=options.stride,
        num_samples=options.num_samples,
    )
    with ExitStack() as held:
        held.enter_context(redirect_stdout(sys.stderr))
        if output_dir is not None:
            held.enter_context(reserved(output_dir, force=force))
        on_progress = held.enter_context(progress_on_stderr("checking", stages_on_stderr))
        evaluation = evaluate_model(
            model,
            baseline=options.baseline,
            text=request,
            seq_len=options.seq_len,
            batch_size=options.batch_size,
            dtype=options.dtype,
            device=options.device,
            engine=options.engine,
            tasks=_task_request(options),
            revision=options.revision,
            baseline_revision=options.baseline_revision,
            measure_speeds=options.speed,
            replicas=replicas,
            notify=note,
            on_progress=on_progress,
        )
        if output_dir is not None:
            _write(evaluation, output_dir)
    if replicas.result_is_here:
        _tell(evaluation, output_dir, as_json=options.as_json)
    else:
        tell_place(replicas.place)
    return 0


def _tell(evaluation: Evaluation, output_dir: Path | None, *, as_json: bool) -> None:
    if as_json:
        where = None if output_dir is None else str(output_dir)
        print(json.dumps(evaluation.to_dict() | {"output_dir": where}, allow_nan=False))
    else:
        show_evaluation(evaluation, output_dir)


def _write(evaluation: Evaluation, output_dir: Path) -> None:
    from ...ds_configs.plan.write import write_files
    from ...trainers.evaluation.report import evaluation_files
    from ...trainers.reports.make import write_html

    write_files(evaluation_files(evaluation, command=command_line()), output_dir, force=True)
    write_html(output_dir)


def _sources(options: EvaluateOptions, model: str) -> dict[str, str | None]:
    """Return what is read, by its part."""
    from ...trainers.data.sources import local_place

    return {"the model": model, "the baseline": options.baseline, "the dataset": local_place(options.dataset)}


def _dataset(options: EvaluateOptions) -> str:
    """Return the dataset to measure on, and say so where no text was named."""
    from ...trainers.data.sources import PYTHON_HELP

    if options.dataset is None and not options.text:
        note(f"measured on {PYTHON_HELP}, Python's own help topics; --text or --dataset name what matters to you")
    return options.dataset or PYTHON_HELP


def _conflicts(options: EvaluateOptions) -> list[Fault]:
    faults = []
    if options.text and options.dataset is not None:
        fix = "give one of them"
        faults.append(Fault(where="--dataset", value=options.dataset, rule="cannot go with --text", fix=fix))
    if options.tasks == ():
        faults.append(Fault(where="--tasks", rule="names no task", fix="such as hellaswag,arc_easy"))
    for name in ("limit", "few_shot", "include_path"):
        value = getattr(options, name)
        if options.tasks is None and value is not None:
            flag, rule = f"--{name.replace('_', '-')}", "is for --tasks, which is not given"
            faults.append(Fault(where=flag, value=str(value), rule=rule))
    return faults


def _task_request(options: EvaluateOptions) -> TaskRequest | None:
    from ...plugins.lm_eval.tasks import TaskRequest

    if options.tasks is None:
        return None
    return TaskRequest(
        names=options.tasks, limit=options.limit, few_shot=options.few_shot, include_path=options.include_path
    )


def stages_on_stderr(stage: str, done: int, total: int) -> None:
    """Print a line for each stage that is done."""
    if done == total:
        note(f"{stage}: done")


def show_evaluation(evaluation: Evaluation, output_dir: Path | None) -> None:
    """Print what was found, the model beside its baseline."""
    from rich.text import Text

    from ...ds_configs.plan.measurement import printable
    from ...trainers.evaluation.report import FILE_NAMES, rows, verdict
    from ...trainers.reports.make import REPORT_FILE as HTML_FILE
    from ..show import console, print_compared

    out, text, compared = console(), evaluation.text, evaluation.comparison is not None
    beside = "" if evaluation.baseline is None else f"  beside {printable(evaluation.baseline.name)}"
    out.print(Text.assemble((printable(evaluation.model.name), "bold"), beside))
    out.print(
        Text(
            f"{text.predicted_tokens:,} tokens of {printable(text.source)}: {text.windows:,} of "
            f"{text.available_windows:,} windows of {text.seq_len_tokens:,} tokens"
        )
    )
    out.print()
    headings = ("model", "baseline", "difference") if compared else ("model",)
    found = ((row.name, row.model, row.baseline, row.difference)[: 1 + len(headings)] for row in rows(evaluation))
    print_compared(out, headings, found)
    out.print()
    if compared:
        out.print(Text(verdict(evaluation)))
    speed = evaluation.model.speed
    out.print(Text(f"{f'{speed.machine}; ' if speed else ''}{evaluation.seconds:.0f} s in all", style="dim"))
    if output_dir is None:
        out.print("No files written; give --output-dir")
    else:
        out.print(Text("Written: " + ", ".join(printable(str(output_dir / name)) for name in (*FILE_NAMES, HTML_FILE))))
