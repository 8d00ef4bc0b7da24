"""The gallery is what the planner would write today, and every file of it loads in the library that reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from gallery import read_configs
from paths import ROOT
from planning import MODELS
from shardwright.cli.gallery import entry_names, load_entry
from shardwright.ds_configs.check.files import run_check
from shardwright.ds_configs.plan.gallery import GALLERY, gallery_plans
from shardwright.ds_configs.plan.plan import render_files

GALLERY_DIRECTORY = ROOT / "ds_configs" / "gallery"
DEEPSPEED_FILES = sorted(GALLERY_DIRECTORY.glob("*/ds_config.json"))
ACCELERATE_FILES = sorted(GALLERY_DIRECTORY.glob("*/accelerate.yaml"))


@pytest.mark.slow
def test_gallery_is_current():
    """Run `make gallery` when this fails."""
    expected = {
        f"{entry.name}/{name}": text
        for entry, plan in gallery_plans(read_configs(MODELS))
        for name, text in render_files(plan).items()
    }
    found = {
        str(path.relative_to(GALLERY_DIRECTORY)): path.read_text(encoding="utf-8")
        for path in GALLERY_DIRECTORY.rglob("*")
        if path.is_file()
    }
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def test_gallery_covers_every_public_model_and_engine():
    assert {entry.model for entry in GALLERY} == set(read_configs(MODELS))
    labels = {load_entry(name).chosen.strategy.label.partition("+")[0] for name in entry_names()}
    assert {"single", "ddp", "zero1", "zero2", "zero3", "fsdp2"} <= labels


@pytest.mark.parametrize("directory", sorted({path.parent for path in ACCELERATE_FILES}), ids=lambda path: path.name)
def test_every_file_passes_our_own_check(directory, monkeypatch):
    monkeypatch.chdir(directory)
    files = [path for path in (Path("accelerate.yaml"), Path("ds_config.json")) if path.exists()]
    world_size = load_entry(directory.name).hardware.world_size
    findings = run_check(files, world_size=world_size, uses_transformers=True).findings
    assert findings == (), [str(finding.error) for finding in findings]


def resolved(config: dict, arguments: dict) -> dict:
    """The configuration as the Trainer fills it in, for a world of one."""
    micro_batch, accumulation = arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]
    filled = json.loads(json.dumps(config))
    filled |= {
        "train_batch_size": micro_batch * accumulation,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": arguments["max_grad_norm"],
    }
    for section in ("bf16", "fp16"):
        if section in filled:
            filled[section]["enabled"] = arguments[section] if section == "bf16" else False
    return filled


@pytest.mark.parametrize("path", DEEPSPEED_FILES, ids=lambda path: path.parent.name)
def test_deepspeed_loads_every_file(path):
    from deepspeed.runtime.config import DeepSpeedConfig

    config = json.loads(path.read_text(encoding="utf-8"))
    arguments = json.loads((path.parent / "training_arguments.json").read_text(encoding="utf-8"))
    loaded = DeepSpeedConfig(resolved(config, arguments))
    assert loaded.zero_optimization_stage == config["zero_optimization"]["stage"]
    for key, value in config["zero_optimization"].items():
        if isinstance(value, int) and not isinstance(value, bool) and hasattr(loaded.zero_config, key):
            assert getattr(loaded.zero_config, key) == value


@pytest.mark.parametrize("path", DEEPSPEED_FILES, ids=lambda path: path.parent.name)
def test_deepspeed_plugin_loads_every_file(path, monkeypatch):
    from accelerate import DeepSpeedPlugin

    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    plugin = DeepSpeedPlugin(hf_ds_config=str(path))
    stage = json.loads(path.read_text(encoding="utf-8"))["zero_optimization"]["stage"]
    assert plugin.zero_stage == stage


@pytest.mark.parametrize("path", ACCELERATE_FILES, ids=lambda path: path.parent.name)
def test_accelerate_loads_every_file(path):
    from accelerate.commands.config import load_config_from_file

    loaded = load_config_from_file(str(path))
    hardware = load_entry(path.parent.name).hardware
    assert loaded.num_processes == hardware.world_size
    assert loaded.num_machines == hardware.nodes


@pytest.mark.parametrize(
    "path", sorted(GALLERY_DIRECTORY.glob("*/training_arguments.json")), ids=lambda p: p.parent.name
)
def test_trainer_knows_every_argument(path):
    from dataclasses import fields

    from transformers import TrainingArguments

    known = {field.name for field in fields(TrainingArguments)}
    assert set(json.loads(path.read_text(encoding="utf-8"))) <= known
