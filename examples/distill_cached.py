"""Run a teacher once, cache its output, and train a student from the cache without the teacher in memory.

    python examples/distill_cached.py

A teacher is trained on the help topics that ship with Python; the cache stores its 50 most likely bytes at every
position and the probability mass of all others. It runs offline on a CPU in half a minute. `shardwright cache-teacher`
does this for Hub models.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from shardwright.plugins.transformers.teacher_placement import PlacedTeacher
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.sources import pack, read_documents
from shardwright.trainers.distillation import CachedTeacherDataset, DistillationConfig, DistillationTrainer
from shardwright.trainers.distillation.cache.cache_writer import template_hash, tokenizer_hash, write_cache
from shardwright.trainers.distillation.cache.teacher_cache import CacheKey, TeacherCache
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


def train(student: Any, teacher: Any, alpha: float, train_rows: Any, held_out: Any, steps: int) -> Any:
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
            distillation=DistillationConfig(alpha=alpha),
            args=arguments,
            train_dataset=train_rows,
            eval_dataset=held_out,
            data_collator=default_data_collator,
        )
        trainer.log = lambda *_, **__: None
        trainer.train()
        return trainer.evaluate()


def main() -> None:
    """Print the cost of the cache and the results of the students."""
    tokenizer = byte_tokenizer(VOCAB_SIZE)
    packed = pack(read_documents(None), tokenizer, SEQ_LEN)[:2000]
    samples = [{name: ids.tolist() for name, ids in sample.items()} for sample in packed]
    held_out, seen = samples[:64], samples[64:]
    teacher = model(hidden_size=96, layers=3)
    train(teacher, None, 0.0, seen, held_out, steps=250)
    placed = PlacedTeacher(teacher.eval(), teacher, "replica")
    key = CacheKey(
        teacher="teacher",
        weights="trained here",
        tokenizer=tokenizer_hash(tokenizer),
        template=template_hash(tokenizer, used=False),
        vocab_size=VOCAB_SIZE,
        top_k=50,
        temperatures=(1.0,),
    )
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        ids = [sample["input_ids"] for sample in samples]
        write_cache(Path(directory), key, placed, ids, batch_size=32, device="cpu")
        cache = TeacherCache.open(Path(directory), key)
        speed = len(cache) / (time.perf_counter() - began)
        dense = 2 * VOCAB_SIZE
        print(f"{len(cache):,} tokens stored at {speed:,.0f} tokens/s, {key.bytes_per_token} bytes each, not {dense}")
        rows = [CachedTeacherDataset(side, cache) for side in (seen, held_out)]
        cached = train(model(48, 2), cache, 0.9, *rows, steps=120)
    live = train(model(48, 2), placed, 0.9, seen, held_out, steps=120)
    for name, found in (("from the cache", cached), ("from the teacher", live)):
        entropy, kl = found["eval_student_cross_entropy"], found["eval_kl_per_token"]
        print(f"taught {name:17} cross-entropy {entropy:.4f}, KL {kl:.4f}")


if __name__ == "__main__":
    main()
