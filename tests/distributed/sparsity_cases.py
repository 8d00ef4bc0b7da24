"""Training runs with zeros in their weights, under every engine, that must agree with a single process.

Ranks run this file.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cases import deepspeed_configuration
from engine_settings import engine_settings
from fresh_process import forget_last_run
from shardwright.ds_configs.specs.layout import Layout
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from small_models import llama

STEPS = 6
SAVED_AT = 3
ROWS = 8
"""Samples of a step, on all ranks together."""
SHRINK = 0.05


@dataclass(frozen=True, kw_only=True)
class Case:
    method: str
    """`matrix`: 2:4 with AdamW, whose momentum moves zeros; `global`: one threshold for all; `l1`."""
    engine: str = "ddp"
    zero_stage: int = 0
    bf16: bool = False
    offload: bool = False
    axis: Literal["", "tp", "pp"] = ""
    """Axis that the ranks shard instead of samples."""
    resumed: bool = False
    """Whether a second training resumes from the checkpoint of the first."""

    @property
    def name(self) -> str:
        engine = f"zero{self.zero_stage}" if self.engine == "deepspeed" else self.engine
        engine += f"-{self.axis}" if self.axis else ""
        extra = "-bf16" * self.bf16 + "-offload" * self.offload + "-resumed" * self.resumed
        return f"{self.method}-{engine}{extra}"

    def arguments(self, world_size: int) -> dict[str, Any]:
        deepspeed = None
        if self.engine == "deepspeed":
            deepspeed = deepspeed_configuration(self.zero_stage, offload_optimizer=self.offload)
            if self.zero_stage == 3:
                # Between the sizes of the matrices: some stay gathered, some do not.
                deepspeed["zero_optimization"]["stage3_param_persistence_threshold"] = 4200
        return engine_settings(
            self.engine,
            ROWS // (1 if self.axis else world_size),
            deepspeed,
            optim="adamw_torch" if self.method == "matrix" else "sgd",
            learning_rate=1e-2 if self.method == "matrix" else 0.5,
            weight_decay=0.0,
            max_grad_norm=0.0,
            max_steps=STEPS,
            bf16=self.bf16,
            save_strategy="steps" if self.resumed else "no",
            save_steps=SAVED_AT,
        )

    def callback(self) -> Any:
        from shardwright.trainers.sparsity.l1_sparsity_callback import L1SparsityCallback
        from shardwright.trainers.sparsity.magnitude_pruning_callback import MagnitudePruningCallback

        if self.method == "l1":
            return L1SparsityCallback(SHRINK)
        if self.method == "global":
            return MagnitudePruningCallback(0.6, start_step=1, end_step=5, every=2, scope="global")
        ignore = ["lm_head", "re:.*down_proj"]
        return MagnitudePruningCallback(0.5, end_step=4, every=2, pattern="2:4", ignore=ignore)


ZERO1, ZERO2, ZERO3 = [dict[str, Any](engine="deepspeed", zero_stage=stage) for stage in (1, 2, 3)]
FSDP2: dict[str, Any] = {"engine": "fsdp2"}
EXACT = [
    Case(method="global"),
    Case(method="global", **ZERO1, axis="tp", resumed=True),
    Case(method="global", engine="deepspeed", axis="pp", resumed=True),
    Case(method="global", **ZERO3, resumed=True),
    Case(method="global", **FSDP2),
    Case(method="l1", **ZERO3),
    Case(method="l1", **FSDP2),
]
MOMENTUM = [
    Case(method="matrix", **FSDP2),
    Case(method="matrix", **ZERO2, bf16=True),
    Case(method="matrix", **ZERO3, bf16=True, offload=True),
]
HALF = [Case(method="l1", **ZERO2, bf16=True), Case(method="l1", **ZERO3, bf16=True)]
EVERY = (*EXACT, *MOMENTUM, *HALF)


def model(case: Case) -> Any:
    """Return a small Llama whose MLP has an odd width, so that ranks hold different numbers of rows, where it may."""
    width = 68 if case.axis == "tp" else 67
    return llama(seed=1, vocab_size=128, max_position_embeddings=64, initializer_range=0.1, intermediate_size=width)


def samples() -> list[dict[str, Any]]:
    import random

    draw = random.Random(5)
    rows = [[draw.randrange(1, 128) for _ in range(16)] for _ in range(ROWS * STEPS)]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(
    case: Case, directory: Path, world_size: int, overrides: dict[str, Any], *, resume_from: str | None = None
) -> Any:
    from shardwright.trainers.parallel.trainer_for import parallelism_of
    from transformers import TrainingArguments

    arguments = TrainingArguments(str(directory / case.name), **case.arguments(world_size), **overrides)
    axes: dict[str, Any] = {case.axis: world_size} if case.axis and world_size > 1 else {}
    layout = parallelism_of(Layout(engine="deepspeed" if axes else "ddp", **axes))
    trainer = layout.make_trainer(
        model=model(case), args=arguments, train_dataset=samples(), callbacks=[case.callback()]
    )
    trainer.train(resume_from_checkpoint=resume_from)
    return trainer


def run(case: Case, output: Path, world_size: int) -> None:
    from safetensors.torch import load_file, save_file

    trainer = train(case, output, world_size, configure_cpu_ranks(case.engine))  # type: ignore[arg-type]
    if case.resumed:
        checkpoint = Path(trainer.args.output_dir) / f"checkpoint-{SAVED_AT}"
        del trainer
        forget_last_run()
        overrides = configure_cpu_ranks(case.engine)  # type: ignore[arg-type]
        trainer = train(case, output, world_size, overrides, resume_from=str(checkpoint))
    if case.axis == "pp":
        trainer.save_model(str(output / f"{case.name}-stages"))
        files = sorted((output / f"{case.name}-stages").glob("*.safetensors"))
        state = {name: value for file in files for name, value in load_file(file).items()}
    else:
        # Under ZeRO-3 rank 0 alone gets it.
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    found = {name: value.float().contiguous() for name, value in state.items()}
    if case.engine == "deepspeed" and not case.axis:
        found |= {f"master.{name}": value for name, value in masters(trainer).items()}
    if trainer.args.process_index == 0:
        save_file(found, output / f"{case.name}.safetensors")
        sparsity = [each.sparsity for each in trainer.callback_handler.callbacks if hasattr(each, "sparsity")]
        (output / f"{case.name}.json").write_text(json.dumps(sparsity))


def masters(trainer: Any) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(value).float().clone() for name, value in trainer.model.named_parameters()}


if __name__ == "__main__":
    chosen = next(case for case in EVERY if case.name == sys.argv[2])
    run(chosen, Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]))
