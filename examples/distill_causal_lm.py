"""Distill a small language model from labels, a teacher's probabilities, and its hidden states.

    python examples/distill_causal_lm.py

Everything is built here: a teacher is trained on the help topics that ship with Python, then three students with the
same weights, data and steps. It runs offline on a CPU in half a minute.
"""

from __future__ import annotations

import tempfile
from typing import Any

from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.sources import pack, read_documents
from shardwright.trainers.distillation import DistillationConfig, DistillationTrainer, HiddenStateTerm
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, default_data_collator, set_seed

VOCAB_SIZE, SEQ_LEN = 384, 64


def model(hidden_size: int, layers: int) -> Any:
    """Return a Llama with random weights."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def train(student: Any, teacher: Any, config: DistillationConfig, samples: Any, steps: int) -> dict[str, float]:
    """Train and return the metrics on the evaluation set."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            max_steps=steps,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = DistillationTrainer(
            model=student,
            teacher=teacher,
            distillation=config,
            args=arguments,
            train_dataset=samples[64:],
            eval_dataset=samples[:64],
            data_collator=default_data_collator,
        )
        trainer.log = lambda *_, **__: None
        trainer.train()
        return trainer.evaluate()


def main() -> None:
    """Print one line for each student."""
    samples = pack(read_documents(None), byte_tokenizer(VOCAB_SIZE), SEQ_LEN)
    teacher = model(hidden_size=96, layers=3)
    train(teacher, None, DistillationConfig(alpha=0.0), samples, steps=250)
    students = {
        "labels alone": DistillationConfig(alpha=1e-9),
        "and probabilities": DistillationConfig(alpha=0.9),
        "and hidden states": DistillationConfig(alpha=0.9, hidden_states=HiddenStateTerm(weight=0.3, kind="cosine")),
    }
    print(f"{'student learns from':20} {'cross-entropy':>13} {'KL to teacher':>13} {'same token':>10}")
    for name, config in students.items():
        found = train(model(hidden_size=48, layers=2), teacher.eval(), config, samples, steps=120)
        entropy, kl = found["eval_student_cross_entropy"], found["eval_kl_per_token"]
        print(f"{name:20} {entropy:13.4f} {kl:13.4f} {found['eval_top1_agreement']:10.1%}")
    print(f"{'the teacher':20} {found['eval_teacher_cross_entropy']:13.4f}")


if __name__ == "__main__":
    main()
