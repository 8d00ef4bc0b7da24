"""Distill a student, quantize it to 4 bits with GPTQ, and evaluate it.

    python examples/distill_then_quantize.py [OUTPUT_DIR]

Everything is built here: a teacher is trained on the help topics that ship with Python, a student learns from it, and
`shardwright.quantize` turns the student into a W4A16 checkpoint that Transformers and vLLM load. It runs offline on a
CPU in under two minutes. All models are evaluated on topics that none of them was trained on.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.sources import pack, read_documents
from shardwright.trainers.distillation import DistillationConfig, DistillationTrainer
from shardwright.trainers.evaluation.evaluate import evaluate_model
from shardwright.trainers.evaluation.measures import TextRequest
from shardwright.trainers.quantization import quantize
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, default_data_collator, set_seed

VOCAB_SIZE, SEQ_LEN = 384, 128
HELD_OUT = 8
"""Every eighth topic is kept for the evaluation."""


def model(hidden_size: int, layers: int) -> Any:
    """Return a Llama with random weights."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LEN,
        initializer_range=0.05,
    )
    return LlamaForCausalLM(config)


def train(student: Any, teacher: Any, config: DistillationConfig, samples: Any, steps: int) -> None:
    """Train a model in place."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            per_device_train_batch_size=8,
            learning_rate=4e-3,
            warmup_steps=min(20, steps),
            adam_beta2=0.95,
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
            train_dataset=samples,
            data_collator=default_data_collator,
        )
        trainer.log = lambda *_, **__: None
        trainer.train()


def main(output: Path | None = None) -> None:
    """Print one line for each model."""
    documents, tokenizer = read_documents(None), byte_tokenizer(VOCAB_SIZE)
    kept = [document for index, document in enumerate(documents) if index % HELD_OUT]
    samples = pack(kept, tokenizer, SEQ_LEN)
    teacher = model(hidden_size=256, layers=2)
    train(teacher, None, DistillationConfig(alpha=0.0), samples, steps=150)
    student = model(hidden_size=128, layers=2)
    train(student, teacher.eval(), DistillationConfig(alpha=0.9), samples, steps=250)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for made, part in ((teacher, "teacher"), (student, "student")):
            made.save_pretrained(directory / part)
            tokenizer.save_pretrained(directory / part)
        (directory / "train.txt").write_text("\n".join(kept), encoding="utf-8")
        (directory / "held_out.txt").write_text("\n".join(documents[::HELD_OUT]), encoding="utf-8")
        quantized = output or directory / "quantized"
        quantize(
            str(directory / "student"),
            quantized,
            scheme="W4A16",
            method="gptq",
            dataset=str(directory / "train.txt"),
            num_samples=64,
            seq_len=SEQ_LEN,
            batch_size=8,
            evaluate=False,
        )
        print(f"{'':20} {'perplexity':>18} {'size in MB':>10} {'same token':>10}")
        text = TextRequest(dataset=str(directory / "held_out.txt"), num_samples=256)
        for part, path in (("teacher", directory / "teacher"), ("student in 4 bit", quantized)):
            found = evaluate_model(str(path), baseline=str(directory / "student"), text=text)
            agreement = f"{found.comparison.top1_agreement.value:10.1%}"
            _show(part, found.model, agreement)
        _show("student", found.baseline, f"{1:10.1%}")


def _show(name: str, found: Any, agreement: str) -> None:
    perplexity = found.perplexity
    bounds = f"{perplexity.value:8.3f} ± {perplexity.standard_error:.3f}"
    print(f"{name:20} {bounds:>18} {found.sizes.file_bytes / 1e6:10.2f} {agreement}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
