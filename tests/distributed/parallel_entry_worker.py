"""Runs on every rank: the entry point, under a plan."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from shardwright.trainers.train_causal_lm import main


def train(plan: Path, steps: int) -> None:
    planned = json.loads((plan / "training_arguments.json").read_text())
    # What `accelerate launch` announces when it is given the plan's accelerate.yaml.
    planned |= {"deepspeed": str(plan / "ds_config.json"), "learning_rate": 5e-3}
    settings = plan / f"arguments-rank{os.environ['RANK']}.json"
    settings.write_text(json.dumps(planned))
    model = json.loads((plan / "plan.json").read_text())["model"]["name"]
    arguments = [
        *("--model", model, "--training-arguments", str(settings), "--seq-len", "64", "--max-steps", str(steps)),
        *("--text", "python-help"),
        *("--plan", str(plan), "--output-dir", str(plan / "model"), "--losses-json", str(plan / "losses.json")),
    ]
    assert main(arguments) == 0, plan.name


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
