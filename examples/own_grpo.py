"""A plain script with TRL's `GRPOTrainer` and a reward that is computed, which reads only one file of the plan.

shardwright plan MODEL --task grpo --hardware 8xA100-80GB --seq-len 2048 --output-dir plan
shardwright launch plan examples/own_grpo.py MODEL plan/training_arguments.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def digits(completions: list[str], **columns: list[object]) -> list[float]:
    """Return the share of digits in each completion."""
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]


planned = json.loads(Path(sys.argv[2]).read_text())
rows = [{"prompt": f"{n} and {n} is "} for n in range(64)]
settings = {"max_steps": 3, "save_strategy": "no", "report_to": "none"}
arguments = GRPOConfig("out", model_init_kwargs={"dtype": "float32"}, **(settings | planned))
trainer = GRPOTrainer(model=sys.argv[1], reward_funcs=digits, args=arguments, train_dataset=Dataset.from_list(rows))
result = trainer.train()
if trainer.accelerator.is_main_process:
    print(f"trained on {arguments.world_size} ranks, loss {result.training_loss:.6f}")
