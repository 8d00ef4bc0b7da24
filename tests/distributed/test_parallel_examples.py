"""The example of sequence, expert, tensor and pipeline parallelism runs on two CPU ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from warm_ranks import run_ranks

pytestmark = pytest.mark.distributed

EXAMPLE = Path(__file__).parents[2] / "examples" / "parallel.py"
NUMBER = r"([0-9]+\.[0-9]{3})"


@pytest.mark.parametrize("axis", ["sequence", "expert", "tensor", "pipeline"])
def test_example_trains_and_its_checkpoint_loads(axis: str, deepspeed_cpu_ops: None, tmp_path: Path) -> None:
    shown = run_ranks([EXAMPLE, axis, tmp_path / "model"])
    trained = re.search(rf"loss {NUMBER} to {NUMBER} on 2 ranks, {axis} parallelism of 2", shown)
    loaded = re.search(rf"the checkpoint loads in plain Transformers, loss {NUMBER}", shown)
    assert trained and loaded, shown
    first, last = float(trained[1]), float(trained[2])
    assert last < first - 0.5
    assert float(loaded[1]) == pytest.approx(last, abs=0.5)
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert "config.json" in files and any(name.endswith(".safetensors") for name in files)
