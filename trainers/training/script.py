"""`launch`: run a user's script on the ranks of a plan; see `rank.py` for the ranks' side."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ...ds_configs.check.effects import effect_errors
from ...ds_configs.plan.output import write_files
from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.rendering import (
    DEEPSPEED_FILE,
    NodePlace,
    copy_errors,
    planned_training_arguments,
    train_arguments,
)
from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError, collecting
from ...ds_configs.specs.tasks import TASKS
from ...ds_configs.specs.texts import strict_json
from ...plugins.planning import installed_release_difference
from ...plugins.transformers.training_arguments import package_errors
from ..checkpoints import NotWholeError, checkpoints, read_record
from ..runs.inputs import CHECKPOINTS, PLANNED_DEVICE_FIX, launch_errors
from ..runs.run import launch_job
from .settings import ScriptJob

PLAN_FLAGS = "@plan"
"""Script argument that is replaced by the plan's arguments as flags."""

logger = logging.getLogger(__name__)


def launch_script(
    plan_directory: Path,
    script: Path,
    arguments: Sequence[str],
    *,
    place: NodePlace | None = None,
    check_nodes: bool = True,
    on_line: Callable[[str], None],
) -> None:
    """Run a script on the ranks of a plan on this machine and wait for them; the plan's directory may have moved.

    Raises:
        UsageError: plan, script or planned hardware is missing, or `accelerate.yaml` embeds another
            DeepSpeed configuration than `ds_config.json`.
        ShardwrightError: a rank failed; names the rank and its error.
    """
    errors: list[ConfigError] = []
    with collecting(errors):
        plan = Plan.load(plan_directory)
        errors += launch_errors(plan.hardware, place, device_fix=PLANNED_DEVICE_FIX) + copy_errors(plan_directory)
        with contextlib.suppress(OSError, ValueError):
            errors += package_errors(strict_json((plan_directory / "training_arguments.json").read_bytes()))
        with contextlib.suppress(OSError, ValueError):
            errors += effect_errors(strict_json((plan_directory / DEEPSPEED_FILE).read_bytes()), name=DEEPSPEED_FILE)
        errors += script_errors(script)
    if errors:
        raise UsageError(errors)
    if (difference := installed_release_difference(plan)) is not None:
        logger.info(difference)
    with tempfile.TemporaryDirectory(prefix="shardwright-nodes-") as directory:
        job = ScriptJob(
            plan=str(plan_directory.absolute()), script=str(script), arguments=with_plan_flags(arguments, plan)
        )
        launch_job(job, plan, plan_directory, Path(directory), place=place, check_nodes=check_nodes, on_line=on_line)


def train_words(plan_directory: Path, arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `shardwright` that train with a plan; `arguments` are the user's flags of `train`.

    Raises:
        UsageError: the plan cannot be read or has a second model without a task that uses it, or there are no flags.
    """
    plan = Plan.load(plan_directory)
    words = train_arguments(plan, directory=str(plan_directory))
    trains = plan.job.task not in ("sft", "gkd") and TASKS[plan.job.task].trainer is not None
    for second in () if trains else plan.job.second_models:
        rule = f"has the {second.role} {second.spec.name}, but train uses none"
        fix = "pass your script" + (f", or use {shlex.join(words)}" if words[1] != "train" else "")
        raise UsageError(ConfigError(where="plan", value=str(plan_directory), rule=rule, fix=fix))
    if not arguments:
        fix = f"pass your script and its arguments, or flags of train after `--`; this is the same: {shlex.join(words)}"
        raise UsageError(ConfigError(where="script", rule="is missing, and there is no data", fix=fix))
    return [*words[1 : words.index("--dataset")], *arguments]


def stated_output(arguments: Sequence[str]) -> str | None:
    """Return the output directory in the arguments of a training, in either spelling.

    >>> stated_output(["--max_steps", "3", "--output_dir=out"])
    'out'
    """
    words = [part for word in arguments for part in word.split("=", 1)]
    flags = [index for index, word in enumerate(words[:-1]) if word in ("--output-dir", "--output_dir")]
    return words[flags[-1] + 1] if flags else None


def script_errors(script: Path) -> list[ConfigError]:
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


def count_turn(plan_directory: Path, arguments: Sequence[str], *, is_script: bool, job: str) -> None:
    """Count a SLURM turn that was stopped before its time limit, and check that it saved a new checkpoint.

    Args:
        plan_directory: Written by `shardwright plan`; stores the count.
        arguments: Of the script or of `train`. Turns without an output directory in them are not counted.
        is_script: Whether they are those of a user's script, whose checkpoints need no record.
        job: SLURM job id, the same in every turn.

    Raises:
        ShardwrightError: two turns in a row left no new complete checkpoint.
    """
    output = stated_output(arguments)
    if output is None:
        return
    newest, file = 0, plan_directory / _FILE
    for step, path in checkpoints(Path(output) if is_script else Path(output) / CHECKPOINTS).items():
        with contextlib.suppress(NotWholeError):
            if not is_script:
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
