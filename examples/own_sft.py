"""A plain script with TRL's `SFTTrainer` on conversations, which reads only one file of the plan.

shardwright plan MODEL --hardware 8xA100-80GB --seq-len 2048 --output-dir plan
shardwright launch plan examples/own_sft.py MODEL plan/training_arguments.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

planned = json.loads(Path(sys.argv[2]).read_text())
rows = [{"prompt": f"{n} and {n} is ", "completion": f"{2 * n}."} for n in range(64)]
settings = {"max_steps": 3, "max_length": 64, "save_strategy": "no", "report_to": "none", "dataset_num_proc": None}
arguments = SFTConfig("out", model_init_kwargs={"dtype": "float32"}, **settings, **planned)
trainer = SFTTrainer(model=sys.argv[1], args=arguments, train_dataset=Dataset.from_list(rows))
result = trainer.train()
if trainer.accelerator.is_main_process:
    print(f"trained on {arguments.world_size} ranks, loss {result.training_loss:.6f}")
