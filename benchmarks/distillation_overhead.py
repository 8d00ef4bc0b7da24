"""What `DistillationTrainer` adds to a step: `python benchmarks/distillation_overhead.py [--strict]`.

With α = 0 it must cost what the Trainer of Transformers costs, and lose the same. Steps of both are timed in turns, in
one process, so that whatever else the machine does meets both alike.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median
from typing import Any

import torch
from shardwright.trainers.distillation import DistillationConfig, DistillationTrainer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

STEPS, TURNS, ALLOWED = 20, 6, 1.02
SEQ_LEN, MICRO_BATCH_SIZE, VOCAB_SIZE = 128, 4, 4096


class StepTimes(TrainerCallback):
    """Keeps the seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop it."""
        self.seconds.append(time.perf_counter() - self._began)


def model(hidden_size: int = 128) -> Any:
    """Return a small Llama, always the same."""
    set_seed(0)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
    )
    return LlamaForCausalLM(config)


def run(kind: type[Trainer], directory: str, **more: Any) -> tuple[list[float], list[float]]:
    """Train and return the seconds of the steps, without the first two, and the losses."""
    draw = torch.Generator().manual_seed(1)
    ids_NT = torch.randint(VOCAB_SIZE, (64, SEQ_LEN), generator=draw)
    times = StepTimes()
    arguments = TrainingArguments(
        directory,
        per_device_train_batch_size=MICRO_BATCH_SIZE,
        max_steps=STEPS,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        log_level="error",
    )
    dataset = [{"input_ids": row, "labels": row} for row in ids_NT]
    trainer = kind(model=model(), args=arguments, train_dataset=dataset, callbacks=[times], **more)
    trainer.log = lambda logs, *rest, **named: trainer.state.log_history.append(dict(logs))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return times.seconds[2:], losses


def main() -> int:
    """Print both medians; with `--strict`, return 1 beyond two percent or where losses differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strict", action="store_true", help="exit with 1 when the target is missed")
    strict = parser.parse_args().strict
    without = {"distillation": DistillationConfig(alpha=0.0)}
    seconds: dict[str, list[float]] = {"Trainer": [], "DistillationTrainer": []}
    same = True
    with tempfile.TemporaryDirectory() as directory:
        for turn in range(TURNS):
            pair: list[tuple[type[Trainer], dict[str, Any]]] = [(Trainer, {}), (DistillationTrainer, without)]
            losses = {}
            for kind, more in pair if turn % 2 == 0 else reversed(pair):
                taken, losses[kind.__name__] = run(kind, directory, **more)
                seconds[kind.__name__] += taken
            same = same and losses["Trainer"] == losses["DistillationTrainer"]
    plain, ours = (median(seconds[name]) for name in ("Trainer", "DistillationTrainer"))
    ratio = ours / plain
    print(f"Trainer {1e3 * plain:.2f} ms a step, DistillationTrainer with alpha = 0 {1e3 * ours:.2f} ms: {ratio:.3f}")
    print(f"losses of all {TURNS} pairs of runs are {'identical' if same else 'DIFFERENT'}; allowed is {ALLOWED}")
    return int(strict and (ratio > ALLOWED or not same))


if __name__ == "__main__":
    raise SystemExit(main())
