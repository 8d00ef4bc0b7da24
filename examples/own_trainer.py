"""A plain script with the Trainer, which reads its arguments from a file of the plan.

    shardwright plan MODEL --hardware 8xA100-80GB --seq-len 2048 --output-dir plan
    shardwright launch plan examples/own_trainer.py MODEL plan/training_arguments.json

`MODEL` is a directory or Hub id with weights. On GPUs, `accelerate launch --config_file plan/accelerate.yaml` works.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

planned = json.loads(Path(sys.argv[2]).read_text())
# Arguments come before the model, so that ZeRO-3 can shard it while it is built.
arguments = TrainingArguments("out", max_steps=3, logging_steps=1, save_strategy="no", report_to="none", **planned)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
tokens = list(range(2, 34))
rows = [{"input_ids": tokens, "labels": tokens}] * 64
trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=default_data_collator)
result = trainer.train()
if trainer.is_world_process_zero():
    print(f"trained on {arguments.world_size} ranks, loss {result.training_loss:.6f}")
