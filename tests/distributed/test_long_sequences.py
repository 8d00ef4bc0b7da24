"""Tiles and offload under DDP, ZeRO and FSDP2: each parameter is reduced once, and training equals the plain run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from warm_ranks import run_ranks

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("long_sequence_worker.py")


def test_engines_train_as_without_tiles_and_offload(deepspeed_cpu_ops: None, tmp_path: Path) -> None:
    run_ranks([WORKER, tmp_path], timeout_seconds=300.0)
    differences = json.loads((tmp_path / "differences.json").read_text())
    full = {"ddp", "zero1", "zero2", "zero3", "fsdp2", "ddp-mixtral", "zero3-mixtral"}
    assert set(differences) == full | {"ddp-lora", "fsdp2-lora", "ddp-distilled"}
    # Sums in another order.
    assert {name: value for name, value in differences.items() if value > 1e-6} == {}
