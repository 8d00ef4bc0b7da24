"""`launch`: a plan's own training, or a user's script under it. The ranks' side of a script is `script_rank.py`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...ds_configs.plan.deepspeed_copy import copy_faults
from ...ds_configs.plan.fewer_nodes import on_fewer_nodes
from ...ds_configs.plan.launch import TRAINING_MODULE, NodePlace
from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.training_arguments import planned_training_arguments
from ...ds_configs.plan.write import write_files
from ...ds_configs.specs.errors import Fault, UsageError, collecting
from ...plugins.launching.launch import run_together
from ...plugins.launching.notes import Notify
from ..checkpoints.run_facts import stated_facts
from ..runs.checkpoints import refuse_to_resume
from ..runs.inputs import launch_faults
from ..runs.launch import LONGEST_RUN_SECONDS, checking_launch, compile_operators, planned_launch

PLAN_FLAGS = "@plan"
"""Argument of a script in whose place the plan's arguments stand, as flags."""
_ARGUMENTS, _ACCUMULATION = "training_arguments.json", "gradient_accumulation_steps"
_RANK = f"{__package__}.script_rank"


def launch_plan(
    plan_directory: Path,
    script: Path | None,
    arguments: Sequence[str],
    *,
    place: NodePlace | None = None,
    check_nodes: bool = True,
    on_line: Callable[[str], None],
    notify: Notify,
) -> None:
    """Run the ranks of a plan on this machine, wherever the plan's directory lies now, and wait for the end.

    Args:
        plan_directory: What `shardwright plan` wrote.
        script: Python file; it runs as `__main__`, with its arguments. `None` for the plan's own training.
        arguments: Of the script or the training; `@plan` stands for the plan's `TrainingArguments` as flags.
        place: This machine's among the several of the plan, or among fewer; `None` for a plan of one.
        check_nodes: Whether several machines are compared first.
        on_line: Receives every line that ranks print.
        notify: Receives remarks.

    Raises:
        UsageError: there is no plan, no script, not the hardware that was planned for, another DeepSpeed
            configuration in `accelerate.yaml` than in `ds_config.json`, or nothing left to go on with.
        ShardwrightError: a rank failed; says which and why.
    """
    faults: list[Fault] = []
    with collecting(faults):
        plan = Plan.load(plan_directory)
        faults += launch_faults(plan.hardware, place) + copy_faults(plan_directory)
    if script is not None:
        faults += script_faults(script)
    if faults:
        raise UsageError(faults)
    changed: dict[str, Any] = {}
    if place is not None and place.nodes is not None:
        whole, plan = plan, on_fewer_nodes(plan, place.nodes)
        changed = _changed_arguments(whole, plan, plan_directory, script, arguments)
    strategy = plan.chosen.strategy
    if strategy.engine == "deepspeed" and plan.hardware.gpu == "CPU":
        compile_operators((strategy.offload_optimizer, strategy.offload_param), plan.job.optimizer, notify)
    ran: dict[str, Any] = {"timeout_seconds": LONGEST_RUN_SECONDS, "on_line": on_line}
    if place is not None and check_nodes:
        output = Path(stated_output(arguments) or plan_directory)
        run_together([checking_launch(plan, plan_directory, place, output)], **ran)
    words = with_plan_flags(arguments, plan)
    worker = None if script is None else [_RANK, str(plan_directory.absolute()), str(script), *words]
    launched = planned_launch(worker, plan, plan_directory, place=place)
    with tempfile.TemporaryDirectory(prefix="shardwright-nodes-") as directory:
        if worker is None:
            if changed:
                write_files({_ARGUMENTS: json.dumps(changed)}, Path(directory))
                words = ["--training-arguments", f"{directory}/{_ARGUMENTS}", *words]
            launched = replace(launched, arguments=(*launched.arguments, *words))
            if "--resume" in words:
                _refuse_to_resume(launched.arguments[launched.arguments.index(TRAINING_MODULE) + 1 :])
        run_together([launched], **ran)


def _refuse_to_resume(words: Sequence[str]) -> None:
    """Tell before a rank starts what forbids a plan's own training, which these words call, to go on.

    Raises:
        UsageError: all steps are done, or a setting is none, or not that of the run that saved.
        SystemExit: a word is no flag of the training; argparse says which.
        RefusedInputError: there are checkpoints, but none is whole.
    """
    from ..train_causal_lm import parse_flags, read_settings

    flags = parse_flags(words)
    settings = read_settings(flags)
    refuse_to_resume(flags.output_dir, stated_facts(settings), steps=settings.get("max_steps", 0))


def _changed_arguments(
    whole: Plan, fewer: Plan, plan_directory: Path, script: Path | None, arguments: Sequence[str]
) -> dict[str, Any]:
    """Return the plan's `TrainingArguments` as they lie in its directory, with those that fewer nodes change.

    Raises:
        UsageError: a script does not get them, because it does not take the plan's; another accumulation lies there.
    """
    if script is not None and PLAN_FLAGS not in arguments:
        rule, fix = "has a global batch of its own", f"take the plan's, with {PLAN_FLAGS} among its arguments"
        raise UsageError(Fault(where="script", value=str(script), rule=rule, fix=fix))
    own: dict[str, Any] = json.loads((plan_directory / _ARGUMENTS).read_text(encoding="utf-8"))
    before, after, name = planned_training_arguments(whole), planned_training_arguments(fewer), _ACCUMULATION
    if own.get(name, 1) != before[name]:
        fix = "plan again with this global batch, or bring back all nodes"
        raise UsageError(Fault(where=name, value=own.get(name), rule=f"is not the plan's {before[name]}", fix=fix))
    return own | {name: value for name, value in after.items() if before.get(name) != value}


def stated_output(arguments: Sequence[str]) -> str | None:
    """Return where the arguments of a training say that its results go, as Trainers spell it.

    >>> stated_output(["--max_steps", "3", "--output_dir=out"])
    'out'
    """
    words = [part for word in arguments for part in word.split("=", 1)]
    named = [index for index, word in enumerate(words[:-1]) if word in ("--output-dir", "--output_dir")]
    return words[named[-1] + 1] if named else None


def script_faults(script: Path) -> list[Fault]:
    """Return a fault where there is no such script."""
    if script.is_file():
        return []
    return [Fault(where="script", value=str(script), rule="no such file", fix="name a Python file")]


def with_plan_flags(arguments: Sequence[str], plan: Plan) -> list[str]:
    """Return a script's arguments with the plan's own in the place of `@plan`, as `HfArgumentParser` reads them."""
    flags: list[str] = []
    for name, value in planned_training_arguments(plan).items():
        flags += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return [word for argument in arguments for word in (flags if argument == PLAN_FLAGS else [argument])]
