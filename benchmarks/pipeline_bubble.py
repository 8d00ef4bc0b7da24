"""The idle share of a pipeline's step, predicted and measured: `python benchmarks/pipeline_bubble.py [--write]`.

Two CPU ranks run `PipelineTrainer`'s 1F1B schedule with 2, 4 and 8 micro-batches. What a stage does not spend in
forward and backward passes is idle. Measured twice: with passes that wait instead of computing, as long on both stages,
so that programs beside it on the same cores do not disturb; and with a real model in two stages of equal depth, where
both ranks share the machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shardwright.ds_configs.specs.layout import PipelineStage, bubble_fraction
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.launching.launch import Launch, free_port, launch_ranks, python_arguments
from shardwright.trainers.parallel.pipeline.trainer import PipelineTrainer
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments, set_seed

MICRO_BATCHES = (2, 4, 8)
STAGES, WARM_STEPS, STEPS = 2, 2, 6
FORWARD_SECONDS = 0.06
"""How long a waiting forward pass takes; a backward pass takes twice as long."""
SEQ_LEN_TOKENS = 64
RESULTS = Path(__file__).with_suffix(".json")
_PASSES = ("ForwardPass", "BackwardPass")


def count_idle_seconds(engine: Any, clock: Callable[[], float]) -> dict[str, float]:
    """Make an engine time its instructions; return the sums by instruction name, which grow as it trains.

    Receiving waits for the other stage, so that the time in `RecvActivation` and `RecvGrad` is the stage's idle time
    beside that of the transfer itself. Devices are not synchronised: meaningful where work is done when a call returns.
    """
    from types import MethodType

    sums: dict[str, float] = {}

    def timed(name: str, run: Callable[..., None]) -> Callable[..., None]:
        def instruction(self: Any, *args: Any, **kwargs: Any) -> None:
            started = clock()
            MethodType(run, self)(*args, **kwargs)
            sums[name] = sums.get(name, 0.0) + clock() - started

        return instruction

    engine._INSTRUCTION_MAP = {kind: timed(kind.__name__, run) for kind, run in engine._INSTRUCTION_MAP.items()}
    return sums


class IdleShare(TrainerCallback):
    """Measures the share of the later steps that this rank spends outside forward and backward passes."""

    def __init__(self, *, waiting: bool) -> None:
        self.waiting = waiting
        self.share = 0.0
        self.trainer: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Time the engine's instructions."""
        engine = self.trainer.model_wrapped
        if self.waiting:
            engine._INSTRUCTION_MAP = {
                kind: paced(run, FORWARD_SECONDS * (1 + _PASSES.index(kind.__name__)))
                if kind.__name__ in _PASSES
                else run
                for kind, run in engine._INSTRUCTION_MAP.items()
            }
        self.sums = count_idle_seconds(engine, time.perf_counter)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to count after the first steps, and stop after the last."""
        if state.global_step == WARM_STEPS:
            self.sums.clear()
            self.began = time.perf_counter()
        elif state.global_step == WARM_STEPS + STEPS:
            busy = sum(self.sums[name] for name in _PASSES)
            self.share = 1 - busy / (time.perf_counter() - self.began)


def paced(run: Any, seconds: float) -> Any:
    """Return an instruction that lasts as long as said, or longer where its work does."""

    def instruction(engine: Any, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        run(engine, *args, **kwargs)
        time.sleep(max(0.0, seconds - (time.perf_counter() - began)))

    return instruction


def model(hidden_size: int) -> Any:
    """Return a Llama of four layers whose head costs little beside them."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config)


def measure(micro_batches: int, *, waiting: bool) -> float:
    """Return the idle share of this rank."""
    deepspeed = {"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": "auto"}
    deepspeed |= {"gradient_accumulation_steps": "auto", "train_batch_size": "auto"}
    draw = torch.Generator().manual_seed(1)
    ids_NS = torch.randint(128, (2 * micro_batches, SEQ_LEN_TOKENS), generator=draw)
    half = {"has_embedding": True, "has_head": False}
    stages = (
        PipelineStage(index=0, first_layer=0, end_layer=2, **half),
        PipelineStage(index=1, first_layer=2, end_layer=4, has_embedding=False, has_head=True),
    )
    idle = IdleShare(waiting=waiting)
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=micro_batches,
            max_steps=WARM_STEPS + STEPS,
            deepspeed=deepspeed,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            **configure_cpu_ranks("deepspeed"),
        )
        rows = [{"input_ids": row, "labels": row} for row in ids_NS]
        whole = model(32 if waiting else 384)
        trainer = PipelineTrainer(whole, arguments, pipeline_stages=stages, train_dataset=rows, callbacks=[idle])
        idle.trainer = trainer
        trainer.train()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from fresh_process import forget_last_run

    forget_last_run()
    return idle.share


def work(output: Path) -> None:
    """Measure on every rank; the last stage has waited for the first and the first for the last."""
    import torch.distributed as dist

    rows = []
    for waiting in (True, False):
        for micro_batches in MICRO_BATCHES:
            shares: list[Any] = [None] * STAGES
            mine = measure(micro_batches, waiting=waiting)
            dist.all_gather_object(shares, mine)
            predicted = bubble_fraction(STAGES, micro_batches)
            measured = [round(share, 4) for share in shares]
            row = {"passes": "waiting" if waiting else "computing", "stages": STAGES, "micro_batches": micro_batches}
            rows.append({**row, "predicted": round(predicted, 4), "measured": measured})
    if os.environ["RANK"] == "0":
        output.write_text(json.dumps(rows))


def main() -> int:
    """Launch two ranks, print what they measured and store it when asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"store the figures in {RESULTS.name}")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "rows.json"
        port = free_port()
        command = ["torchrun", "--nproc-per-node", str(STAGES), "--master-port", str(port), str(Path(__file__))]
        launch_ranks(
            Launch(arguments=python_arguments([*command, "--worker", str(output)]), port=port), timeout_seconds=600
        )
        rows = json.loads(output.read_text())
    print("passes     micro-batches  predicted  first stage  last stage")
    for row in rows:
        first, last = row["measured"]
        name, micro_batches = row["passes"], row["micro_batches"]
        print(f"{name:<10} {micro_batches:>13}  {row['predicted']:>9.1%}  {first:>11.1%}  {last:>10.1%}")
    if options.write:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
