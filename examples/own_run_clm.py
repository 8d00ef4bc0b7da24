"""A script in the style of Transformers' `run_clm.py`: every setting is a flag.

    shardwright plan MODEL --hardware 8xA100-80GB --seq-len 2048 --output-dir plan
    shardwright launch plan examples/own_run_clm.py --model_name_or_path MODEL --train_file notes.txt \\
        --block_size 2048 --output_dir out @plan

`shardwright launch` replaces `@plan` by the plan's `TrainingArguments` as flags.
"""

from __future__ import annotations

from dataclasses import dataclass

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)


@dataclass
class ModelArguments:
    """Where the model comes from."""

    model_name_or_path: str


@dataclass
class DataArguments:
    """What it is trained on."""

    train_file: str
    block_size: int = 1024


model_arguments, data_arguments, arguments = HfArgumentParser(
    (ModelArguments, DataArguments, TrainingArguments)
).parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained(model_arguments.model_name_or_path)
model = AutoModelForCausalLM.from_pretrained(model_arguments.model_name_or_path, dtype="float32")


def blocks(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    """Join the lines of a batch and cut them into blocks of one length."""
    tokens = [token for line in rows["text"] for token in tokenizer(line + "\n")["input_ids"]]
    size = data_arguments.block_size
    cut = [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]
    return {"input_ids": cut, "labels": [list(block) for block in cut]}


with arguments.main_process_first():
    lines = load_dataset("text", data_files=data_arguments.train_file, split="train")
    samples = lines.map(blocks, batched=True, remove_columns="text")
trainer = Trainer(model=model, args=arguments, train_dataset=samples, data_collator=default_data_collator)
result = trainer.train()
if trainer.is_world_process_zero():
    print(f"trained on {arguments.world_size} ranks, loss {result.training_loss:.6f}")
