"""Runs on every rank: writes what Accelerate, DeepSpeed and FSDP2 report with and without the adapter."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from engine_settings import fsdp2_settings
from equivalence.cases import LAYOUTS, deepspeed_config
from fresh_process import forget_last_run
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import save_model_directory

SEED_TOKENS = [[(row * 7 + column * 3) % 512 for column in range(16)] for row in range(16)]


def arguments(output: Path, **settings: Any) -> Any:
    from transformers import TrainingArguments

    defaults = {"per_device_train_batch_size": 1, "max_steps": 1, "save_strategy": "no", "report_to": "none"}
    return TrainingArguments(str(output), **{**defaults, **settings})


def trained(model_directory: Path, training_arguments: Any) -> Any:
    from transformers import AutoModelForCausalLM, Trainer, default_data_collator

    model = AutoModelForCausalLM.from_pretrained(model_directory, use_safetensors=True, trust_remote_code=False)
    samples = [{"input_ids": tokens, "labels": tokens} for tokens in SEED_TOKENS]
    trainer = Trainer(model=model, args=training_arguments, train_dataset=samples, data_collator=default_data_collator)
    trainer.train()
    return trainer


def sharding(trainer: Any) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    parameters = list(trainer.model.parameters())
    return {
        "is_fsdp2": trainer.accelerator.is_fsdp2,
        "wrapper": type(trainer.model_wrapped).__name__,
        "dtensors": sum(isinstance(parameter, DTensor) for parameter in parameters),
        "parameters": len(parameters),
        "elements": sum(parameter.numel() for parameter in parameters),
        "local_elements": sum(
            parameter.to_local().numel() for parameter in parameters if isinstance(parameter, DTensor)
        ),
    }


def without_adapter(model_directory: Path, output: Path) -> dict[str, Any]:
    import torch.distributed

    facts: dict[str, Any] = {
        "deepspeed_world_size": arguments(output, deepspeed=deepspeed_config(LAYOUTS["zero2"])).world_size,
        "process_group_size": torch.distributed.get_world_size(),
    }
    forget_last_run()
    try:
        arguments(output, bf16=True)
        facts["bf16_error"] = None
    except ValueError as error:
        facts["bf16_error"] = str(error)
    forget_last_run()
    facts["fsdp2"] = sharding(trained(model_directory, arguments(output, use_cpu=True, **fsdp2_settings())))
    forget_last_run()
    return facts


def with_adapter(model_directory: Path, output: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    facts: dict[str, Any] = {}
    zero3 = arguments(
        output, deepspeed=deepspeed_config(LAYOUTS["zero3"]), bf16=True, **configure_cpu_ranks("deepspeed")
    )
    model = AutoModelForCausalLM.from_pretrained(model_directory, use_safetensors=True, trust_remote_code=False)
    facts["zero3"] = {
        "world_size": zero3.world_size,
        "rank": zero3.process_index,
        "elements": sum(parameter.ds_numel for parameter in model.parameters()),
        "local_elements": sum(parameter.ds_tensor.numel() for parameter in model.parameters()),
    }
    del model
    forget_last_run()

    trainer = trained(model_directory, arguments(output, **fsdp2_settings(), **configure_cpu_ranks("fsdp2")))
    facts["fsdp2"] = sharding(trainer)
    save_model_directory(trainer, str(output / "fsdp2"))
    forget_last_run()

    without_clipping = deepspeed_config(LAYOUTS["zero2"])
    del without_clipping["gradient_clipping"]
    for name, configuration in (("auto", deepspeed_config(LAYOUTS["zero2"])), ("missing", without_clipping)):
        settings = {"deepspeed": configuration, "max_grad_norm": 0.25, **configure_cpu_ranks("deepspeed")}
        trainer = trained(model_directory, arguments(output, **settings))
        facts[f"clipping_{name}"] = trainer.deepspeed.gradient_clipping()
        forget_last_run()
    return facts


if __name__ == "__main__":
    model_path, output_path = Path(sys.argv[1]), Path(sys.argv[2])
    found = {"without": without_adapter(model_path, output_path), "with": with_adapter(model_path, output_path)}
    (output_path / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))
