"""Self-distillation: train an exit after half of the layers, and an adapter that stays close to its base model.

    python examples/distill_self.py

It trains everything on the help topics that ship with Python, offline, on a CPU, in half a minute.
"""

from __future__ import annotations

import tempfile
from typing import Any

from peft import LoraConfig, get_peft_model
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.sources import pack, read_documents
from shardwright.trainers.distillation import DistillationConfig, DistillationTrainer, SelfTeacher
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, default_data_collator, set_seed

VOCAB_SIZE, SEQ_LEN = 384, 64


def model() -> Any:
    """Return a Llama of four layers with random weights."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def train(student: Any, config: DistillationConfig, samples: Any, steps: int, rate: float = 3e-3) -> dict[str, float]:
    """Train and return the metrics on the evaluation set."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            per_device_train_batch_size=16,
            learning_rate=rate,
            max_steps=steps,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = DistillationTrainer(
            model=student,
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
    """Print the results of both kinds of self-distillation."""
    help_topics = read_documents(None)
    tokenizer = byte_tokenizer(VOCAB_SIZE)
    samples = pack(help_topics, tokenizer, SEQ_LEN)
    whole = model()
    exit_config = DistillationConfig(alpha=0.5, self_teacher=SelfTeacher(kind="deeper_exit", exit_layer=2))
    for steps in (40, 160):
        found = train(whole, exit_config, samples, steps)
        print(
            f"exit after 2 of 4 layers, {steps:3} more steps: exit {found['eval_student_cross_entropy']:.3f}, "
            f"output {found['eval_teacher_cross_entropy']:.3f}, same token {found['eval_top1_agreement']:.1%}"
        )
    other = pack([text.upper() for text in help_topics[:12]], tokenizer, SEQ_LEN)
    for name, alpha in (("labels alone", 1e-9), ("held by its base", 0.5)):
        set_seed(1)
        lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = get_peft_model(model_from(whole), lora)
        config = DistillationConfig(alpha=alpha, self_teacher=SelfTeacher(kind="adapter_off"))
        found = train(adapted, config, other, 60)
        print(
            f"adapter on capitals, {name:16}: cross-entropy {found['eval_student_cross_entropy']:.3f}, "
            f"KL from its base {found['eval_kl_per_token']:.3f}"
        )


def model_from(trained: Any) -> Any:
    """Return a copy with the same weights."""
    copied = model()
    copied.load_state_dict(trained.state_dict())
    return copied


if __name__ == "__main__":
    main()
