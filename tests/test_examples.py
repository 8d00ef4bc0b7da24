"""The examples run as their docstrings say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_compare_layouts():
    config = ROOT / "tests" / "data" / "models" / "meta-llama--Llama-3.1-8B" / "config.json"
    shown = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "compare_layouts.py"), str(config), "8xA100-80GB"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "chosen      zero1" in shown
    assert "too large   ddp" in shown


@pytest.mark.distributed
def test_finetune_with_plan(tiny_llama, deepspeed_cpu_ops, tmp_path):
    from shardwright.ds_configs.job import TrainingJob
    from shardwright.plugins.launching import run
    from shardwright.plugins.planning import plan
    from shardwright.plugins.transformers import byte_tokenizer

    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    byte_tokenizer(512).save_pretrained(model)
    job = TrainingJob(seq_len_tokens=128, micro_batch_size=2, strategy="zero3")
    plan(str(model), "2xCPU", job).write(tmp_path / "plan")
    command = ["-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "plan" / "accelerate.yaml")]
    script = [str(ROOT / "examples" / "finetune_with_plan.py"), str(model), str(tmp_path / "plan")]
    assert os.access(script[0], os.R_OK)
    shown = run([*command, *script], timeout_seconds=240)
    assert "trained on 2 ranks" in shown
