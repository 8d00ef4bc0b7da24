"""Your own Trainer script under a plan: the plan's files set the layout, and the script needs no change.

    shardwright plan MODEL --hardware 8xA100-80GB --seq-len 2048 --output-dir plan
    accelerate launch --config_file plan/accelerate.yaml examples/finetune_with_plan.py MODEL plan

`MODEL` is a directory or Hub id with weights and a tokenizer. The same command runs on CPU ranks: plan for `2xCPU`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset
from shardwright.plugins.accelerate import configure_cpu_ranks
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


def main(model_name: str, plan_directory: str) -> None:
    """Fine-tune on a toy text; replace the dataset by yours."""
    plan = Path(plan_directory)
    planned = json.loads((plan / "training_arguments.json").read_text())
    # Nothing happens here on a machine with GPUs.
    on_cpu = configure_cpu_ranks()
    # Arguments come before the model, so that ZeRO-3 can shard it while it is built.
    arguments = TrainingArguments(
        output_dir=str(plan / "run"),
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        **(planned | on_cpu),
    )
    tokenizer = AutoTokenizer.from_pretrained(model_name, trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype="float32", trust_remote_code=False)
    rows = Dataset.from_dict({"text": [TEXT] * 64}).map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=128), remove_columns="text"
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"trained on {arguments.world_size} ranks, loss {result.training_loss:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
