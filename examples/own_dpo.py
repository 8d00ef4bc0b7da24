"""A plain script with TRL's `DPOTrainer` on pairs of answers, which reads only one file of the plan.

shardwright plan MODEL --task dpo --hardware 8xA100-80GB --seq-len 2048 --output-dir plan
shardwright launch plan examples/own_dpo.py MODEL plan/training_arguments.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

# Under FSDP2 ranks but the first load no weights and get the first one's, which TRL 1.16.0 forgets for the reference.
os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
planned = json.loads(Path(sys.argv[2]).read_text())
rows = [{"prompt": f"{n} and {n} is ", "chosen": f"{2 * n}.", "rejected": f"{2 * n + 1}?"} for n in range(64)]
settings = {"max_steps": 3, "max_length": 64, "save_strategy": "no", "report_to": "none", "dataset_num_proc": None}
arguments = DPOConfig("out", model_init_kwargs={"dtype": "float32"}, **(settings | planned))
trainer = DPOTrainer(model=sys.argv[1], args=arguments, train_dataset=Dataset.from_list(rows))
result = trainer.train()
if trainer.accelerator.is_main_process:
    print(f"trained on {arguments.world_size} ranks, loss {result.training_loss:.6f}")
