"""Runs on every rank: quantization-aware training; writes the whole weights before every step, and the losses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fresh_process import forget_last_run
from qat_border_cases import CLASSES, EVERY, SCHEME, Case
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks

_SMALLER = 1 - 4e-6


def train(case: Case, output: Path) -> None:
    from family_sweep.checks import samples
    from family_sweep.tiny_configs import tiny_model
    from shardwright.plugins.transformers.training_arguments import training_arguments
    from shardwright.trainers.distillation import DistillationConfig, DistillationTrainer
    from shardwright.trainers.parallel.trainer_for import parallelism_of
    from shardwright.trainers.qat.callback import QATCallback

    output.mkdir(exist_ok=True)
    strategy = case.strategy
    overrides = {"use_cpu": True} if strategy.engine == "single" else configure_cpu_ranks(strategy.engine)
    arguments = training_arguments(case.arguments(output), overrides)
    settings: dict[str, Any] = {
        "model": tiny_model(CLASSES[case.family]),
        "args": arguments,
        "train_dataset": samples(),
        "callbacks": [QATCallback(SCHEME), weights_of_steps(output)],
    }
    if case.distilled:
        settings |= {"trainer_class": DistillationTrainer, "teacher": tiny_model(CLASSES[case.family], seed=9)}
        settings["distillation"] = DistillationConfig(alpha=0.5, temperature=2.0)
    trainer = parallelism_of(strategy).make_trainer(**settings)
    with rounding_off_borders() if case.off_borders else nullcontext():
        trainer.train()
    if arguments.process_index == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        (output / "losses.json").write_text(json.dumps(losses))


@contextmanager
def rounding_off_borders() -> Iterator[None]:
    """Round numbers of weights that are a few millionths smaller: -7.5 becomes -7.49997."""
    from shardwright.trainers.qat.rounding import rounding

    before = rounding.weight_levels
    rounding.weight_levels = partial(before, rounding=lambda values: torch.round(values * _SMALLER))
    try:
        yield
    finally:
        rounding.weight_levels = before


def weights_of_steps(output: Path) -> Any:
    from safetensors.torch import save_file
    from shardwright.plugins.deepspeed.parameters import gathered_parameters
    from transformers import TrainerCallback

    class Weights(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            found = dict(gathered_parameters(model))
            if args.process_index == 0:
                weights = {name: one.detach().clone().contiguous() for name, one in found.items() if one is not None}
                save_file(weights, output / f"{state.global_step}.safetensors")

    return Weights()


if __name__ == "__main__":
    for name in sys.argv[2:]:
        train(EVERY[name], Path(sys.argv[1]) / name)
        forget_last_run()
