"""Cost of complete checkpoints and of the guard: `python benchmarks/checkpoint_overhead.py [--write]`.

Two CPU ranks train a Llama of 29 million parameters under DDP. Saves of 350 MB take turns: as the Trainer leaves them,
made whole while the training waits, and made whole beside it. A turn is a save and the steps after it, so that what a
thread takes from these steps is counted; what a turn left in the page cache is flushed before the next. Steps take
turns with and without the guard.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

WAYS = ("bare", "waited for", "beside the training")
ROUNDS, STEPS_AFTER, GUARD_STEPS = 10, 4, 160
ALLOWED_OF_SAVE, ALLOWED_OF_STEP = 0.05, 0.01
RESULTS = Path(__file__).parents[1] / "docs" / "measurements" / "reliability.json"


def main() -> int:
    """Launch both ranks and print; with `--strict`, return 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {RESULTS.name}")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="saves of each way")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.rank:
        measure(flags.rank, flags.rounds)
        return 0
    found = launched(flags.rounds)
    print(json.dumps(found, indent=1))
    if flags.write:
        write("overhead", found)
    still, guarded = found["standstill_of_save"]["beside the training"], found["guarded_by_plain"]
    return int(flags.strict and (still > ALLOWED_OF_SAVE or guarded > ALLOWED_OF_STEP))


def launched(rounds: int) -> dict[str, Any]:
    """Return what the first rank measured."""
    from shardwright.plugins.launching.launch import Launch, free_port, launch_ranks, python_arguments

    port = free_port()
    with tempfile.TemporaryDirectory(prefix="checkpoint-overhead-") as directory:
        command = ["torchrun", "--nproc-per-node", "2", "--master-port", str(port), str(Path(__file__).resolve())]
        arguments = python_arguments([*command, "--rank", directory, "--rounds", str(rounds)])
        launch_ranks(Launch(arguments=tuple(arguments), port=port), timeout_seconds=1800)
        found: dict[str, Any] = json.loads((Path(directory) / "found.json").read_text())
    return found


def write(part: str, found: dict[str, Any]) -> None:
    """Keep a part of the figures."""
    results = json.loads(RESULTS.read_text()) | {part: found}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure(directory: Path, rounds: int) -> None:
    """Run on every rank: both parts, of which the first rank leaves the figures."""
    from shardwright.trainers.checkpoints.callback import CheckpointCallback

    trainer = make_trainer(directory / "steps", max_steps=GUARD_STEPS)
    guard = guard_seconds(trainer)
    trainer = make_trainer(directory / "saves", max_steps=rounds * len(WAYS) * (STEPS_AFTER + 1) + STEPS_AFTER)
    saves = Saves(trainer, CheckpointCallback())
    trainer.train()
    if trainer.args.process_index == 0:
        (directory / "found.json").write_text(json.dumps(summary(saves, guard)))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def make_trainer(directory: Path, *, max_steps: int) -> Any:
    """Return a Trainer that saves only on request."""
    from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed

    set_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=8000))
    rows = [{"input_ids": list(range(one, one + 32)), "labels": list(range(one, one + 32))} for one in range(64)]
    settings = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(
        str(directory),
        max_steps=max_steps,
        per_device_train_batch_size=1,
        log_level="error",
        **settings,
        **configure_cpu_ranks("ddp"),
    )
    return Trainer(model=model, args=arguments, train_dataset=rows, data_collator=default_data_collator)


class Saves:
    """Saves by turns, and the seconds of each turn: the save, what the callback adds to it, and all of the turn."""

    def __init__(self, trainer: Any, checkpoints: Any) -> None:
        from transformers import TrainerCallback

        self.save: list[float] = []
        self.standstill: dict[str, list[float]] = {way: [] for way in WAYS}
        self.turn: dict[str, list[float]] = {way: [] for way in WAYS}
        self.megabytes = 0.0
        output = Path(trainer.args.output_dir)
        save_checkpoint, finish = trainer._save_checkpoint, checkpoints.on_save
        first = trainer.args.process_index == 0

        def way(state: Any) -> str:
            return WAYS[(state.global_step // (STEPS_AFTER + 1)) % len(WAYS)]

        def saved(*args: Any, **kwargs: Any) -> None:
            self._began = time.perf_counter()
            save_checkpoint(*args, **kwargs)
            self.save.append(time.perf_counter() - self._began)

        def finished(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            if way(state) != "bare":
                finish(args, state, control, **kwargs)
            if way(state) == "waited for":
                checkpoints._settle(args, wait=True)
            self.standstill[way(state)].append(time.perf_counter() - began)

        class Turns(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if first and (state.global_step + 1) % (STEPS_AFTER + 1) == 0:
                    for old in output.glob("checkpoint-*"):
                        shutil.rmtree(old)
                    os.sync()

            def on_step_end(turns, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                control.should_save = state.global_step % (STEPS_AFTER + 1) == 0
                if state.global_step % (STEPS_AFTER + 1) == STEPS_AFTER and state.global_step > STEPS_AFTER:
                    checkpoints._settle(args, wait=True)
                    self.turn[way(state)].append(time.perf_counter() - self._began)
                    if first:
                        newest = output / f"checkpoint-{state.global_step - STEPS_AFTER}"
                        self.megabytes = sum(one.stat().st_size for one in newest.rglob("*")) / 1e6

        trainer._save_checkpoint, checkpoints.on_save = saved, finished
        checkpoints.attach(trainer)
        trainer.add_callback(Turns())


def guard_seconds(trainer: Any) -> dict[str, list[float]]:
    """Train, the guard's listeners switched by turns, and return the seconds of the steps."""
    from shardwright.trainers.guards import GuardCallback
    from transformers import TrainerCallback

    guard = GuardCallback(hang_seconds=None)
    plain = trainer.training_step, trainer._get_grad_norm
    guard.attach(trainer)
    guarded = trainer.training_step, trainer._get_grad_norm
    decide = guard.on_pre_optimizer_step
    seconds: dict[str, list[float]] = {"plain": [], "guarded": []}

    class Turns(TrainerCallback):
        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            on = state.global_step % 2 == 1
            trainer.training_step, trainer._get_grad_norm = guarded if on else plain
            guard.on_pre_optimizer_step = decide if on else (lambda *args, **kwargs: None)
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step > 4:
                taken = time.perf_counter() - self.began
                seconds["guarded" if state.global_step % 2 == 0 else "plain"].append(taken)

    trainer.add_callback(Turns())
    trainer.train()
    return seconds


def summary(saves: Saves, guard: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians: seconds of saves, turns and steps, and what they add as shares."""
    save = median(saves.save)

    def added(seconds: dict[str, list[float]], way: str) -> float:
        return median(a - b for a, b in zip(seconds[way], seconds["bare"], strict=True))

    return {
        "ranks": 2,
        "rounds": len(saves.turn["bare"]),
        "steps_after_a_save": STEPS_AFTER,
        "checkpoint_megabytes": round(saves.megabytes),
        "save_seconds": round(save, 3),
        "turn_seconds": {way: round(median(values), 3) for way, values in saves.turn.items()},
        "standstill_of_save": {way: round(median(saves.standstill[way]) / save, 4) for way in WAYS[1:]},
        "turn_added_of_save": {way: round(added(saves.turn, way) / save, 4) for way in WAYS[1:]},
        "step_seconds": {way: round(median(guard[way]), 4) for way in ("plain", "guarded")},
        "guarded_by_plain": round(median(guard["guarded"]) / median(guard["plain"]) - 1, 4),
    }


if __name__ == "__main__":
    raise SystemExit(main())
