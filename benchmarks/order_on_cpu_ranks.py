"""Predicted beside measured order of eight layouts of one job, trained on two CPU ranks.

`python benchmarks/order_on_cpu_ranks.py` trains the layouts in turn, several rounds of them, and takes the fastest step
of each: what else the host does only ever adds. Before each round both ranks measure, at the same time, what a
hardware specification states: FLOP/s of a large product, bandwidth of a copy, and of an all-reduce between them. The
model predicts from the best of those figures and from the constants of CPU ranks that ship with it; nothing is fitted
to a training step. `--write` stores the readings; `--stored` predicts the stored ones again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memory_cases import MODELS, spec_of
from metered_launch import measure_cases
from metered_table import store
from shardwright.ds_configs.memory.model_states import default_zero_options
from shardwright.ds_configs.specs.hardware import HardwareSpec, parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.ds_configs.step_time.estimate import StepTime, estimate_step_time
from shardwright.ds_configs.step_time.rates import constants_of

MEASURED = Path(__file__).with_name("order_on_cpu_ranks.json")
ROUNDS = 4
STEPS = 3
"""Steps of each training; the first one, which allocates, does not count."""

CONFIG = {**MODELS["llama"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408}
CONFIG |= {"num_hidden_layers": 6, "tie_word_embeddings": False}
JOB = TrainingJob(seq_len_tokens=128, precision="fp32", global_batch_size=16)


@dataclass(frozen=True, kw_only=True)
class OrderedLayout:
    """One way to train the job's 16 sequences of a step."""

    engine: str
    micro_batch_size: int
    checkpointing: bool = False
    axis: str = ""
    round: int = 0
    ranks: int = 2

    @property
    def name(self) -> str:
        """The layout in words."""
        strategy = self.strategy()
        size = f"{strategy.micro_batch_size} x {strategy.gradient_accumulation_steps}"
        return f"{strategy.label}, {size}{', checkpointing' if self.checkpointing else ''}"

    def strategy(self) -> Layout:
        """Return the layout with the buffers that a plan gives it."""
        stage = int(self.engine[-1]) if self.engine.startswith("zero") else None
        data_parallel = 1 if self.axis else self.ranks
        assert JOB.global_batch_size is not None
        return Layout(
            engine="deepspeed" if stage is not None else self.engine,  # type: ignore[arg-type]
            zero_stage=stage,
            dp_replicate=data_parallel if self.engine == "ddp" else 1,
            dp_shard=1 if self.engine == "ddp" else data_parallel,
            micro_batch_size=self.micro_batch_size,
            gradient_accumulation_steps=JOB.global_batch_size // (data_parallel * self.micro_batch_size),
            gradient_checkpointing=self.checkpointing,
            zero=default_zero_options(spec(), JOB, stage=stage or 0),
            **({self.axis: self.ranks} if self.axis else {}),
        )


LAYOUTS = (
    OrderedLayout(engine="ddp", micro_batch_size=8),
    OrderedLayout(engine="ddp", micro_batch_size=1),
    OrderedLayout(engine="ddp", micro_batch_size=4, checkpointing=True),
    OrderedLayout(engine="zero2", micro_batch_size=1),
    OrderedLayout(engine="zero3", micro_batch_size=1, checkpointing=True),
    OrderedLayout(engine="fsdp2", micro_batch_size=2),
    OrderedLayout(engine="zero1", micro_batch_size=16, axis="tp"),
    OrderedLayout(engine="zero1", micro_batch_size=2, axis="sp"),
)


def spec() -> ModelSpec:
    """Return the model."""
    return spec_of(CONFIG, "llama")


def work(wanted: Path, output: Path) -> None:
    """Train every layout on this rank; rank 0 appends the slowest rank's fastest step."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from fresh_process import forget_last_run

    calibrated = -1
    for values in json.loads(wanted.read_text(encoding="utf-8")):
        layout = OrderedLayout(**values)
        mine: dict[str, float] = _trained(layout)
        if layout.round > calibrated:
            mine |= _rates()
            calibrated = layout.round
        everyone: list[Any] = [None] * layout.ranks
        torch.distributed.all_gather_object(everyone, mine)
        if os.environ["RANK"] == "0":
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"layout": values, "ranks": everyone, "load": os.getloadavg()[0]}) + "\n")
            print("measured", layout.name, flush=True)
        forget_last_run()


def _trained(layout: OrderedLayout) -> dict[str, float]:
    """Return the wall and processor seconds of the fastest step."""
    from metered_training import plan_of, run_settings
    from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
    from shardwright.plugins.transformers.training_arguments import training_arguments, weights_dtype
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, default_data_collator, set_seed

    plan = plan_of(layout.strategy(), spec(), parse_hardware(f"{layout.ranks}xCPU"), JOB)
    arguments = training_arguments(
        run_settings(plan, steps=STEPS),
        configure_cpu_ranks(plan.chosen.strategy.engine),  # type: ignore[arg-type]
    )
    set_seed(1)
    config = AutoConfig.for_model(**CONFIG)
    dtype = weights_dtype(arguments, method="full")
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    callback = _axis_callback(layout)
    if callback is not None:
        callback.prepare(arguments, model)
    data = {"train_dataset": _samples(), "data_collator": default_data_collator}
    trainer = Trainer(model=model, args=arguments, **data)
    if callback is not None:
        callback.attach(trainer)
    clock = _clock()
    trainer.add_callback(clock)
    trainer.train()
    wall, processor = zip(*clock.seconds[1:], strict=True)
    return {"wall_seconds": min(wall), "processor_seconds": min(processor)}


def _axis_callback(layout: OrderedLayout) -> Any:
    from shardwright.trainers import SequenceParallelCallback, TensorParallelCallback

    if not layout.axis:
        return None
    return (TensorParallelCallback if layout.axis == "tp" else SequenceParallelCallback)(layout.ranks)


def _clock() -> Any:
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Wall and processor seconds of each step, which all ranks begin together."""

        def __init__(self) -> None:
            self.seconds: list[tuple[float, float]] = []
            self.started = (0.0, 0.0)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch.distributed.barrier()
            self.started = (time.perf_counter(), time.process_time())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            wall, processor = self.started
            self.seconds.append((time.perf_counter() - wall, time.process_time() - processor))

    return Clock()


def _samples() -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = ((JOB.global_batch_size or 1) * STEPS, JOB.seq_len_tokens)
    tokens = torch.randint(0, CONFIG["vocab_size"], shape, generator=generator)
    return [{"input_ids": sample, "labels": sample} for sample in tokens]


def _rates() -> dict[str, float]:
    """Return what this rank reaches while the other ones do the same: the figures of a hardware specification."""
    import torch

    left, right = torch.rand(2048, 2048), torch.rand(2048, 2048)
    large, target = torch.rand(16 * 2**20), torch.empty(16 * 2**20)
    product = _fastest(lambda: torch.mm(left, right), time.process_time)
    copy = _fastest(lambda: target.copy_(large), time.process_time)
    reduce = _fastest(lambda: torch.distributed.all_reduce(large), time.perf_counter)
    ranks = torch.distributed.get_world_size()
    size = 4.0 * large.numel()
    return {
        "product_flops_per_s": 2 * 2048**3 / product,
        "copy_bytes_per_s": 2 * size / copy,
        "link_bytes_per_s": 2 * (ranks - 1) / ranks * size / reduce,
    }


def _fastest(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    import torch

    best = float("inf")
    for _ in range(5):
        torch.distributed.barrier()
        started = clock()
        run()
        best = min(best, clock() - started)
    return best


def hardware_of(records: Sequence[dict[str, Any]]) -> HardwareSpec:
    """Return two CPU ranks with the best rates that were measured; the model's shares of a peak taken out again."""
    constants = constants_of("CPU")

    def best(name: str) -> float:
        return max(min(rank[name] for rank in record["ranks"]) for record in records if name in record["ranks"][0])

    return replace(
        parse_hardware("2xCPU"),
        flops_per_s=best("product_flops_per_s") / constants.matrix_efficiency,
        memory_bytes_per_s=best("copy_bytes_per_s") / constants.memory_efficiency,
        link_bytes_per_s=best("link_bytes_per_s") / constants.link_efficiency,
    )


def compared(records: Sequence[dict[str, Any]]) -> list[tuple[OrderedLayout, StepTime, float, float]]:
    """Return each layout with its predicted time, the fastest wall seconds and the fewest processor seconds."""
    hardware = hardware_of(records)
    rows = []
    for layout in LAYOUTS:
        runs = [record["ranks"] for record in records if replace(OrderedLayout(**record["layout"]), round=0) == layout]
        wall = min(max(rank["wall_seconds"] for rank in ranks) for ranks in runs)
        processor = min(max(rank["processor_seconds"] for rank in ranks) for ranks in runs)
        rows.append((layout, estimate_step_time(layout.strategy(), spec(), hardware, JOB), wall, processor))
    return sorted(rows, key=lambda row: row[2])


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's tau: pairs in the same order less pairs in the other, over all pairs."""
    pairs = [(i, j) for i in range(len(first)) for j in range(i)]
    agreed = sum((first[i] > first[j]) == (second[i] > second[j]) for i, j in pairs)
    return (2 * agreed - len(pairs)) / len(pairs)


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the layouts as Markdown, fastest first, and how far the orders agree."""
    rows = compared(records)
    lines = ["| layout | predicted | measured, wall | measured, processor |", "|---|---|---|---|"]
    lines += [
        f"| {layout.name} | {predicted.seconds:.2f} s | {wall:.2f} s | {processor:.2f} s |"
        for layout, predicted, wall, processor in rows
    ]
    predicted = [row[1].seconds for row in rows]
    tau = [kendall(predicted, [row[place] for row in rows]) for place in (2, 3)]
    loads = [record["load"] for record in records]
    rates = hardware_of(records)
    constants = constants_of("CPU")
    lines += [
        "",
        f"Kendall's tau of predicted and measured order: {tau[0]:.2f} by wall time, {tau[1]:.2f} by processor time.",
        f"Rates of a rank: {rates.flops_per_s * constants.matrix_efficiency / 1e9:.0f} GFLOP/s, "
        f"copies at {rates.memory_bytes_per_s * constants.memory_efficiency / 1e9:.1f} GB/s, "
        f"all-reduces at {rates.link_bytes_per_s * constants.link_efficiency / 1e9:.2f} GB/s; "
        f"load average of the two cores while it ran: {min(loads):.1f} to {max(loads):.1f}.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, or read what was measured, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stored", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--terms", action="store_true", help="also print the predicted terms of each layout")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("files", nargs="*", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.files:
        work(*options.files)
        return
    records = (
        json.loads(MEASURED.read_text(encoding="utf-8"))
        if options.stored
        else measure_cases(
            [replace(layout, round=number) for number in range(options.rounds) for layout in LAYOUTS],
            worker_file=Path(__file__).name,
        )
    )
    print(table(records))
    if options.terms:
        for layout, predicted, _, _ in compared(records):
            print(layout.name, json.dumps({name: round(value, 3) for name, value in predicted.terms.items()}))
    if options.write:
        store(records, MEASURED)


if __name__ == "__main__":
    main()
