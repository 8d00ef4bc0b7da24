"""Launches of ranks, of a plan or of replicas that share batches; every rank runs `rank_main.py` with a job file."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.rendering import NodePlace, launch_arguments
from ...ds_configs.specs.errors import ConfigError, ShardwrightError
from ...plugins.launching.launch import Launch, at_free_port, launch_ranks, python_arguments
from .settings import JOB_FILE, RankJob

RANK_MODULE = "shardwright.trainers.rank_main"
_NODE_CHECK = "shardwright.plugins.clusters.node_check"

logger = logging.getLogger(__name__)


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
    prepare_operators(operators, notify=logger.info)


def compile_planned_operators(plan: Plan) -> None:
    """Compile the operators of a plan for CPU ranks; raises as `compile_operators`."""
    strategy = plan.chosen.strategy
    if strategy.engine == "deepspeed" and plan.hardware.gpu == "CPU":
        compile_operators((strategy.offload_optimizer, strategy.offload_param), plan.job.optimizer)


def rank_words(job: RankJob, work: Path) -> list[str]:
    """Write the file of a job, and return the launcher's arguments for ranks that run it."""
    file = work / JOB_FILE
    file.write_text(job.model_dump_json(indent=1), encoding="utf-8")
    return ["-m", RANK_MODULE, str(file)]


def planned_launch(words: Sequence[str], plan: Plan, plan_directory: Path, *, place: NodePlace | None = None) -> Launch:
    """Return the launch of `words`, a module or script with its arguments, on the ranks of a plan.

    `place` is this machine's place among several.
    """
    command = [*launch_arguments(plan, directory=str(plan_directory.absolute()), node=place), *words]
    port = None
    if place is None:
        command, port = at_free_port(command)
    return Launch(arguments=python_arguments(command), environment=_accelerators_shown(plan), port=port)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Processes that each load the complete model."""

    processes: int = 1
    """Number on all machines."""
    nodes: int = 1
    """Machines, with equally many processes."""
    place: NodePlace | None = None
    """This machine's place among several; `None` for one machine."""

    @property
    def are_launched(self) -> bool:
        """Whether ranks are started; a single process does the work itself."""
        return self.processes > 1 or self.place is not None

    @property
    def result_is_here(self) -> bool:
        """Whether this machine receives the results."""
        return self.place is None or self.place.is_first

    def errors(self, *, device: str | None = None) -> list[ConfigError]:
        """Return errors for the counts, the machine's place and the requested device."""
        errors = []
        if self.processes < 1:
            errors.append(ConfigError(where="num_processes", value=self.processes, rule="must be at least 1"))
        if self.nodes < 1 or self.processes % self.nodes:
            rule = f"must divide the {self.processes} processes evenly"
            errors.append(ConfigError(where="num_nodes", value=self.nodes, rule=rule))
        if self.place is None and self.nodes > 1:
            rule, fix = "requires --node-rank and --main-address on each machine", "add them, or use --on ssh"
            errors.append(ConfigError(where="num_nodes", value=self.nodes, rule=rule, fix=fix))
        if self.place is not None and not 0 <= int(self.place.rank) < self.nodes:
            rule, fix = f"must be from 0 to {self.nodes - 1}", "pass --num-nodes"
            errors.append(ConfigError(where="node_rank", value=self.place.rank, rule=rule, fix=fix))
        if device is not None and ":" in device and self.are_launched:
            rule = "must not name a single accelerator: each process has its own"
            errors.append(ConfigError(where="device", value=device, rule=rule, fix=f"pass {device.partition(':')[0]}"))
        if errors or device == "cpu" or not self.are_launched:
            return errors
        import torch

        # Without accelerators, processes run on the CPU.
        here, needed = torch.cuda.device_count(), self.processes // self.nodes
        if needed > here and (here > 0 or device is not None):
            rule, fix = f"exceeds the {here} accelerators of this machine", f"at most {here}, or --device cpu"
            errors.append(ConfigError(where="processes of a machine", value=needed, rule=rule, fix=fix))
        return errors

    def launch(self, words: Sequence[str], *, on_cpu: bool) -> Launch:
        """Return the launch of this machine's processes."""
        local = self.processes // self.nodes
        meeting = ["--standalone"]
        if self.place is not None:
            meeting = [f"--nnodes={self.nodes}", "--node-rank", str(self.place.rank)]
            meeting += ["--master-addr", self.place.main_address, "--master-port", str(self.place.main_port)]
        command = ["torchrun", *meeting, f"--nproc-per-node={local}", *words]
        threads = max(1, (os.cpu_count() or 1) // local)
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads)}
        if not on_cpu:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(local))))
            environment |= {"CUDA_VISIBLE_DEVICES": shown, "DS_ACCELERATOR": "cuda"}
        return Launch(arguments=python_arguments(command), environment=environment)


ONE_PROCESS = Replicas()


def run_replicas(replicas: Replicas, job: RankJob, work: Path, *, on_cpu: bool) -> None:
    """Start the processes and wait for their end; what they log is logged here.

    Args:
        replicas: How many, and where.
        job: Of every process.
        work: Directory for the job's file and for the results of the first rank.
        on_cpu: Whether to hide accelerators from the processes.

    Raises:
        LaunchFailedError: a rank failed; names the rank and its error.
    """
    launch_ranks(replicas.launch(rank_words(job, work), on_cpu=on_cpu))
