"""What DDP needs to resume on CPU ranks, in a fresh process, since torch's registry of locations is global."""

from __future__ import annotations

import os
import subprocess

PROGRAM = """
import io, torch
file = io.BytesIO()
torch.save({"weights": torch.ones(3)}, file)

def loaded():
    file.seek(0)
    return torch.load(file, map_location="cpu:0", weights_only=True)["weights"]

try:
    loaded()
except RuntimeError as error:
    assert "cpu:0" in str(error)
else:
    raise AssertionError("torch accepts the location: `_accept_indexed_cpu` is no longer needed")
from shardwright.plugins.accelerate import _accept_indexed_cpu
_accept_indexed_cpu()
assert loaded().device == torch.device("cpu") and loaded().sum() == 3
"""


def test_torch_still_rejects_the_location_that_the_trainer_gives_it() -> None:
    subprocess.run([os.environ["PYTHON_EXEC"], "-c", PROGRAM], check=True)
