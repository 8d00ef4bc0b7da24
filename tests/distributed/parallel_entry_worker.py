"""Runs on every rank: the entry point, once for each plan below a directory, in one process group."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from shardwright.plugins.accelerate import forget_last_run
from shardwright.trainers.train_causal_lm import main


def train_all(plans: Path, steps: int) -> None:
    for plan in sorted(path.parent for path in plans.glob("*/plan.json")):
        planned = json.loads((plan / "training_arguments.json").read_text())
        # What `accelerate launch` announces when it is given the plan's accelerate.yaml.
        planned |= {"deepspeed": str(plan / "ds_config.json"), "learning_rate": 5e-3}
        settings = plan / f"arguments-rank{os.environ['RANK']}.json"
        settings.write_text(json.dumps(planned))
        model = json.loads((plan / "plan.json").read_text())["model"]["name"]
        arguments = [
            *("--model", model, "--training-arguments", str(settings), "--seq-len", "64", "--max-steps", str(steps)),
            *("--plan", str(plan), "--output-dir", str(plan / "model"), "--losses-json", str(plan / "losses.json")),
        ]
        assert main(arguments) == 0, plan.name
        forget_last_run()


if __name__ == "__main__":
    train_all(Path(sys.argv[1]), int(sys.argv[2]))
