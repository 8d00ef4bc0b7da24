"""`shardwright demo` plans, trains, and stays short."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from session import warm_command, warm_path


@pytest.mark.distributed
@pytest.mark.once
def test_demo_trains_in_at_most_60_lines(tmp_path: Path, deepspeed_cpu_ops: None) -> None:
    command, environment = [*warm_command("shardwright"), "demo", "demo", "--steps", "4"], {"PATH": warm_path()}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len((done.stdout + done.stderr).splitlines()) <= 60
    assert done.stdout.count("Chosen  ZeRO-2") == 2 and "cross-entropy" in done.stdout
    assert json.loads((tmp_path / "demo" / "plan" / "plan.json").read_text(encoding="utf-8"))["chosen"]
    assert (tmp_path / "demo" / "trained" / "model.safetensors").is_file()
