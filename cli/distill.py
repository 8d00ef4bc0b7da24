"""`shardwright distill`: plan, launch and report a distillation with one command."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from ..ds_configs.job import OffloadName, StrategyName, Switch
from ..ds_configs.teacher_placement import TeacherPlacementChoice
from ..trainers.distillation.objective import Divergence
from .model_settings import resolve_model

if TYPE_CHECKING:
    from ..trainers.distillation.run import OnStep
    from ..trainers.distillation.run_inputs import Prepared
    from ..trainers.distillation.run_report import Outcome

_ENVIRONMENT = ("hardware", "host_memory", "nvme", "teacher_placement", "teacher_cache", "seed")
"""Settings that the environment may state; others would collide with those of `plan`."""
_SECONDS_BETWEEN_LINES = 15.0


def distill_command(
    teacher: str,
    student: str,
    *,
    output_dir: Path,
    dataset: str | None = None,
    dataset_split: str | None = None,
    dataset_revision: str | None = None,
    seq_len: int | None = None,
    packing: bool | None = None,
    evaluation_fraction: float | None = None,
    evaluation_samples: int | None = None,
    hardware: str | None = None,
    host_memory: str | None = None,
    nvme: str | None = None,
    loss: Divergence | None = None,
    mixture: float | None = None,
    alpha: float | None = None,
    temperature: float | None = None,
    hidden_states: float | None = None,
    attention: float | None = None,
    on_policy: float | None = None,
    max_new_tokens: int | None = None,
    prompt_tokens: int | None = None,
    cross_tokenizer: Annotated[bool | None, Parameter(negative="")] = None,
    max_steps: int | None = None,
    epochs: float | None = None,
    learning_rate: float | None = None,
    micro_batch_size: int | Literal["auto"] | None = None,
    global_batch_size: int | None = None,
    precision: Literal["auto", "bf16", "fp16", "fp32"] | None = None,
    optimizer: str | None = None,
    method: Literal["full", "lora"] | None = None,
    lora_rank: int | None = None,
    lora_targets: str | None = None,
    gradient_checkpointing: Switch | None = None,
    strategy: StrategyName | None = None,
    offload: OffloadName | None = None,
    teacher_placement: TeacherPlacementChoice | None = None,
    teacher_cache: str | None = None,
    revision: str | None = None,
    teacher_revision: str | None = None,
    logging_steps: int | None = None,
    save_steps: int | None = None,
    seed: int | None = None,
    config: Path | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    force: Annotated[bool, Parameter(negative="")] = False,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    format: Literal["human", "json"] = "human",
) -> int:
    """Teach a student what a teacher knows: plan, train, evaluate before and after, save with a model card.

    Example: shardwright distill Qwen/Qwen3-8B Qwen/Qwen3-0.6B --dataset python-help --output-dir taught

    Parameters
    ----------
    teacher
        Hub id or directory; weights are read from safetensors.
    student
        Hub id or directory, or a config.json for random weights.
    output_dir
        Where the student goes, with README.md, REPORT.md, metrics.jsonl, distillation.png and the plan.
    dataset
        ID[:config][#N] of the Hub, a .jsonl, .json, .parquet or .txt file, a directory of them, or python-help.
        Columns: text; messages or conversations; or prompt and completion.
    dataset_split
        Split of a Hub dataset. Default train.
    dataset_revision
        Branch, tag or commit of a Hub dataset.
    seq_len
        Tokens of one sample. Default 512.
    packing
        Join plain text to samples of equal length. Default yes.
    evaluation_fraction
        Share of the rows that is held out. Default 0.05.
    evaluation_samples
        Held-out samples to evaluate on, at most. Default 256.
    hardware
        As for plan. Default: this machine's accelerators, or two CPU ranks.
    host_memory
        Memory of one node, such as 1TB.
    nvme
        NVMe of one node as PATH:SIZE.
    loss
        Distance between the distributions. Default forward_kl.
    mixture
        Teacher's weight in JSD, lambda of the skewed divergences. Default 0.5.
    alpha
        Weight of the distance, 0 to 1; the labels have the rest. Default 0.5.
    temperature
        Softens both distributions. Default 1.
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
    max_steps
        Optimizer steps. Default: as many as the epochs need.
    epochs
        Passes over the data. Default 1.
    learning_rate
        Default 2e-5, with LoRA 2e-4.
    micro_batch_size
        Samples of one forward pass on one rank, or auto. Default auto.
    global_batch_size
        Samples of one optimizer step. Default about 32.
    precision
        Default bf16, and fp32 without an accelerator.
    optimizer
        A name of the Trainer's optim. Default adamw_torch_fused.
    method
        Full training or LoRA. Default full.
    lora_rank
        Rank of the LoRA matrices. Default 16.
    lora_targets
        Module names separated by commas, or all-linear. Default all-linear.
    gradient_checkpointing
        Recompute each layer in the backward pass. Default auto.
    strategy
        Engine and stage. Default auto.
    offload
        none, cpu (optimizer), cpu-all (and parameters) or nvme. Default auto.
    teacher_placement
        replica, sharded, offloaded, quantized or cached. Default auto.
    teacher_cache
        Directory that cache-teacher wrote; no teacher runs while the student trains.
    revision
        Branch, tag or commit of a Hub student.
    teacher_revision
        Branch, tag or commit of a Hub teacher.
    logging_steps
        Optimizer steps between two lines of metrics.jsonl. Default 10.
    save_steps
        Optimizer steps between checkpoints. Default: none.
    seed
        Of data order, held-out rows and sampling. Default 0.
    config
        YAML file with any of these settings; flags win.
    resume
        Go on from the last checkpoint in the output directory.
    force
        Write into an output directory that holds other files.
    dry_run
        Show the data, the plan and the files, launch and write nothing.
    format
        human or json; json prints one object on stdout.
    """
    given = locals()
    from ..trainers.distillation.run import distill
    from ..trainers.distillation.run_files import DistillSettings
    from ..trainers.distillation.run_inputs import prepare

    settings = resolve_model(DistillSettings, given, file=config, environment=_ENVIRONMENT)
    # Libraries that log to stdout must not stand in the report.
    with redirect_stdout(sys.stderr):
        how = {"dry_run": dry_run, "force": force, "resume": resume}
        prepared = prepare(settings, teacher, student, output_dir, notify=_note, **how)
    if dry_run:
        _show_dry_run(prepared, output_dir, as_json=format == "json")
        return 0
    with redirect_stdout(sys.stderr), progress_on_stderr() as on_step:
        outcome = distill(prepared, output_dir, resume=resume, notify=_note, on_step=on_step)
    if format == "json":
        print(json.dumps(outcome.to_dict() | {"output_dir": str(output_dir)}))
    else:
        show_outcome(outcome, output_dir)
    return 0


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


@contextmanager
def progress_on_stderr() -> Iterator[OnStep]:
    """Yield a function that tells how far training is and what remains: a bar on a terminal, else a line at times."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    if not sys.stderr.isatty():
        yield _printed_progress()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting the ranks", total=None)

        def on_step(done: int, total: int) -> None:
            bar.update(task, description="training", completed=done, total=total)

        yield on_step


def _printed_progress() -> OnStep:
    first: tuple[float, int] | None = None
    told = 0.0

    def on_step(done: int, total: int) -> None:
        nonlocal first, told
        now = time.monotonic()
        began, step = first = first or (now, done)
        if now - told < _SECONDS_BETWEEN_LINES and done < total:
            return
        told = now
        left = f", {(now - began) / (done - step) * (total - done):.0f} s left" if done > step else ""
        print(f"note: step {done} of {total}{left}", file=sys.stderr)

    return on_step


def _show_dry_run(prepared: Prepared, output_dir: Path, *, as_json: bool) -> None:
    from ..ds_configs.plan_json import plan_to_dict
    from .show import console, show_plan, show_settings

    files = [str(output_dir / name) for name in prepared.file_names]
    statistics = prepared.samples.statistics
    if as_json:
        found = {
            "schema_version": 1,
            "settings": prepared.settings.model_dump(),
            "dataset": asdict(statistics),
            "plan": plan_to_dict(prepared.plan),
            "files": files,
        }
        print(json.dumps(found))
        return
    values = prepared.settings.model_dump()
    show_settings(
        values, {name: "given" if name in prepared.settings.model_fields_set else "default" for name in values}
    )
    show_plan(prepared.plan, None)
    out = console()
    out.print(
        f"{statistics.train_samples:,} samples of {statistics.source} with {statistics.train_labels:,} labelled tokens "
        f"to train on, {len(prepared.samples.evaluation):,} to evaluate on",
        markup=False,
    )
    out.print("A run would write " + ", ".join(files), markup=False)


def show_outcome(outcome: Outcome, output_dir: Path) -> None:
    """Print the comparison of the student before and after with its teacher, and where everything lies."""
    from rich.table import Table
    from rich.text import Text

    from ..trainers.distillation.run_report import CARD_FILE, CHART_FILE, REPORT_FILE, comparison
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
    result = outcome.result
    out.print(
        f"{result.steps} steps, {result.tokens:,} tokens, {outcome.tokens_per_second:,.0f} tokens/s, "
        f"{outcome.seconds:.0f} s in all"
    )
    files = ", ".join(str(output_dir / name) for name in (REPORT_FILE, CARD_FILE, CHART_FILE))
    out.print(f"Student in {output_dir}; see {files}", markup=False)
