"""The training entry point under `accelerate launch --config_file` with the files that a plan consists of."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from equivalence.cases import Case
from launches import accelerate_launch
from safetensors.torch import load_file
from shardwright.ds_configs.plan.measurement import FILE_NAME, measurement_from_text
from train_jobs import train_job
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.distributed

RANKS, SEQ_LEN, STEPS = 2, 64, 5
MODULE = "shardwright.trainers.rank_main"


def arguments_of(case: Case) -> dict[str, Any]:
    """Return keys of `TrainingArguments` for a training in bf16 that learns within its steps."""
    arguments = case.arguments(Path())
    del arguments["output_dir"]
    return arguments | {"bf16": True, "learning_rate": 5e-3, "max_steps": STEPS, "max_grad_norm": 0.7}


def write_plan(directory: Path, case: Case) -> tuple[Path, dict[str, Any]]:
    """Write files for `accelerate launch`, and return their path and the keys of `TrainingArguments`."""
    settings = arguments_of(case)
    accelerate: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": 1,
        "num_processes": RANKS,
        "machine_rank": 0,
    }
    if case.full_layout.engine == "deepspeed":
        configuration = directory / "ds_config.json"
        configuration.write_text(json.dumps(settings.pop("deepspeed")))
        accelerate["distributed_type"] = "DEEPSPEED"
        accelerate["deepspeed_config"] = {
            "deepspeed_config_file": str(configuration),
            "zero3_init_flag": case.full_layout.zero_stage == 3,
        }
    else:
        settings = {key: value for key, value in settings.items() if not key.startswith("fsdp")}
        accelerate |= {"distributed_type": "FSDP", "mixed_precision": "bf16"}
        accelerate["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    config_file = directory / "accelerate.yaml"
    config_file.write_text(yaml.safe_dump(accelerate))
    return config_file, settings


def job(model: Path, settings: dict[str, Any], directory: Path, *flags: str, name: str = "job") -> list[str]:
    (directory / "text.txt").write_text(Path(argparse.__file__).read_text()[:30_000])
    words = [model, "--hardware", f"{RANKS}xCPU", "--strategy", "ddp", "--precision", "fp32", "--seq-len", SEQ_LEN]
    words += ["--dataset", directory / "text.txt", "--evaluation-samples", 2, "--output-dir", directory / "trained"]
    return [str(train_job([*words, *flags], directory / name, settings))]


def read_losses(directory: Path, engine: str) -> list[float]:
    trained = directory / "trained"
    measured = measurement_from_text((trained / FILE_NAME).read_bytes(), source="trained")
    assert len(measured.measured) == RANKS and f"engine was {engine}, but the plan has ddp" in measured.differences
    losses = [json.loads(line)["loss"] for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == STEPS
    return losses


def test_zero3_offload_saves_a_model_directory(tiny_llama: Path, deepspeed_cpu_ops: None, tmp_path: Path) -> None:
    case = Case(layout="zero3-offload-param")
    config_file, settings = write_plan(tmp_path, case)
    printed = accelerate_launch(config_file, MODULE, job(tiny_llama, settings, tmp_path))
    losses = read_losses(tmp_path, "deepspeed")
    assert losses[-1] < losses[0] - 0.8
    assert "stage3_gather_16bit_weights_on_model_save was missing" in printed

    trained = tmp_path / "trained"
    assert not [path.name for path in trained.iterdir() if path.suffix in {".bin", ".pt"}]
    start, saved = load_file(tiny_llama / "model.safetensors"), load_file(trained / "model.safetensors")
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        name: tensor.shape for name, tensor in start.items()
    }
    assert all((saved[name].float() - start[name]).abs().max() > 1e-3 for name in start if "proj" in name)
    tokens_1T = torch.tensor([AutoTokenizer.from_pretrained(trained)("import json\n" * 8)["input_ids"]])
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens_1T, labels=tokens_1T).loss
        for path in (tiny_llama, trained)
    )
    assert after < before - 0.5


@pytest.mark.full
@pytest.mark.parametrize(("layout", "dtype"), [("fsdp2", torch.float32), ("zero3", torch.bfloat16)])
def test_lora_saves_complete_adapters_that_zero3_keeps_in_16_bit(
    layout: str, dtype: torch.dtype, tiny_llama: Path, deepspeed_cpu_ops: None, tmp_path: Path
) -> None:
    """fp32 adapters on ZeRO-3's 16-bit weights would make each adapted layer keep an fp32 copy of its input."""
    config_file, settings = write_plan(tmp_path, Case(layout=layout, accumulation=2))
    lora = ["--method", "lora", "--lora-rank", "4", "--lora-targets", "q_proj,down_proj"]
    accelerate_launch(config_file, MODULE, job(tiny_llama, settings, tmp_path, *lora))
    adapters = load_file(tmp_path / "trained" / "adapter_model.safetensors")
    assert sorted({tuple(tensor.shape) for name, tensor in adapters.items() if "lora_A" in name}) == [(4, 64), (4, 128)]
    assert len(adapters) == 2 * 2 * 2 and {tensor.dtype for tensor in adapters.values()} == {dtype}
    assert all(tensor.abs().max() > 0 for name, tensor in adapters.items() if "lora_B" in name)
