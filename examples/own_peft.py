"""A plain script with PEFT and the Trainer, under a plan for LoRA.

shardwright plan MODEL --hardware 2xRTX4090 --method lora --output-dir plan
shardwright launch plan examples/own_peft.py MODEL plan/training_arguments.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed

planned = json.loads(Path(sys.argv[2]).read_text())
settings = {"max_steps": 3, "learning_rate": 5e-3, "save_strategy": "no", "report_to": "none"}
arguments = TrainingArguments("out", **settings, **planned)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
set_seed(0)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
tokens = list(range(2, 34))
rows = [{"input_ids": tokens, "labels": tokens}] * 64
trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=default_data_collator)
result = trainer.train()
if trainer.is_world_process_zero():
    print(f"trained on {arguments.world_size} ranks, loss {result.training_loss:.6f}")
