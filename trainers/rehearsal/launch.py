"""Start the launchers of a rehearsal, log their progress, and report the rank that failed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ShardwrightError
from ...plugins.launching.launch import Launch, LaunchFailedError, free_port, launch_ranks, python_arguments
from ...plugins.launching.messages import Message, Progress, log_message
from ..runs.launch import compile_operators, rank_words
from ..runs.settings import RankJob
from .files import Rehearsed

STAGES = ("train", "resume")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """Settings that all launches of a rehearsal share."""

    directory: Path
    """Of the plan's files."""
    work: Path
    """Temporary directory of launchers and ranks."""
    ranks: int
    """CPU ranks of all launchers."""
    nodes: int
    """Launchers, one for each node."""
    steps: int
    """Optimizer steps."""
    time_limit_seconds: float
    """Hard limit of one launch."""

    def log_progress(self, what: str, done: int = 0) -> None:
        """Log the activity with the optimizer steps of both launches."""
        log_message(Progress(what=what, done=done, total=len(STAGES) * self.steps))


def prepare_launch(rehearsed: Rehearsed) -> None:
    """Compile the operators that the layout needs before the launches with their time limits.

    Raises:
        ShardwrightError: a compilation fails, or a killed compilation left its lock.
    """
    if rehearsed.accelerate.get("distributed_type") == "DEEPSPEED":
        devices = rehearsed.offload_device("optimizer"), rehearsed.offload_device("param")
        compile_operators(devices, str(rehearsed.worker.training_arguments.get("optim", "adamw_torch_fused")))


def launch_stage(stage: str, rehearsed: Rehearsed, settings: LaunchSettings) -> None:
    """Launch one of the two stages; raises as `launch_job`."""
    what = {"train": "training", "resume": "resuming from the checkpoint"}[stage]
    job = rehearsed.worker.model_copy(update={"stage": stage})
    try:
        launch_job(job, rehearsed, settings, what, steps_before=STAGES.index(stage) * settings.steps)
    except ShardwrightError as error:
        raise ShardwrightError(f"{stage}: {error}") from None


def launch_job(
    job: RankJob, rehearsed: Rehearsed, settings: LaunchSettings, what: str, *, steps_before: int = 0
) -> None:
    """Start one launcher for each node, whose ranks run a job, and wait for all.

    `what` describes the job in the log, and `steps_before` counts the optimizer steps of earlier launches.

    Raises:
        ShardwrightError: a rank failed or was killed, or the time limit passed.
    """
    settings.log_progress(f"{what}: starting {settings.ranks} ranks", steps_before)

    def on_message(message: Message) -> None:
        if isinstance(message, Progress):
            settings.log_progress(what, steps_before + message.done)
        else:
            log_message(message)

    words, port = rank_words(job, settings.work), free_port()
    commands = [
        launcher_command(rehearsed, settings.work, words, node, settings.nodes, port) for node in range(settings.nodes)
    ]
    launches = [Launch(arguments=python_arguments(command)) for command in commands]
    try:
        launch_ranks(*launches, timeout_seconds=settings.time_limit_seconds, on_message=on_message)
    except LaunchFailedError as error:
        stopped = error.launcher_exit_code is None
        hint = f"stopped after {settings.time_limit_seconds:g} s; raise --time-limit if the machine is slow\n"
        raise ShardwrightError(f"{hint if stopped else ''}{error}") from None


def launcher_command(
    rehearsed: Rehearsed, work: Path, words: Sequence[str], node: int, nodes: int, port: int
) -> list[str]:
    """Return the command of one node: the plan's launcher with the rehearsal's files, and a job's `rank_words`.

    Accelerate starts a single process for MULTI_CPU and other types without a launcher for CPUs.
    """
    config = rehearsed.accelerate
    ranks = int(config.get("num_processes", 1))
    if config.get("distributed_type") in ("DEEPSPEED", "FSDP", "MULTI_GPU", "NO"):
        command = ["accelerate", "launch", "--config_file", str(work / "accelerate.yaml")]
        command += ["--main_process_port", str(port)]
        if nodes > 1:
            command += ["--num_machines", str(nodes), "--num_processes", str(ranks), "--machine_rank", str(node)]
            command += ["--main_process_ip", "127.0.0.1"]
        return [*command, *words]
    command = ["torchrun", "--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(ranks // nodes)]
    return [*command, "--master-addr", "127.0.0.1", "--master-port", str(port), *words]


def rank_records(work: Path, stage: str, ranks: int) -> list[dict[str, Any]]:
    """Return the records of the ranks after a stage, in order."""
    files = [work / f"{stage}-rank{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
