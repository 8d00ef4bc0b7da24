"""Starts the launchers of a rehearsal, follows their steps, and says which rank ended a launch and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ShardwrightError
from ...plugins.launching.launch import Launch, LaunchFailedError, free_port, python_arguments
from ...plugins.launching.notes import Notify, OnProgress
from ..runs.launch import compile_operators, run_launches, write_job
from ..runs.progress import OnStep
from ..runs.settings import RankJob
from .files import Rehearsed

STAGES = ("train", "resume")
_WORKER = f"{__package__}.worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """Settings that all launches of a rehearsal share."""

    directory: Path
    """Where the plan's files lie."""
    work: Path
    """Where the launchers and ranks read and write; ends with the rehearsal."""
    ranks: int
    """CPU ranks of all launchers."""
    nodes: int
    """Launchers, one for each node."""
    steps: int
    """Optimizer steps."""
    text: bytes | None
    """What to train on; `None` for synthetic tokens."""
    time_limit_seconds: float
    """Hard limit of one launch."""
    notify: Notify
    """Receives remarks."""
    on_progress: OnProgress
    """Receives what is done, and the optimizer steps of both launches, done and in all."""

    def tell(self, message: str, done: int = 0) -> None:
        """Pass on how far the rehearsal is."""
        self.on_progress(message, done, len(STAGES) * self.steps)


def prepare_launch(rehearsed: Rehearsed, settings: LaunchSettings) -> None:
    """Compile the operators that the layout needs, so that the launches' time limits do not pay for it.

    Raises:
        ShardwrightError: one cannot be compiled, or a killed compilation left its lock.
    """
    if rehearsed.accelerate.get("distributed_type") != "DEEPSPEED":
        return
    devices = rehearsed.offload_device("optimizer"), rehearsed.offload_device("param")
    optimizer = str(rehearsed.worker.training_arguments.get("optim", "adamw_torch_fused"))
    compile_operators(devices, optimizer, settings.notify)


def launch_stage(stage: str, rehearsed: Rehearsed, settings: LaunchSettings) -> None:
    """Start one launcher for each node and wait for all.

    Raises:
        ShardwrightError: a rank failed, was killed, or the time limit passed; says which and why.
    """
    offset = STAGES.index(stage) * settings.steps
    message = {"train": "training", "resume": "resuming from the checkpoint"}[stage]
    settings.tell(f"{message}: starting {settings.ranks} ranks", offset)

    job = rehearsed.worker.model_copy(update={"stage": stage, "text_tokens": settings.text is not None})
    try:
        launch_worker(_WORKER, job, rehearsed, settings, lambda step, *_: settings.tell(message, offset + step))
    except ShardwrightError as error:
        raise ShardwrightError(f"{stage}: {error}") from None


def launch_worker(module: str, job: RankJob, rehearsed: Rehearsed, settings: LaunchSettings, on_step: OnStep) -> None:
    """Start one launcher for each node, whose ranks run a module with a job, and wait for all.

    Raises:
        ShardwrightError: a rank failed, was killed, or the time limit passed; says which and why.
    """
    file, port = write_job(job, settings.work), free_port()
    worker = ["-m", module, file]
    commands = [
        launcher_command(rehearsed, settings.work, worker, node, settings.nodes, port) for node in range(settings.nodes)
    ]
    launches = [Launch(arguments=python_arguments(command), port=port) for command in commands]
    try:
        run_launches(launches, on_step, notify=settings.notify, timeout_seconds=settings.time_limit_seconds)
    except LaunchFailedError as error:
        stopped = error.launcher_exit_code is None
        hint = f"stopped after {settings.time_limit_seconds:g} s; raise --time-limit if the machine is slow\n"
        raise ShardwrightError(f"{hint if stopped else ''}{error}") from None


def launcher_command(
    rehearsed: Rehearsed, work: Path, worker: Sequence[str], node: int, nodes: int, port: int
) -> list[str]:
    """Return the command of one node: the plan's launcher with the rehearsal's file, and a worker as its module.

    Accelerate starts a single process for MULTI_CPU and other types that it has no launcher for on a CPU.
    """
    config = rehearsed.accelerate
    ranks = int(config.get("num_processes", 1))
    if config.get("distributed_type") in ("DEEPSPEED", "FSDP", "MULTI_GPU", "NO"):
        command = ["accelerate", "launch", "--config_file", str(work / "accelerate.yaml")]
        command += ["--main_process_port", str(port)]
        if nodes > 1:
            command += ["--num_machines", str(nodes), "--num_processes", str(ranks), "--machine_rank", str(node)]
            command += ["--main_process_ip", "127.0.0.1"]
        return [*command, *worker]
    command = ["torchrun", "--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(ranks // nodes)]
    return [*command, "--master-addr", "127.0.0.1", "--master-port", str(port), *worker]


def rank_records(work: Path, stage: str, ranks: int) -> list[dict[str, Any]]:
    """Return what the ranks wrote after a stage, in their order."""
    files = [work / f"{stage}-rank{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
