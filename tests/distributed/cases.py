"""The training runs whose losses must agree: every engine, with and without offload, in bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_settings import engine_settings
from planning import llama
from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.plan.rendering import deepspeed_config
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob

STEPS = 5
SEQ_LEN = 64
RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    engine: str
    zero_stage: int = 0
    offload_optimizer: bool = False
    offload_param: bool = False
    bf16: bool = False
    accumulation: int = 1
    optimizer: str = "adamw_torch"
    zero_gradient_step: bool = False
    """Step once on zero gradients before training, as ZeRO-0 in 16 bit does."""
    kept_products: bool = False
    """Recompute all of each layer but its products and attention."""

    @property
    def name(self) -> str:
        engine = f"zero{self.zero_stage}" if self.engine == "deepspeed" else self.engine
        offload = "-offload" * self.offload_optimizer + "-param" * self.offload_param
        extra = "-sgd" * (self.optimizer == "sgd") + "-zero-step" * self.zero_gradient_step
        extra += "-kept-products" * self.kept_products
        return f"{engine}{offload}{extra}-{'bf16' if self.bf16 else 'fp32'}-x{self.accumulation}"

    def training_arguments(self) -> dict[str, Any]:
        deepspeed = None
        if self.engine == "deepspeed":
            deepspeed = deepspeed_configuration(
                self.zero_stage, offload_optimizer=self.offload_optimizer, offload_param=self.offload_param
            )
        return engine_settings(
            self.engine,
            2,
            deepspeed,
            gradient_accumulation_steps=self.accumulation,
            bf16=self.bf16,
            optim=self.optimizer,
            gradient_checkpointing=self.kept_products,
            learning_rate=0.5 if self.optimizer == "sgd" else 5e-3,
            weight_decay=0.1,
            max_grad_norm=0.7,
            max_steps=STEPS,
        )


def deepspeed_configuration(
    zero_stage: int, *, offload_optimizer: bool = False, offload_param: bool = False
) -> dict[str, Any]:
    offload = "cpu-all" if offload_param else "cpu" if offload_optimizer else "none"
    job = TrainingJob(seq_len_tokens=SEQ_LEN, optimizer="adamw_torch", strategy=f"zero{zero_stage}", offload=offload)
    plan = make_plan(llama(hidden_size=64, intermediate_size=128), parse_hardware(f"{RANKS}xCPU"), job)
    assert plan.chosen.strategy.zero_stage == zero_stage
    return deepspeed_config(plan)


ENGINES: list[dict[str, Any]] = [
    {"engine": "fsdp2"},
    {"engine": "deepspeed", "zero_stage": 0},
    {"engine": "deepspeed", "zero_stage": 1},
    {"engine": "deepspeed", "zero_stage": 2},
    {"engine": "deepspeed", "zero_stage": 3},
    {"engine": "deepspeed", "zero_stage": 1, "offload_optimizer": True},
    {"engine": "deepspeed", "zero_stage": 2, "offload_optimizer": True},
    {"engine": "deepspeed", "zero_stage": 3, "offload_optimizer": True},
    {"engine": "deepspeed", "zero_stage": 3, "offload_optimizer": True, "offload_param": True},
]
BF16_CASES = [Case(**engine, bf16=True, accumulation=2) for engine in ENGINES]

KEPT_PRODUCTS_CASES = [
    Case(engine=engine, zero_stage=stage, bf16=True, accumulation=2, kept_products=True)
    for engine, stage in (("deepspeed", 3), ("fsdp2", 0))
]


def reference_of(case: Case) -> Case:
    return Case(
        engine="ddp",
        bf16=case.bf16,
        accumulation=case.accumulation,
        optimizer=case.optimizer,
        zero_gradient_step=case.bf16 and case.engine == "deepspeed" and case.zero_stage == 0,
    )


def all_cases() -> list[Case]:
    return list(dict.fromkeys([*(reference_of(case) for case in BF16_CASES), *BF16_CASES, *KEPT_PRODUCTS_CASES]))
