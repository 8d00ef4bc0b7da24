"""The grid of `parallel_memory.py`: tensor, pipeline, sequence and expert parallelism on 2 and 4 ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memory_cases import MICRO_BATCH_SIZE, MODELS, SEQ_LEN, spec_of
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout, ZeroOptions
from shardwright.ds_configs.specs.model import ModelSpec

LAYOUTS: dict[str, dict[str, int]] = {
    "sp2": {"sp": 2},
    "sp2xdp2": {"sp": 2, "dp_shard": 2},
    "tp2": {"tp": 2},
    "tp2xdp2": {"tp": 2, "dp_shard": 2},
    "pp2": {"pp": 2},
    "pp2xdp2": {"pp": 2, "dp_shard": 2},
    "pp2xtp2": {"pp": 2, "tp": 2},
    "ep2": {"ep": 2, "dp_shard": 2},
    "ep2xdp2": {"ep": 2, "dp_shard": 4},
}
"""Axes of each layout; expert-parallel ranks are data-parallel ones."""

STAGES: dict[str, tuple[int, ...]] = {"sp": (1, 2, 3), "tp": (0, 1, 2), "pp": (0, 1), "ep": (1, 2)}
FAMILIES: dict[str, tuple[str, ...]] = {
    "sp": ("llama", "qwen3"),
    "tp": ("llama", "qwen3"),
    "pp": ("llama", "qwen3", "gpt2"),
    "ep": ("mixtral",),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run whose peak is predicted and metered on every rank."""

    layout: str
    zero_stage: int
    model: str
    precision: str
    accumulation: int
    checkpointing: bool

    @property
    def name(self) -> str:
        checkpointing = "ckpt" if self.checkpointing else "full"
        words = (self.layout, f"zero{self.zero_stage}", self.model, self.precision, f"x{self.accumulation}")
        return "-".join([*words, checkpointing])

    @property
    def axis(self) -> str:
        """The parallel axis besides data parallelism."""
        return self.layout[:2]

    @property
    def config(self) -> dict[str, Any]:
        return {"model_type": self.model, **MODELS[self.model]}

    @property
    def ranks(self) -> int:
        return self.full_layout().world_size

    def spec(self, release: str | None = None) -> ModelSpec:
        return spec_of(self.config, self.model, release)

    def job(self) -> TrainingJob:
        return TrainingJob(
            seq_len_tokens=SEQ_LEN,
            precision=self.precision,  # type: ignore[arg-type]
            gradient_checkpointing="on" if self.checkpointing else "off",
        )

    def full_layout(self) -> Layout:
        """Return the layout with buckets as small beside the model as in a real run."""
        spec = self.spec()
        two_layers = 2 * spec.layer_parameter_count
        return Layout(
            engine="deepspeed",
            zero_stage=self.zero_stage,
            micro_batch_size=MICRO_BATCH_SIZE,
            gradient_accumulation_steps=self.accumulation,
            gradient_checkpointing=self.checkpointing,
            zero=ZeroOptions(
                reduce_bucket_size=spec.parameter_count // 10,
                stage3_prefetch_bucket_size=spec.layer_parameter_count // 2,
                stage3_param_persistence_threshold=10 * spec.dimensions.hidden_size,
                stage3_max_live_parameters=two_layers,
                stage3_max_reuse_distance=two_layers,
                sub_group_size=spec.parameter_count,
            ),
            **LAYOUTS[self.layout],
        )


_SETTINGS = (("fp32", 1, False), ("bf16", 3, True), ("fp32", 3, True), ("bf16", 1, False))
"""Precision, accumulation and checkpointing."""


def grid() -> list[Case]:
    """Return cases for each layout and stage of ZeRO over the layout's model families: two on 2 ranks, one on 4."""
    cases: list[Case] = []
    for layout in LAYOUTS:
        stages, families = STAGES[layout[:2]], FAMILIES[layout[:2]]
        number = 1 if "x" in layout else 2
        for index, (stage, _) in enumerate((stage, place) for stage in stages for place in range(number)):
            precision, accumulation, checkpointing = _SETTINGS[(index + (layout[:2] in ("tp", "ep"))) % len(_SETTINGS)]
            cases.append(
                Case(
                    layout=layout,
                    zero_stage=stage,
                    model=families[(index + (index // 2 if len(families) == 2 else 0)) % len(families)],
                    precision=precision,
                    accumulation=accumulation,
                    checkpointing=checkpointing,
                )
            )
    return cases
