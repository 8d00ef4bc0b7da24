"""Starts the launchers of a rehearsal, follows their steps, and says which rank ended a launch and why."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ShardwrightError
from ...plugins.deepspeed.compiled_operators import needed_operators, prepare_operators
from ...plugins.launching.launch import (
    Launch,
    LaunchFailedError,
    first_traceback,
    free_port,
    python_arguments,
    run_together,
)
from .files import Rehearsed
from .worker import PROGRESS

STAGES = ("train", "resume")
_WORKER = f"{__package__}.worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a rehearsal is."""

    message: str
    """What is being done now."""
    done: int
    """Optimizer steps of both launches that are done."""
    total: int
    """Optimizer steps of both launches."""


Notify = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """What all launches of a rehearsal share."""

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
    tell: Notify
    """Receives progress."""


def prepare_launch(rehearsed: Rehearsed, settings: LaunchSettings) -> None:
    """Compile the operators that the layout needs, so that the launches' time limits do not pay for it.

    Raises:
        ShardwrightError: one cannot be compiled, or a killed compilation left its lock.
    """
    if rehearsed.accelerate.get("distributed_type") != "DEEPSPEED":
        return
    devices = rehearsed.offload_device("optimizer"), rehearsed.offload_device("param")
    if "nvme" in devices:
        _require_libaio()
    optimizer = str(rehearsed.worker.training_arguments.get("optim", "adamw_torch_fused"))
    operators = needed_operators(offload_optimizer=devices[0] != "none", nvme="nvme" in devices, optimizer=optimizer)
    prepare_operators(operators, notify=lambda text: settings.tell(progress(text, settings, 0)))


def _require_libaio() -> None:
    from ...plugins.deepspeed.engine import has_libaio

    if not has_libaio():
        raise ShardwrightError(
            "NVMe offload compiles async_io, which needs the header of libaio: install libaio-dev (Debian) or "
            "libaio-devel, or plan with --offload cpu"
        )


def launch_stage(stage: str, rehearsed: Rehearsed, settings: LaunchSettings) -> None:
    """Start one launcher for each node and wait for all.

    Raises:
        ShardwrightError: a rank failed, was killed, or the time limit passed; says which and why.
    """
    offset = STAGES.index(stage) * settings.steps
    message = {"train": "training", "resume": "resuming from the checkpoint"}[stage]
    settings.tell(progress(f"{message}: starting {settings.ranks} ranks", settings, offset))

    def on_line(line: str) -> None:
        if line.startswith(PROGRESS):
            # Ranks share one output: another may have written into the line.
            with contextlib.suppress(ValueError):
                step = int(json.loads(line.removeprefix(PROGRESS))["step"])
                settings.tell(progress(message, settings, offset + step))

    port = free_port()
    launches = [
        Launch(
            arguments=python_arguments(launcher_command(rehearsed, settings.work, stage, node, settings.nodes, port)),
            port=port,
        )
        for node in range(settings.nodes)
    ]
    try:
        run_together(launches, timeout_seconds=settings.time_limit_seconds, on_line=on_line)
    except LaunchFailedError as error:
        raise ShardwrightError(_cause(stage, error, settings)) from None


def launcher_command(rehearsed: Rehearsed, work: Path, stage: str, node: int, nodes: int, port: int) -> list[str]:
    """Return the command of one node: the plan's launcher with the rehearsal's file, and the worker as its module.

    Accelerate starts a single process for MULTI_CPU and other types that it has no launcher for on a CPU.
    """
    config = rehearsed.accelerate
    ranks = int(config.get("num_processes", 1))
    worker = ["-m", _WORKER, str(work), stage]
    if config.get("distributed_type") in ("DEEPSPEED", "FSDP", "MULTI_GPU", "NO"):
        command = ["accelerate", "launch", "--config_file", str(work / "accelerate.yaml")]
        command += ["--main_process_port", str(port)]
        if nodes > 1:
            command += ["--num_machines", str(nodes), "--num_processes", str(ranks), "--machine_rank", str(node)]
            command += ["--main_process_ip", "127.0.0.1"]
        return [*command, *worker]
    command = ["torchrun", "--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(ranks // nodes)]
    return [*command, "--master-addr", "127.0.0.1", "--master-port", str(port), *worker]


def _cause(stage: str, error: LaunchFailedError, settings: LaunchSettings) -> str:
    """Say what ended a launch: the rank that a signal killed, else the rank that failed first."""
    if error.dead_ranks:
        dead = ", ".join(f"rank {rank} was killed by {name}" for rank, name in error.dead_ranks)
        hint = " (the kernel does so when memory runs out)" if "SIGKILL" in dead else ""
        return f"{stage}: {dead}{hint}; the other ranks were ended"
    failures = [json.loads(path.read_text()) for path in settings.work.glob(f"{stage}-failure*.json")]
    if failures:
        first = min(failures, key=lambda failure: float(failure["time"]))
        shown = "" if first["exit_code"] == 2 else f"\n{first['traceback'].rstrip()}"
        return f"{stage}: rank {first['rank']} failed: {first['message']}{shown}"
    if error.launcher_exit_code is None:
        limit = f"{settings.time_limit_seconds:g} s"
        rule = f"{stage}: stopped after {limit}; raise --time-limit if the machine is slow"
        return f"{rule}\n{first_traceback(error.output)}"
    return f"{stage}: {error}"


def progress(message: str, settings: LaunchSettings, done: int) -> Progress:
    """Return a step of the rehearsal's two launches."""
    return Progress(message=message, done=done, total=len(STAGES) * settings.steps)


def rank_records(work: Path, stage: str, ranks: int) -> list[dict[str, Any]]:
    """Return what the ranks wrote after a stage, in their order."""
    files = [work / f"{stage}-rank{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
