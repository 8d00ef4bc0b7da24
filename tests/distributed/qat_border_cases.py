"""Quantization-aware training over several steps: the families and layouts that are compared with one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import RANKS
from engine_settings import engine_settings
from equivalence.cases import deepspeed_config
from fresh_process import forget_last_run
from shardwright.ds_configs.quantization.scheme import changed, scheme_named
from shardwright.ds_configs.specs.layout import Layout
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks

STEPS = 5
SAMPLES = 4
"""Sequences of a step, over all ranks."""
SCHEME = changed(scheme_named("W4A16"), group_size=16)
"""Symmetric: the largest number of a group, where it is negative, lies at -7.5 steps, which is a border."""
CLASSES = {
    "llama": "LlamaForCausalLM",
    "deepseek": "DeepseekV3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
LAYOUTS: dict[str, Layout] = {
    "zero3": Layout(engine="deepspeed", zero_stage=3, dp_shard=RANKS),
    "fsdp2": Layout(engine="fsdp2", dp_shard=RANKS),
    "tp": Layout(engine="deepspeed", zero_stage=1, tp=RANKS),
    "ep": Layout(engine="deepspeed", zero_stage=1, dp_shard=RANKS, ep=RANKS),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str
    layout: str = ""
    """A name of `LAYOUTS`; empty for one process."""
    distilled: bool = False
    """Whether another model of the family is the teacher."""
    off_borders: bool = False
    """Whether numbers are made smaller by a few millionths before they are rounded, so that none lies on a border
    because it is the largest of its group."""

    @property
    def name(self) -> str:
        parts = (self.family, "distilled" * self.distilled, "off_borders" * self.off_borders, self.layout)
        return "-".join(filter(None, parts))

    @property
    def reference(self) -> Case:
        return replace(self, layout="")

    @property
    def strategy(self) -> Layout:
        strategy = LAYOUTS[self.layout] if self.layout else Layout(engine="single")
        return replace(strategy, micro_batch_size=SAMPLES // strategy.data_parallel_size)

    def arguments(self, directory: Path) -> dict[str, Any]:
        strategy = self.strategy
        return engine_settings(
            strategy.engine,
            strategy.micro_batch_size,
            deepspeed_config(strategy),
            layer=CLASSES[self.family].removesuffix("ForCausalLM"),
            output_dir=str(directory),
            optim="adamw_torch",
            adam_epsilon=1e-6,
            learning_rate=1e-3,
            weight_decay=0.0,
            max_steps=STEPS,
        )


ON_BORDERS = [
    Case(family="llama", distilled=True, layout="zero3"),
    Case(family="llama", distilled=True, layout="fsdp2"),
    Case(family="deepseek", layout="zero3"),
    Case(family="deepseek", layout="ep"),
    Case(family="granite", layout="zero3"),
    Case(family="granite", layout="tp"),
    Case(family="qwen3_moe", layout="zero3"),
    Case(family="qwen3_moe", layout="ep"),
]
OFF_BORDERS = [replace(case, off_borders=True) for case in ON_BORDERS[1::2]]
EVERY = {case.name: case for case in (*ON_BORDERS, *OFF_BORDERS)}


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
