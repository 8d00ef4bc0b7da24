"""Launches of the ranks of a plan; every rank runs `rank_main.py` with a job file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.rendering import NodePlace, launch_arguments
from ...ds_configs.specs.errors import ShardwrightError
from ...plugins.launching.launch import Launch, free_port, launch_ranks, python_arguments
from .settings import JOB_FILE, RESULT_FILE, RankJob

RANK_MODULE = "shardwright.trainers.rank_main"
_NODE_CHECK = "shardwright.plugins.clusters"


def compile_operators(devices: Sequence[str], optimizer: str) -> None:
    """Compile the operators that DeepSpeed would otherwise compile on every CPU rank during the launch.

    Args:
        devices: Offload devices of optimizer states and parameters, or `none`.
        optimizer: A name of the Trainer's `optim`.

    Raises:
        ShardwrightError: a compilation fails, or a killed compilation left its lock.
    """
    from ...plugins.deepspeed.compiled_operators import needed_operators, prepare_operators
    from ...plugins.deepspeed.engine import has_libaio

    nvme = "nvme" in devices
    if nvme and not has_libaio():
        raise ShardwrightError(
            "NVMe offload compiles async_io, which requires the header of libaio: install libaio-dev (Debian) or "
            "libaio-devel, or plan with --offload cpu"
        )
    operators = needed_operators(offload_optimizer=devices[0] != "none", nvme=nvme, optimizer=optimizer)
    prepare_operators(operators)


def rank_words(job: RankJob, work: Path) -> list[str]:
    """Write the file of a job, and return the launcher's arguments for ranks that run it."""
    file = work / JOB_FILE
    file.write_text(job.model_dump_json(indent=1), encoding="utf-8")
    return ["-m", RANK_MODULE, str(file)]


def launch_job(
    job: RankJob,
    plan: Plan,
    plan_directory: Path,
    work: Path,
    *,
    launcher: Sequence[str] | None = None,
    place: NodePlace | None = None,
    check_nodes: bool = True,
    **waiting: Any,
) -> dict[str, Any]:
    """Run a job on the ranks of a plan, and return the result that the first rank wrote; empty without one.

    Args:
        job: Its file is written into `work`, where ranks leave the result.
        plan: Operators that it needs on CPU ranks are compiled first.
        plan_directory: The plan's files.
        work: Temporary directory of this machine.
        launcher: Command of the launcher; by default the plan's.
        place: This machine's place among several.
        check_nodes: Whether to compare several machines first.
        **waiting: Further arguments of `launch_ranks`.

    Raises:
        LaunchFailedError: a rank failed, or the machines cannot run the plan together.
        ShardwrightError: as `compile_operators`.
    """
    layout = plan.chosen.layout
    if layout.engine == "deepspeed" and plan.hardware.gpu == "CPU":
        compile_operators((layout.offload_optimizer, layout.offload_param), plan.job.optimizer)
    if place is not None and check_nodes:
        compare_nodes(plan, plan_directory, place)
    launcher = launcher or launch_arguments(plan, directory=str(plan_directory.absolute()), node=place)
    command = [*launcher, *rank_words(job, work)]
    # torchrun's `--standalone` selects a port itself.
    if place is None and command[0] == "accelerate":
        command[2:2] = ["--main_process_port", str(free_port())]
    launch_ranks(Launch(arguments=python_arguments(command), environment=_accelerators_shown(plan)), **waiting)
    file = work / RESULT_FILE
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return result


def compare_nodes(plan: Plan, plan_directory: Path, place: NodePlace) -> None:
    """Start one process per machine to compare the machines before ranks start.

    Raises:
        LaunchFailedError: they cannot run the plan together; gives the reason.
    """
    meeting = ["--node-rank", str(place.rank), "--master-addr", place.main_address]
    # Another port: the store of the previous run's main machine may still answer on the first one.
    meeting += ["--master-port", str(int(place.main_port) + 1)]
    command = ["torchrun", f"--nnodes={plan.hardware.nodes}", "--nproc-per-node=1", *meeting, "-m", _NODE_CHECK]
    command.append(str(plan_directory.absolute()))
    launch_ranks(Launch(arguments=python_arguments(command), environment=_accelerators_shown(plan)))


def _accelerators_shown(plan: Plan) -> dict[str, str]:
    """Return the variables that show a plan's accelerators, which launches hide by default, and those of the plan."""
    if plan.hardware.gpu == "CPU":
        return {}
    # An allocator that the user configured stays as it is.
    configured = os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    planned = {} if configured else plan.environment
    every = ",".join(str(index) for index in range(plan.hardware.gpus_per_node))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", every)
    return {**planned, "CUDA_VISIBLE_DEVICES": shown, "DS_ACCELERATOR": "cuda"}
