"""Entry point of every rank: runs a job from a file.

accelerate launch --config_file plan/accelerate.yaml -m shardwright.trainers.rank_main job.json
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ..ds_configs.specs.errors import ShardwrightError
from ..plugins.bitsandbytes import quiet_optional_kernels
from ..plugins.launching.elastic import recorded
from ..plugins.launching.messages import LAUNCH_TOKEN, forwarded_logs
from .guards import watched
from .runs.settings import RankTask

TASKS = {
    "train": ".training.rank:TrainTask",
    "distill": ".distillation.command:DistillTask",
    "qat": ".qat.command:QATTask",
    "rehearse": ".rehearsal.worker:RehearsalTask",
    "rehearse-script": ".rehearsal.worker:RehearsedScriptTask",
    "tune": ".tuning:TrialTask",
    "script": ".training.rank:ScriptTask",
}
"""Module and class of each task."""


def read_task(file: Path) -> RankTask:
    text = file.read_text(encoding="utf-8")
    module, _, name = TASKS[json.loads(text)["task"]].partition(":")
    kind: type[RankTask] = getattr(import_module(module, __package__), name)
    return kind.model_validate_json(text)


def main(words: Sequence[str] | None = None) -> int:
    """Run one rank, record a failure for its launcher, and return the exit code."""
    file = Path((sys.argv[1:] if words is None else words)[0])

    @recorded
    def run() -> None:
        task = read_task(file)
        quiet_optional_kernels()
        with forwarded_logs(), watched(task.hang_seconds):
            task.run(file.parent)

    try:
        run()
    except ShardwrightError as error:
        if os.environ.get("SHARDWRIGHT_DEBUG") == "1":
            raise
        if LAUNCH_TOKEN not in os.environ:
            # Otherwise it is recorded, and the launcher prints the error of the rank that failed first.
            print(f"rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception:
        if LAUNCH_TOKEN not in os.environ or os.environ.get("SHARDWRIGHT_DEBUG") == "1":
            raise
        # Recorded too, with its traceback.
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
