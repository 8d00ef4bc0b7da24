"""The examples of sequence, expert, tensor and pipeline parallelism run on two CPU ranks as their docstrings say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from warm_ranks import run_ranks

pytestmark = pytest.mark.distributed

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SHOWN = {
    "sequence_parallel": "2 to a sequence",
    "expert_parallel": "experts over 2",
    "tensor_parallel": "2 to a matrix",
    "pipeline": "2 stages",
}
NUMBER = r"([0-9]+\.[0-9]{3})"


@pytest.mark.parametrize("name", SHOWN)
def test_example_trains_and_its_checkpoint_loads(name: str, deepspeed_cpu_ops: None, tmp_path: Path) -> None:
    script = EXAMPLES / f"{name}.py"
    command = f"torchrun --nproc-per-node 2 examples/{name}.py OUTPUT_DIR"
    assert command in script.read_text(), "what runs here is what its docstring says"
    shown = run_ranks([script, tmp_path / "model"])
    trained = re.search(rf"loss {NUMBER} to {NUMBER} on 2 ranks, {SHOWN[name]}", shown)
    loaded = re.search(rf"the checkpoint loads in plain Transformers, loss {NUMBER}", shown)
    assert trained and loaded, shown
    first, last = float(trained[1]), float(trained[2])
    assert last < first - 0.5
    assert float(loaded[1]) == pytest.approx(last, abs=0.5)
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert "config.json" in files and any(name.endswith(".safetensors") for name in files)
