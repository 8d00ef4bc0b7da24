"""What `trainer_for` adds to a step of the stock Trainer: `python benchmarks/step_overhead.py [--strict]`.

Both train the same batches in turns, in one process, so that other work of the machine meets both alike. A step is the
time from one `on_step_begin` to the next: with batches, counts and the log. Under `torchrun --nproc-per-node 2` both
train under DDP.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from statistics import median
from typing import Any

import torch
from shardwright.ds_configs.specs.layout import Layout
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import training_arguments
from shardwright.trainers.parallel.planned import parallelism_of
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, set_seed

TURNS, STEPS, WARM, ALLOWED = 10, 16, 3, 1.01
SEQ_LEN, MICRO_BATCH_SIZE, VOCAB_SIZE = 256, 4, 4096
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}


class StepTimes(TrainerCallback):
    """Keeps when each step began."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.began.append(time.perf_counter())


def run(directory: str, *, exact: bool) -> tuple[list[float], list[float]]:
    """Train, and return the seconds of the steps after the first ones, and the losses."""
    settings = {"gradient_accumulation_steps": 2, "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no"}
    settings |= {"per_device_train_batch_size": MICRO_BATCH_SIZE, "report_to": "none", "disable_tqdm": True}
    overrides = configure_cpu_ranks("ddp") if RANKS > 1 else {"use_cpu": True}
    arguments = training_arguments({"output_dir": directory, "log_level": "error", **settings}, overrides)
    set_seed(0)
    ids_NT = torch.randint(VOCAB_SIZE, (64, SEQ_LEN))
    times = StepTimes()
    given: dict[str, Any] = {
        "model": LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=VOCAB_SIZE)),
        "args": arguments,
        "train_dataset": [{"input_ids": row, "labels": row} for row in ids_NT],
        "callbacks": [times],
    }
    layout = Layout(engine="ddp", dp_replicate=RANKS) if RANKS > 1 else Layout(engine="single")
    trainer = parallelism_of(layout).make_trainer(**given) if exact else Trainer(**given)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = [after - before for before, after in zip(times.began, times.began[1:], strict=False)]
    return seconds[WARM:], losses


def main() -> int:
    """Print both medians; with `--strict`, return 1 beyond one percent or where losses differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strict", action="store_true", help="exit with 1 when the target is missed")
    strict = parser.parse_args().strict
    seconds: dict[bool, list[float]] = {False: [], True: []}
    losses: dict[bool, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for turn in range(TURNS):
            for exact in (bool(turn % 2), not turn % 2):
                own, losses[exact] = run(directory, exact=exact)
                seconds[exact] += own
    stock, ours = (median(seconds[exact]) for exact in (False, True))
    largest = max(abs(one - other) for one, other in zip(losses[False], losses[True], strict=True))
    if os.environ.get("RANK", "0") == "0":
        print(f"{RANKS} rank(s), {len(seconds[True])} steps each: Trainer {1e3 * stock:.2f} ms, trainer_for ", end="")
        print(f"{1e3 * ours:.2f} ms, ratio {ours / stock:.4f} (target {ALLOWED}), losses differ by {largest:.1e}")
    return int(strict and (ours > ALLOWED * stock or largest > 1e-5))


if __name__ == "__main__":
    raise SystemExit(main())
