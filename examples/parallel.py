"""Parallelism of one axis: two ranks share each sequence, the experts, each matrix or the layers (a pipeline).

    torchrun --nproc-per-node 2 examples/parallel.py tensor OUTPUT_DIR

It runs offline on two CPU ranks in a few seconds, and the same command trains on GPUs. With more ranks than two, groups
of two read different sequences. The checkpoint is a complete model. Micro-batches fill a pipeline: with `p` stages and
`m` of them `(p - 1) / (m + p - 1)` of the time is idle.
"""

from __future__ import annotations

import argparse
from typing import Any

from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers import (
    ExpertParallelCallback,
    PipelineTrainer,
    SequenceParallelCallback,
    TensorParallelCallback,
)
from shardwright.trainers.data.sources import pack, read_documents
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

VOCAB_SIZE, SEQ_LEN = 384, 64
SIZE = 2
CALLBACKS = {"sequence": SequenceParallelCallback, "expert": ExpertParallelCallback, "tensor": TensorParallelCallback}
ZERO_STAGES = {"sequence": 1, "expert": 2, "tensor": 1, "pipeline": 0}


def small_model(axis: str) -> Any:
    """Return a Llama, or a Mixtral of four experts, with random weights."""
    set_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if axis == "expert" else {}
    config = AutoConfig.for_model(
        "mixtral" if experts else "llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.05,
        **experts,
    )
    return AutoModelForCausalLM.from_config(config)


def main(axis: str, output: str) -> None:
    """Train on the help topics that ship with Python, save, and load what was saved."""
    # Nothing happens here on a machine with GPUs.
    on_cpu = configure_cpu_ranks("deepspeed")
    arguments = TrainingArguments(
        output,
        # The ranks of a group read the same sequences; ranks with different experts do not.
        per_device_train_batch_size={"expert": 4, "pipeline": 2}.get(axis, 8),
        gradient_accumulation_steps=4 if axis == "pipeline" else 1,
        learning_rate=5e-3,
        max_steps=8,
        logging_steps=1,
        optim="adamw_torch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        deepspeed={
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": ZERO_STAGES[axis]},
        },
        **on_cpu,
    )
    model = small_model(axis)
    samples = pack(read_documents(None), byte_tokenizer(VOCAB_SIZE), SEQ_LEN)[:512]
    training = {"args": arguments, "train_dataset": samples, "data_collator": default_data_collator}
    if axis == "pipeline":
        trainer = PipelineTrainer(model=model, pipeline_stages=SIZE, **training)
    else:
        make_callback = CALLBACKS[axis]
        callback = make_callback(SIZE)
        callback.prepare(arguments, model)  # before the Trainer: checks, and the section of DeepSpeed's configuration
        trainer = Trainer(model=model, **training)
        callback.attach(trainer)
    trainer.train()
    trainer.save_model(output)
    if arguments.process_index == 0:
        first, *_, last = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        print(f"loss {first:.3f} to {last:.3f} on {arguments.world_size} ranks, {axis} parallelism of {SIZE}")
        loaded = AutoModelForCausalLM.from_pretrained(output)
        loss = loaded(**default_data_collator(samples[:8])).loss.item()
        print(f"the checkpoint loads in plain Transformers, loss {loss:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axis", choices=ZERO_STAGES)
    parser.add_argument("output_dir")
    words = parser.parse_args()
    main(words.axis, words.output_dir)
