"""Run of a user's own script under a plan, and its other side: this module runs on every rank before the script does.

accelerate launch --config_file plan/accelerate.yaml -m shardwright.trainers.runs.script SCRIPT [ARGUMENTS]
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import Fault, UsageError, collecting
from ...plugins.accelerate.cpu_ranks import serve_scripts_on_cpu_ranks
from ...plugins.launching.elastic import recorded
from ...plugins.launching.launch import run_together
from ...plugins.launching.notes import Notify
from .inputs import launch_faults
from .launch import LONGEST_RUN_SECONDS, compile_operators, planned_launch


def launch_own_script(
    plan_directory: Path, script: Path, arguments: Sequence[str], *, on_line: Callable[[str], None], notify: Notify
) -> None:
    """Run a script on every rank of a plan, wherever its directory lies now, and wait for the end.

    Args:
        plan_directory: What `shardwright plan` wrote.
        script: Python file; it runs as `__main__`, with its arguments.
        arguments: What the script is called with.
        on_line: Receives every line that ranks print.
        notify: Receives remarks.

    Raises:
        UsageError: there is no plan, no script, or not the hardware that was planned for.
        ShardwrightError: a rank failed; says which and why.
    """
    faults: list[Fault] = []
    with collecting(faults):
        plan = Plan.load(plan_directory)
        faults += launch_faults(plan.hardware)
    if not script.is_file():
        faults.append(Fault(where="script", value=str(script), rule="no such file", fix="name a Python file"))
    if faults:
        raise UsageError(faults)
    strategy = plan.chosen.strategy
    if strategy.engine == "deepspeed" and plan.hardware.gpu == "CPU":
        compile_operators((strategy.offload_optimizer, strategy.offload_param), plan.job.optimizer, notify)
    launched = planned_launch([__name__, str(script), *arguments], plan, plan_directory)
    run_together([launched], timeout_seconds=LONGEST_RUN_SECONDS, on_line=on_line)


def _run_script() -> None:
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).absolute().parent)
    serve_scripts_on_cpu_ranks()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    recorded(_run_script)()
