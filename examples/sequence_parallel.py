"""Sequence parallelism with the stock Trainer and one callback: the ranks of a group share each sequence.

    torchrun --nproc-per-node 2 examples/sequence_parallel.py OUTPUT_DIR

It runs offline on two CPU ranks in a few seconds, and the same command trains on GPUs. With more ranks than two, groups
of two read different sequences.
"""

from __future__ import annotations

import sys
from typing import Any

from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers import SequenceParallelCallback
from shardwright.trainers.data.sources import pack, read_documents
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

VOCAB_SIZE, SEQ_LEN = 384, 64
SEQUENCE_PARALLEL_SIZE = 2
DEEPSPEED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 1},
}


def small_model() -> Any:
    """Return a Llama whose heads two ranks can share with random weights."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.05,
    )
    return LlamaForCausalLM(config)


def main(output: str) -> None:
    """Train on the help topics that ship with Python, save, and load what was saved."""
    # Nothing happens here on a machine with GPUs.
    on_cpu = configure_cpu_ranks("deepspeed")
    arguments = TrainingArguments(
        output,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        learning_rate=5e-3,
        max_steps=8,
        logging_steps=1,
        optim="adamw_torch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        deepspeed=DEEPSPEED,
        **on_cpu,
    )
    model = small_model()
    samples = pack(read_documents(None), byte_tokenizer(VOCAB_SIZE), SEQ_LEN)[:512]
    callback = SequenceParallelCallback(SEQUENCE_PARALLEL_SIZE)
    callback.prepare(arguments, model)
    trainer = Trainer(model=model, args=arguments, train_dataset=samples, data_collator=default_data_collator)
    callback.attach(trainer)
    trainer.train()
    trainer.save_model(output)
    if arguments.process_index == 0:
        first, *_, last = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        print(f"loss {first:.3f} to {last:.3f} on {arguments.world_size} ranks, {SEQUENCE_PARALLEL_SIZE} to a sequence")
        loaded = AutoModelForCausalLM.from_pretrained(output)
        loss = loaded(**default_data_collator(samples[:8])).loss.item()
        print(f"the checkpoint loads in plain Transformers, loss {loss:.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
