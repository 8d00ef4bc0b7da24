"""Launches of a rehearsal: their progress, and the records of their ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ShardwrightError
from ...plugins.launching.launch import LaunchFailedError
from ...plugins.launching.messages import Message, Progress, log_message
from ..runs.launch import launch_job
from ..runs.settings import RankJob
from .files import Rehearsed

STAGES = {"train": "training", "resume": "resuming from the checkpoint"}
"""The two launches of a rehearsal without a script, and what the log calls them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """Settings that all launches of a rehearsal share."""

    directory: Path
    """Of the plan's files."""
    work: Path
    """Temporary directory of launchers and ranks."""
    ranks: int
    steps: int
    """Optimizer steps."""
    time_limit_seconds: float
    """Hard limit of one launch."""

    def log_progress(self, what: str, done: int = 0) -> None:
        """Log the activity with the optimizer steps of both launches."""
        log_message(Progress(what=what, done=done, total=len(STAGES) * self.steps))


def launch_rehearsal(
    job: RankJob, rehearsed: Rehearsed, settings: LaunchSettings, what: str, *, steps_before: int = 0
) -> None:
    """Run a job on the ranks of a rehearsal.

    `what` describes the job in the log, and `steps_before` counts the optimizer steps of earlier launches.

    Raises:
        ShardwrightError: a rank failed or was killed, or the time limit passed; or an operator cannot be compiled.
    """
    settings.log_progress(f"{what}: starting {settings.ranks} ranks", steps_before)

    def on_message(message: Message) -> None:
        if isinstance(message, Progress):
            settings.log_progress(what, steps_before + message.done)
        else:
            log_message(message)

    work, limit = settings.work, settings.time_limit_seconds
    # The plan's own launcher. Accelerate has none for CPU ranks of MULTI_CPU and other types.
    launcher = ["torchrun", "--standalone", f"--nproc_per_node={settings.ranks}"]
    if rehearsed.accelerate.get("distributed_type") in ("DEEPSPEED", "FSDP", "MULTI_GPU", "NO"):
        launcher = ["accelerate", "launch", "--config_file", str(work / "accelerate.yaml")]
    try:
        launch_job(job, rehearsed.plan, work, work, launcher=launcher, timeout_seconds=limit, on_message=on_message)
    except LaunchFailedError as error:
        stopped = error.launcher_exit_code is None
        hint = f"stopped after {limit:g} s; raise --time-limit if the machine is slow\n" if stopped else ""
        raise ShardwrightError(f"{hint}{error}") from None


def rank_records(work: Path, stage: str, ranks: int) -> list[dict[str, Any]]:
    files = [work / f"{stage}-rank{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
