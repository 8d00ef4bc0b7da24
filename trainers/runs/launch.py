"""The launch of ranks, followed to its end: what every command does that starts them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from ...ds_configs.plan.launch import NodePlace, launch_arguments, with_own_files
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ShardwrightError
from ...plugins.launching.launch import Launch, at_free_port, python_arguments, run_together
from ...plugins.launching.notes import NOTE, Notify
from .progress import PROGRESS, Figures, OnStep
from .settings import JOB_FILE, RankJob

LONGEST_RUN_SECONDS = 90 * 86400.0
_NODE_CHECK = "shardwright.plugins.clusters.node_check"


def compile_operators(devices: Sequence[str], optimizer: str, notify: Notify) -> None:
    """Compile what DeepSpeed would compile on every CPU rank at once, while a launch's time runs.

    Args:
        devices: Where optimizer states and parameters are offloaded to, or `none`.
        optimizer: A name of the Trainer's `optim`.
        notify: Hears of a compilation.

    Raises:
        ShardwrightError: one cannot be compiled, or a killed compilation left its lock.
    """
    from ...plugins.deepspeed.compiled_operators import needed_operators, prepare_operators
    from ...plugins.deepspeed.engine import has_libaio

    nvme = "nvme" in devices
    if nvme and not has_libaio():
        raise ShardwrightError(
            "NVMe offload compiles async_io, which needs the header of libaio: install libaio-dev (Debian) or "
            "libaio-devel, or plan with --offload cpu"
        )
    operators = needed_operators(offload_optimizer=devices[0] != "none", nvme=nvme, optimizer=optimizer)
    prepare_operators(operators, notify=notify)


def write_job(job: RankJob, work: Path) -> str:
    """Leave a job for the ranks, and return the path that their command line names."""
    file = work / JOB_FILE
    file.write_text(job.model_dump_json(indent=1), encoding="utf-8")
    return str(file)


def planned_launch(
    worker: Sequence[str] | None, plan: Plan, plan_directory: Path, *, place: NodePlace | None = None
) -> Launch:
    """Return a plan's own launch, with a worker and its arguments in place of the training module unless there is none.

    `place` is that of this machine among several.
    """
    directory = str(plan_directory.absolute())
    command = with_own_files(launch_arguments(plan, directory=directory, place=place), plan, directory=directory)
    if worker is not None:
        command = [*command[: command.index("-m")], "-m", *worker]
    port = None
    if place is None:
        command, port = at_free_port(command)
    return Launch(arguments=python_arguments(command), environment=accelerators_shown(plan), port=port)


def checking_launch(plan: Plan, plan_directory: Path, place: NodePlace, output_directory: Path) -> Launch:
    """Return the launch of one process on each machine, which compares them before ranks are started."""
    meeting = ["--node-rank", str(place.rank), "--master-addr", place.main_address]
    # A port of its own: where one run ends, the store of its main machine may still answer for the next.
    meeting += ["--master-port", str(int(place.main_port) + 1)]
    command = ["torchrun", f"--nnodes={plan.hardware.nodes}", "--nproc-per-node=1", *meeting, "-m", _NODE_CHECK]
    places = [str(directory.absolute()) for directory in (plan_directory, output_directory)]
    return Launch(arguments=python_arguments([*command, *places]), environment=accelerators_shown(plan))


def accelerators_shown(plan: Plan) -> dict[str, str]:
    """Return the variables that name a plan's accelerators on one machine: launches hide those that are not named."""
    if plan.hardware.gpu == "CPU":
        return {}
    every = ",".join(str(index) for index in range(plan.hardware.gpus_per_node))
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", every), "DS_ACCELERATOR": "cuda"}


def run_launches(
    launches: Sequence[Launch],
    on_step: OnStep,
    *,
    notify: Notify,
    timeout_seconds: float = LONGEST_RUN_SECONDS,
) -> None:
    """Start the launchers of a job, hand over every optimizer step and remark of its ranks, and wait for the end.

    A step is told by its number, the number of all, and the figures that are known of it.

    Raises:
        LaunchFailedError: a rank failed; says which and why.
    """

    def on_line(line: str) -> None:
        if line.startswith(PROGRESS):
            # Ranks share one output: another may have written into the line.
            with contextlib.suppress(ValueError, TypeError, KeyError):
                told = json.loads(line.removeprefix(PROGRESS))
                on_step(int(told["step"]), int(told["steps"]), Figures.told(told))
        elif line.startswith(NOTE):
            notify(line.removeprefix(NOTE))

    run_together(launches, timeout_seconds=timeout_seconds, on_line=on_line)
