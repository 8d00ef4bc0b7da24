"""`launch`: run a plan's own training or a user's script on its ranks; see `script_rank.py` for the ranks' side."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...ds_configs.plan.output import write_files
from ...ds_configs.plan.plan import Plan, on_fewer_nodes
from ...ds_configs.plan.rendering import (
    TRAINING_MODULE,
    NodePlace,
    copy_errors,
    planned_training_arguments,
    train_arguments,
)
from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError, collecting
from ...ds_configs.specs.texts import strict_json
from ...plugins.launching.launch import LONGEST_RUN_SECONDS, launch_ranks
from ...plugins.planning.from_names import installed_release_difference
from ...plugins.transformers.training_arguments import package_errors
from ..checkpoints.record import NotWholeError, read_record, stated_facts
from ..checkpoints.resume import checkpoints
from ..runs.inputs import PLANNED_DEVICE_FIX, check_resumption, launch_errors
from ..runs.launch import compare_nodes, compile_planned_operators, planned_launch, rank_words
from .plan_flags import PlanTrainingJob, parse_flags
from .settings import ScriptJob

PLAN_FLAGS = "@plan"
"""Script argument that is replaced by the plan's arguments as flags."""
_ARGUMENTS = "training_arguments.json"

logger = logging.getLogger(__name__)


def launch_plan(
    plan_directory: Path,
    script: Path | None,
    arguments: Sequence[str],
    *,
    place: NodePlace | None = None,
    check_nodes: bool = True,
    timeout_seconds: float = LONGEST_RUN_SECONDS,
    on_line: Callable[[str], None],
) -> None:
    """Run the ranks of a plan on this machine and wait for them; the plan's directory may have moved.

    Args:
        plan_directory: Written by `shardwright plan`.
        script: Python file that runs as `__main__`; `None` for the plan's own training.
        arguments: Of the script or the training; `@plan` becomes the plan's `TrainingArguments` as flags.
        place: This machine's place among several; `None` for a plan of one machine.
        check_nodes: Whether to compare several machines first.
        timeout_seconds: Hard limit of the run.
        on_line: Receives every line that ranks print.

    Raises:
        UsageError: plan, script or planned hardware is missing, `accelerate.yaml` embeds another DeepSpeed
            configuration than `ds_config.json`, or no steps are left to resume.
        ShardwrightError: a rank failed; names the rank and its error.
    """
    errors: list[ConfigError] = []
    with collecting(errors):
        plan = Plan.load(plan_directory)
        errors += launch_errors(plan.hardware, place, device_fix=PLANNED_DEVICE_FIX) + copy_errors(plan_directory)
        with contextlib.suppress(OSError, ValueError):
            errors += package_errors(strict_json((plan_directory / _ARGUMENTS).read_bytes()))
        errors += work_errors(plan, plan_directory, script, arguments)
    if errors:
        raise UsageError(errors)
    if (difference := installed_release_difference(plan)) is not None:
        logger.info(difference)
    changed: dict[str, Any] = {}
    if place is not None and place.nodes is not None:
        full_plan, plan = plan, on_fewer_nodes(plan, place.nodes)
        changed = _changed_arguments(full_plan, plan, plan_directory, script, arguments)
    compile_planned_operators(plan)
    if place is not None and check_nodes:
        compare_nodes(plan, plan_directory, place, Path(stated_output(arguments) or plan_directory))
    words = with_plan_flags(arguments, plan)
    with tempfile.TemporaryDirectory(prefix="shardwright-nodes-") as directory:
        work = Path(directory)
        if script is None:
            if changed:
                write_files({_ARGUMENTS: json.dumps(changed)}, work)
                words = ["--training-arguments", str(work / _ARGUMENTS), *words]
            launch = planned_launch(None, plan, plan_directory, place=place)
            launch = replace(launch, arguments=(*launch.arguments, *words))
            # Reject before ranks start what they would reject.
            job = parse_flags(launch.arguments[launch.arguments.index(TRAINING_MODULE) + 1 :], PlanTrainingJob)
            if job.resume:
                settings = job.read_settings()
                check_resumption(job.output_dir, stated_facts(settings), steps=settings.get("max_steps", 0))
        else:
            script_job = ScriptJob(plan=str(plan_directory.absolute()), script=str(script), arguments=words)
            launch = planned_launch(rank_words(script_job, work), plan, plan_directory, place=place)
        launch_ranks(launch, timeout_seconds=timeout_seconds, on_line=on_line)


def _changed_arguments(
    full_plan: Plan, reduced_plan: Plan, plan_directory: Path, script: Path | None, arguments: Sequence[str]
) -> dict[str, Any]:
    """Return `training_arguments.json` of a plan with the values that change on fewer nodes.

    Raises:
        UsageError: the script does not receive the plan's arguments, or the file has another accumulation.
    """
    if script is not None and PLAN_FLAGS not in arguments:
        rule, fix = "must use the plan's global batch", f"add {PLAN_FLAGS} to its arguments"
        raise UsageError(ConfigError(where="script", value=str(script), rule=rule, fix=fix))
    own: dict[str, Any] = json.loads((plan_directory / _ARGUMENTS).read_text(encoding="utf-8"))
    before, after = planned_training_arguments(full_plan), planned_training_arguments(reduced_plan)
    name = "gradient_accumulation_steps"
    if own.get(name, 1) != before[name]:
        rule, fix = f"differs from {before[name]} in the plan", "plan again with this global batch, or use all nodes"
        raise UsageError(ConfigError(where=name, value=own.get(name), rule=rule, fix=fix))
    return own | {name: value for name, value in after.items() if before.get(name) != value}


def stated_output(arguments: Sequence[str]) -> str | None:
    """Return the output directory in the arguments of a training, in either spelling.

    >>> stated_output(["--max_steps", "3", "--output_dir=out"])
    'out'
    """
    words = [part for word in arguments for part in word.split("=", 1)]
    flags = [index for index, word in enumerate(words[:-1]) if word in ("--output-dir", "--output_dir")]
    return words[flags[-1] + 1] if flags else None


def work_errors(plan: Plan, plan_directory: Path, script: Path | None, arguments: Sequence[str]) -> list[ConfigError]:
    """Return an error if the script does not exist, or if there is neither a script nor text to train on."""
    if script is not None:
        return script_errors(script)
    if any(word.partition("=")[0] == "--text" for word in arguments):
        return []
    dataset = shlex.join(train_arguments(plan, directory=str(plan_directory)))
    fix = f"pass your script and its arguments, or --text FILE after `--`; to train on a dataset: {dataset}"
    return [ConfigError(where="script", rule="is missing, and there is no data", fix=fix)]


def script_errors(script: Path) -> list[ConfigError]:
    """Return an error if the script does not exist."""
    if script.is_file():
        return []
    return [ConfigError(where="script", value=str(script), rule="no such file", fix="pass a Python file")]


def with_plan_flags(arguments: Sequence[str], plan: Plan) -> list[str]:
    """Return a script's arguments with `@plan` replaced by the plan's flags for `HfArgumentParser`."""
    flags: list[str] = []
    for name, value in planned_training_arguments(plan).items():
        flags += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return [word for argument in arguments for word in (flags if argument == PLAN_FLAGS else [argument])]


_FILE = "slurm-turns.json"
_FRUITLESS_TURNS = 2
"""Consecutive runs without progress that end a run; one slow turn may be due to a slow node."""


def count_turn(plan_directory: Path, script: Path | None, arguments: Sequence[str], *, job: str) -> None:
    """Count a SLURM turn that was stopped before its time limit, and check that it saved a new checkpoint.

    Args:
        plan_directory: Written by `shardwright plan`; stores the count.
        script: The user's script, whose checkpoints need no record; `None` for the plan's own training.
        arguments: Of the script or the training. Turns of a script without an output directory are not counted.
        job: SLURM job id, the same in every turn.

    Raises:
        ShardwrightError: two turns in a row left no new complete checkpoint.
    """
    output = stated_output(arguments)
    if script is not None and output is None:
        return
    newest, file = 0, plan_directory / _FILE
    for step, path in checkpoints(Path(output or plan_directory / "model")).items():
        with contextlib.suppress(NotWholeError):
            if script is None:
                read_record(path)
            newest = max(newest, step)
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if before.get("job") != job:
        before = {"step": 0, "fruitless": 0}
    fruitless = 0 if newest > before["step"] else before["fruitless"] + 1
    record = {"job": job, "step": newest, "fruitless": fruitless}
    write_files({_FILE: json.dumps(record) + "\n"}, plan_directory, force=True)
    if fruitless >= _FRUITLESS_TURNS:
        reached = f"is still at step {newest}" if newest else "has no complete checkpoint"
        raise ShardwrightError(
            f"job {job} {reached} after {fruitless} runs without progress and is not queued again: raise the time "
            "limit beyond start and saving with --sbatch=--time=..."
        )
