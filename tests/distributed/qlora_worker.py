"""One rank that trains adapters on 4-bit weights through the Trainer, loaded as the commands load them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from engine_settings import fsdp2_settings
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.peft import add_lora
from shardwright.plugins.transformers.training_arguments import training_arguments
from shardwright.trainers.data.models import StartingModel, load_config, load_model
from transformers import Trainer, set_seed

SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero3": {
        "deepspeed": {
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "bf16": {"enabled": True},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
    },
    "fsdp2": fsdp2_settings(),
}


def kept_elements(parameter: Any) -> int:
    """Elements of a weight on this rank."""
    if hasattr(parameter, "ds_tensor"):
        return int(parameter.ds_tensor.numel())
    return int((parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel())


def main(model: Path, output: Path, layout: str) -> None:
    """Train four steps and write losses and the share of 4-bit codes that the rank keeps."""
    engine = "deepspeed" if layout == "zero3" else layout
    settings = {"max_steps": 4, "per_device_train_batch_size": 1, "bf16": True, "learning_rate": 0.01}
    settings |= {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    settings |= {"output_dir": str(output / layout), "logging_strategy": "steps"}
    arguments = training_arguments(settings | SETTINGS[layout], configure_cpu_ranks(engine))
    source = StartingModel(model=str(model), method="qlora")
    loaded = load_model(source, load_config(source), torch.bfloat16, 0, engine=engine)
    set_seed(0)
    adapted = add_lora(loaded, rank=4, targets=None, fp32_adapters=engine != "deepspeed")
    tokens = torch.randint(0, 256, (16, 64), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        model=adapted, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens]
    )
    trainer.train()
    layers = [module for module in trainer.model.modules() if type(module) is bitsandbytes.nn.Linear4bit]
    whole = sum(layer.in_features * layer.out_features // 4 for layer in layers)
    kept = sum(kept_elements(layer.weight) for layer in layers)
    if os.environ["RANK"] == "0":
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found = {"losses": losses, "kept": kept / whole, "layers": len(layers)}
        (output / f"{layout}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
