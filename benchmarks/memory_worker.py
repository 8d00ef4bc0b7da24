"""Runs on every rank of `memory_accuracy.py`: trains each case for a few steps with the byte meter on."""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from memory_cases import SEQ_LEN, Case
from shardwright.ds_configs.hardware import parse_hardware
from shardwright.ds_configs.memory import estimate_memory
from shardwright.ds_configs.plan_data import PlanData
from shardwright.ds_configs.render.deepspeed import deepspeed_config
from shardwright.ds_configs.render.training_arguments import training_arguments as planned_arguments
from shardwright.ds_configs.search import Evaluated
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.byte_meter import ByteMeter, MeterReading
from shardwright.plugins.peft import add_lora
from shardwright.plugins.trainer_phases import WARM_UP_STEPS, meter_trainer
from shardwright.plugins.transformers import training_arguments, weights_dtype
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, default_data_collator, set_seed

_LINEAR = torch.nn.functional.linear


def main(cases_file: Path, output: Path) -> None:
    """Measure every case of a JSON file and append one line for each to `output` on rank 0."""
    cases = [Case(**values) for values in json.loads(cases_file.read_text(encoding="utf-8"))]
    for case in cases:
        reading = measure(case)
        record = asdict(reading) | {"case": asdict(case), "peak_bytes": reading.peak_bytes}
        peaks: list[Any] = [None] * case.ranks
        torch.distributed.all_gather_object(peaks, record)
        if os.environ["RANK"] == "0":
            fullest = max(peaks, key=lambda found: found["peak_bytes"])
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(fullest) + "\n")
            print("measured", case.name, flush=True)
        _forget()


def measure(case: Case) -> MeterReading:
    """Train one case through the stock Trainer and return what lived on this rank."""
    settings = _settings(case)
    engine = case.layout if case.layout in ("ddp", "fsdp2") else "deepspeed"
    arguments = training_arguments(settings, configure_cpu_ranks(engine))  # type: ignore[arg-type]
    set_seed(1)
    with ByteMeter() as meter:
        config = AutoConfig.for_model(**case.config)
        dtype = weights_dtype(arguments, method=case.method)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        if case.method == "lora":
            job = case.job()
            fp32_adapters = engine != "deepspeed"
            model = add_lora(model, rank=job.lora_rank, targets="all-linear", fp32_adapters=fp32_adapters)
        trainer = Trainer(
            model=model, args=arguments, train_dataset=_samples(case), data_collator=default_data_collator
        )
        del model
        meter_trainer(trainer, meter)
        trainer.train()
        reading = meter.reading()
    del trainer
    return reading


def _settings(case: Case) -> dict[str, Any]:
    strategy = case.strategy()
    hardware = parse_hardware(f"{case.ranks}xCPU")
    job = case.job()
    memory = estimate_memory(strategy, case.spec(), hardware, job)
    plan = PlanData(
        model=case.spec(),
        hardware=hardware,
        job=job,
        chosen=Evaluated(strategy=strategy, memory=memory, reason=""),
        rejected=(),
    )
    settings = planned_arguments(plan) | {
        "output_dir": os.environ.get("TMPDIR", "/tmp"),  # noqa: S108
        "max_steps": WARM_UP_STEPS + 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    if strategy.engine == "deepspeed":
        settings["deepspeed"] = deepspeed_config(plan)
    if strategy.engine == "fsdp2":
        settings["fsdp"] = True
        settings["fsdp_config"] = {
            "version": 2,
            "transformer_layer_cls_to_wrap": list(plan.model.layer_classes),
            "reshard_after_forward": True,
            "offload_params": strategy.offload_param == "cpu",
        }
    return settings


def _samples(case: Case) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    count = case.strategy().global_batch_size * (WARM_UP_STEPS + 1)
    tokens = torch.randint(0, case.spec().dimensions.vocab_size, (count, SEQ_LEN), generator=generator)
    return [{"input_ids": sample, "labels": sample} for sample in tokens]


def _forget() -> None:
    """Bring the singletons of Accelerate and Transformers back to a fresh process; the process group stays."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        os.environ.pop(name, None)
    # ZeRO-3 replaces this function for the whole process and leaves it so (deepspeed 0.19.8, partition_parameters.py).
    torch.nn.functional.linear = _LINEAR
    gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
