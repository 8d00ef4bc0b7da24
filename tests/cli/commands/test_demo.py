"""`shardwright demo` plans, trains, and stays short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.distributed
def test_demo_trains_in_at_most_60_lines(tmp_path: Path, deepspeed_cpu_ops: None) -> None:
    command = [sys.executable, "-m", "shardwright", "demo", "demo", "--steps", "4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len((done.stdout + done.stderr).splitlines()) <= 60
    assert done.stdout.count("Chosen  ZeRO-2") == 2 and "cross-entropy" in done.stdout
    assert json.loads((tmp_path / "demo" / "plan" / "plan.json").read_text(encoding="utf-8"))["chosen"]
    assert (tmp_path / "demo" / "trained" / "model.safetensors").is_file()
