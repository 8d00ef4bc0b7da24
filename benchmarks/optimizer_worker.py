"""Runs on every rank of `optimizer_table.py`: meters a step of each optimizer, compares 20 steps and a resumed run."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from equivalence.cases import LAYOUTS
from equivalence.records import Record, logged, write_records
from memory_cases import MICRO_BATCH_SIZE, MODELS, SEQ_LEN
from metered_training import plan_of, run_settings, train_metered
from shardwright.ds_configs.memory.communication import default_zero_options
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.plan.plan import Plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import Precision, TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.optimizers import OPTIMIZERS
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.metering import ByteMeter
from shardwright.plugins.transformers.optimizers import prepare_optimizer
from shardwright.plugins.transformers.training_arguments import training_arguments

STEPS = 20
SAVED_STEP = 10
SAMPLES_PER_STEP = 4
RATES = {"sgd": 0.1, "lomo": 0.1, "adagrad": 1e-2, "lion": 3e-4}
"""Learning rates by the start of a name; 2e-3 for others."""
METERED: dict[str, Any] = {"model_type": "llama", **MODELS["llama"]}
TRAINED: dict[str, Any] = {
    **METERED,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
}
ENGINES: dict[str, Layout] = {
    "single": Layout(engine="single"),
    **{name: LAYOUTS[name] for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2")},
    "zero2-offload": LAYOUTS["zero2-offload"],
}


@dataclass(frozen=True, kw_only=True)
class Case:
    optimizer: str
    layout: str

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{self.layout}"

    @property
    def full_layout(self) -> Layout:
        return ENGINES[self.layout]


def record(case: Case, output: Path) -> Record:
    """Return the bytes of a step, predicted and metered, the losses of `STEPS` steps and of a resumed run."""
    if case.full_layout.engine == "single":
        # Else Accelerate would train one rank with DDP.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    found: Record = {}
    for part in (metered, trained):
        # Compiling torchao's updates for other shapes takes minutes, and they compute the same.
        eager = part is trained and OPTIMIZERS[case.optimizer].package == "torchao"
        try:
            with torch.compiler.set_stance("force_eager" if eager else "default"):
                found |= part(case, output)
        except Exception:
            found[f"{part.__name__}_failed"] = traceback.format_exc()
    return found


def metered(case: Case, output: Path) -> Record:
    plan = metered_plan(case.optimizer, case.layout)
    meter = _CompiledMeter() if OPTIMIZERS[case.optimizer].package == "torchao" else ByteMeter()
    # As on GPUs, where torch steps all tensors together unless an optimizer is fused.
    foreach = patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", lambda: ["cpu"])
    # What generated code calls, which no mode sees otherwise.
    allocated = patch(
        "torch._C._dynamo.guards._empty_strided_cpu",
        lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
    )
    with foreach, allocated:
        reading = train_metered(plan, METERED, meter)
    peaks = [reading.peak_bytes] * case.full_layout.world_size
    if len(peaks) > 1:
        torch.distributed.all_gather_object(peaks, reading.peak_bytes)
    return {
        "metered": max(peaks),
        "peaks": reading.peaks,
        "roles": reading.roles,
    }


class _CompiledMeter(ByteMeter):
    """A meter that lets `torch.compile` compile, such as the updates of torchao."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def metered_plan(optimizer: str, layout: str) -> Plan:
    """Return the plan whose step is metered."""
    case = Case(optimizer=optimizer, layout=layout)
    return plan_for(case, METERED, seq_len=SEQ_LEN, batch_size=MICRO_BATCH_SIZE, precision="bf16")


def plan_for(case: Case, config: dict[str, Any], *, seq_len: int, batch_size: int, precision: Precision) -> Plan:
    layout = replace(case.full_layout, micro_batch_size=batch_size)
    job = TrainingJob(
        seq_len_tokens=seq_len,
        micro_batch_size=batch_size,
        global_batch_size=layout.global_batch_size,
        precision=precision,
        optimizer=case.optimizer,
        gradient_checkpointing="off",
        loss="eager",
    )
    spec = model_spec_from_config(config, name="llama")
    if layout.zero_stage:
        layout = replace(layout, zero=default_zero_options(spec, job, stage=layout.zero_stage))
    return plan_of(layout, spec, parse_hardware(f"{layout.world_size}xCPU"), job)


def trained(case: Case, output: Path) -> Record:
    directory = output / case.name
    config = TRAINED
    plan = plan_for(
        case, config, seq_len=32, batch_size=SAMPLES_PER_STEP // case.full_layout.data_parallel_size, precision="fp32"
    )
    trainer = make_trainer(plan, directory, save_strategy="steps", save_steps=SAVED_STEP, save_total_limit=2)
    trainer.train()
    losses, weights = logged(trainer), trained_weights(trainer)
    resumed = make_trainer(plan, directory / "resumed")
    resumed.train(resume_from_checkpoint=str(directory / f"checkpoint-{SAVED_STEP}"))
    again, other = logged(resumed)[-(STEPS - SAVED_STEP) :], trained_weights(resumed)
    return {
        "losses": losses,
        "resumed_loss_difference": max(abs(a - b) for a, b in zip(losses[SAVED_STEP:], again, strict=True)),
        "resumed_weight_difference": max(float((weights[name] - other[name]).abs().max()) for name in weights),
        "moved": losses[0] - losses[-1],
    }


def make_trainer(plan: Plan, directory: Path, **more: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, default_data_collator, set_seed

    engine = plan.chosen.layout.engine
    settings = run_settings(plan, steps=STEPS) | {
        "output_dir": str(directory),
        "logging_strategy": "steps",
        "logging_steps": 1,
        "learning_rate": next((rate for name, rate in RATES.items() if plan.job.optimizer.startswith(name)), 2e-3),
        "lr_scheduler_type": "linear",
        "adam_epsilon": 1e-6,
        "weight_decay": 0.1,
        **more,
    }
    arguments = training_arguments(settings, {"use_cpu": True} if engine == "single" else configure_cpu_ranks(engine))
    set_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**{**TRAINED, "initializer_range": 0.1, "use_cache": False}))
    generator = torch.Generator().manual_seed(0)
    tokens_NT = torch.randint(3, 60, (STEPS * SAMPLES_PER_STEP, 32), generator=generator)
    samples = [{"input_ids": tokens_T, "labels": tokens_T} for tokens_T in tokens_NT]
    trainer = Trainer(model=model, args=arguments, train_dataset=samples, data_collator=default_data_collator)
    prepare_optimizer(trainer)
    return trainer


def trained_weights(trainer: Any) -> dict[str, Any]:
    """This rank's part of the trained weights, detached."""
    return {
        name: (getattr(weight, "ds_tensor", weight).detach()).clone()
        if not hasattr(weight, "to_local")
        else weight.to_local().detach().clone()
        for name, weight in trainer.model.named_parameters()
    }


if __name__ == "__main__":
    write_records(Case, record)
