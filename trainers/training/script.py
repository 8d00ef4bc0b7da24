"""`launch`: a user's own script under a plan. The ranks' side is `script_rank.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ...ds_configs.plan.deepspeed_copy import copy_faults
from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.training_arguments import planned_training_arguments
from ...ds_configs.specs.errors import Fault, UsageError, collecting
from ...plugins.launching.launch import run_together
from ...plugins.launching.notes import Notify
from ..runs.inputs import launch_faults
from ..runs.launch import LONGEST_RUN_SECONDS, compile_operators, planned_launch

PLAN_FLAGS = "@plan"
"""Argument of a script in whose place the plan's arguments stand, as flags."""
_RANK = f"{__package__}.script_rank"


def launch_own_script(
    plan_directory: Path, script: Path, arguments: Sequence[str], *, on_line: Callable[[str], None], notify: Notify
) -> None:
    """Run a script on every rank of a plan, wherever its directory lies now, and wait for the end.

    Args:
        plan_directory: What `shardwright plan` wrote.
        script: Python file; it runs as `__main__`, with its arguments.
        arguments: What the script is called with; `@plan` stands for the plan's `TrainingArguments` as flags.
        on_line: Receives every line that ranks print.
        notify: Receives remarks.

    Raises:
        UsageError: there is no plan, no script, not the hardware that was planned for, or another DeepSpeed
            configuration in `accelerate.yaml` than in `ds_config.json`.
        ShardwrightError: a rank failed; says which and why.
    """
    faults: list[Fault] = []
    with collecting(faults):
        plan = Plan.load(plan_directory)
        faults += launch_faults(plan.hardware) + copy_faults(plan_directory)
    faults += script_faults(script)
    if faults:
        raise UsageError(faults)
    strategy = plan.chosen.strategy
    if strategy.engine == "deepspeed" and plan.hardware.gpu == "CPU":
        compile_operators((strategy.offload_optimizer, strategy.offload_param), plan.job.optimizer, notify)
    worker = [_RANK, str(plan_directory.absolute()), str(script), *with_plan_flags(arguments, plan)]
    run_together([planned_launch(worker, plan, plan_directory)], timeout_seconds=LONGEST_RUN_SECONDS, on_line=on_line)


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
