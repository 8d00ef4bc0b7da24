"""Quantization-aware training to 2 bits with the stock Trainer, one callback and one export.

    python examples/qat.py [OUTPUT_DIR]

A small Llama learns the help topics that ship with Python. Then it is tuned twice for as many steps: in full precision
and rounded afterwards, and with rounded weights. The second is written as it was trained, bit for bit, in the format
that Transformers and vLLM load. It runs offline on a CPU in about a minute; all models are judged on topics that none
of them was trained on.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers import QATCallback
from shardwright.trainers.data.sources import pack, read_documents
from shardwright.trainers.evaluation.evaluate import evaluate_model
from shardwright.trainers.evaluation.measures import TextRequest
from shardwright.trainers.quantization import quantize
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed

VOCAB_SIZE, SEQ_LEN = 384, 128
SCHEME = "W2A16"
HELD_OUT = 8
"""Every eighth topic is kept for the evaluation."""


def model() -> Any:
    """Return a Llama with random weights; groups of 128 divide its matrices."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LEN,
        initializer_range=0.05,
    )
    return LlamaForCausalLM(config)


def train(learner: Any, samples: Any, steps: int, rate: float, callback: QATCallback | None = None) -> Trainer:
    """Train a model in place and return its Trainer."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            per_device_train_batch_size=8,
            learning_rate=rate,
            warmup_steps=min(20, steps // 2),
            adam_beta2=0.95,
            max_steps=steps,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            model=learner,
            args=arguments,
            train_dataset=samples,
            data_collator=default_data_collator,
            callbacks=[callback] if callback else [],
        )
        trainer.log = lambda *_, **__: None
        trainer.train()
    return trainer


def output_directory() -> Path | None:
    """Return where the command line wants the trained model, or end with what is wrong with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", nargs="?", type=Path, help="new or empty directory; default: nothing is kept")
    output: Path | None = parser.parse_args().output_dir
    if output is not None and output.exists() and not (output.is_dir() and not any(output.iterdir())):
        parser.error(f"{output} is not an empty directory: pass another one")
    return output


def main(output: Path | None = None) -> None:
    """Print one line for each model."""
    documents, tokenizer = read_documents(None), byte_tokenizer(VOCAB_SIZE)
    samples = pack([text for index, text in enumerate(documents) if index % HELD_OUT], tokenizer, SEQ_LEN)
    learner = model()
    train(learner, samples, steps=80, rate=4e-3)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "held_out.txt").write_text("\n".join(documents[::HELD_OUT]), encoding="utf-8")
        tuned = copy.deepcopy(learner)
        train(tuned, samples, steps=80, rate=2e-3)
        tuned.save_pretrained(directory / "tuned")
        tokenizer.save_pretrained(directory / "tuned")
        quantize(str(directory / "tuned"), directory / "rounded", scheme=SCHEME, method="rtn", evaluate=False)

        callback = QATCallback(SCHEME)
        trainer = train(learner, samples, steps=80, rate=2e-3, callback=callback)
        trained = output or directory / "trained"
        found = callback.export(trainer, trained, tokenizer=tokenizer)

        print(f"{'':28} {'perplexity':>18} {'size in MB':>10}")
        text = TextRequest(dataset=str(directory / "held_out.txt"), num_samples=256)
        for part, path in (
            ("tuned, full precision", directory / "tuned"),
            ("tuned, then rounded", directory / "rounded"),
            ("trained with 2-bit weights", trained),
        ):
            judged = evaluate_model(str(path), text=text).model
            bounds = f"{judged.perplexity.value:8.3f} ± {judged.perplexity.standard_error:.3f}"
            print(f"{part:28} {bounds:>18} {judged.sizes.file_bytes / 1e6:10.2f}")
        print(
            f"exported and trained model differ by {found.largest_weight_difference} in weights "
            f"and {found.largest_logit_difference} in logits"
        )


if __name__ == "__main__":
    main(output_directory())
