"""The grid of `task_memory.py`: every task that TRL trains, under DDP and each engine that shards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from memory_cases import MODELS, spec_of
from shardwright.ds_configs.memory.rank_parameters import rank_parameters
from shardwright.ds_configs.specs.job import GROUPED_TASKS, TrainingJob
from shardwright.ds_configs.specs.layout import Layout, ZeroOptions
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.ds_configs.specs.tasks import TASKS

PROMPT_BYTES, SEQ_LEN = 24, 192
TASKS_OF_GRID = ("dpo", "kto", "orpo", "cpo", "reward", "grpo", "rloo")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One task under one engine, metered in its phases."""

    task: str
    layout: str
    method: str = "full"
    precision: str = "bf16"
    checkpointing: bool = True

    @property
    def ranks(self) -> int:
        return 2

    @property
    def name(self) -> str:
        checkpointing = "ckpt" if self.checkpointing else "kept"
        return "-".join([self.task, self.layout, self.method, self.precision, checkpointing])

    @property
    def config(self) -> dict[str, Any]:
        return {"model_type": "llama", **MODELS["llama"], "pad_token_id": 256, "eos_token_id": 256}

    def spec(self, release: str | None = None) -> ModelSpec:
        spec = spec_of(self.config, "llama", release)
        return spec.with_score_head() if self.task == "reward" else spec

    def job(self) -> TrainingJob:
        grouped = self.task in GROUPED_TASKS
        job = TrainingJob(
            task=self.task,  # type: ignore[arg-type]
            seq_len_tokens=SEQ_LEN,
            precision=self.precision,  # type: ignore[arg-type]
            method=self.method,  # type: ignore[arg-type]
            lora_rank=8,
            beta=(0.0 if self.layout == "fsdp2" else 0.05) if grouped else None,
            **({"generation": "transformers", "num_generations": 2} if grouped else {}),
            completion_tokens=SEQ_LEN - PROMPT_BYTES if grouped else None,
        ).completed(self.spec())
        placed = "sharded" if self.layout in ("zero3", "fsdp2") else "replica"
        if "reference" not in TASKS[job.task].second_models or job.reference is None:
            return job
        return job.placed("reference", "shared" if self.method != "full" else placed)  # type: ignore[arg-type]

    def full_layout(self) -> Layout:
        stage = int(self.layout[-1]) if self.layout.startswith("zero") else None
        spec = self.spec()
        layers = 2 * spec.layer_parameter_count
        zero = ZeroOptions(
            reduce_bucket_size=rank_parameters(spec, self.job()).trainable // 10,
            stage3_prefetch_bucket_size=spec.layer_parameter_count // 2,
            stage3_param_persistence_threshold=10 * spec.dimensions.hidden_size,
            stage3_max_live_parameters=layers,
            stage3_max_reuse_distance=layers,
            sub_group_size=spec.parameter_count,
        )
        engine = "deepspeed" if stage is not None else self.layout
        return Layout(
            engine=engine,  # type: ignore[arg-type]
            zero_stage=stage,
            dp_shard=1 if self.layout == "ddp" else self.ranks,
            dp_replicate=self.ranks if self.layout == "ddp" else 1,
            micro_batch_size=2,
            gradient_accumulation_steps=2 if self.task in GROUPED_TASKS else 1,
            gradient_checkpointing=self.checkpointing,
            zero=zero,
        )


@cache
def grid() -> list[Case]:
    """Return every task under every engine, and each task once more with other choices."""
    cases = [
        Case(task=task, layout=layout) for task, layout in product(TASKS_OF_GRID, ("ddp", "zero2", "zero3", "fsdp2"))
    ]
    for task in TASKS_OF_GRID:
        cases += [
            Case(task=task, layout="zero2", method="lora"),
            Case(task=task, layout="zero3", precision="fp32", checkpointing=False),
        ]
    return [replace(case) for case in cases]
