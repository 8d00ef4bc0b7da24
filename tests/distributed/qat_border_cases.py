"""Quantization-aware training over several steps: the families and layouts that are compared with one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cases import RANKS
from engine_settings import engine_settings
from equivalence.cases import deepspeed_config
from shardwright.ds_configs.quantization.scheme import changed, scheme_named
from shardwright.ds_configs.specs.layout import Layout

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
OFF_BORDERS = [replace(case, off_borders=True) for case in ON_BORDERS]
EVERY = {case.name: case for case in (*ON_BORDERS, *OFF_BORDERS)}
