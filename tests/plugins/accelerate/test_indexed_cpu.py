"""What DDP needs to resume on CPU ranks, in fresh processes, since torch's registry of locations is global."""

from __future__ import annotations

import os
import subprocess

LOAD = """
import io, torch
file = io.BytesIO()
torch.save({"weights": torch.ones(3)}, file)
file.seek(0)
loaded = torch.load(file, map_location="cpu:0", weights_only=True)["weights"]
assert loaded.device == torch.device("cpu") and loaded.sum() == 3
"""
PREPARE = "from shardwright.plugins.accelerate.cpu_ranks import _accept_indexed_cpu; _accept_indexed_cpu()\n"


def outcome(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([os.environ["PYTHON_EXEC"], "-c", script], capture_output=True, text=True, check=False)


def test_torch_still_rejects_the_location_that_the_trainer_gives_it() -> None:
    """When this fails, `_accept_indexed_cpu` is no longer needed."""
    refused = outcome(LOAD)
    assert refused.returncode != 0
    assert "cpu:0" in refused.stderr


def test_with_the_adapter_checkpoints_load_on_the_cpu() -> None:
    accepted = outcome(PREPARE + LOAD)
    assert accepted.returncode == 0, accepted.stderr
