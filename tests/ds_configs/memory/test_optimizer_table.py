"""Predictions and legality against what `benchmarks/optimizer_table.py` measured for every optimizer and engine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from shardwright.ds_configs.specs.optimizers import OPTIMIZERS

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    import optimizer_table

    return optimizer_table


def test_cells_of_one_process_ddp_zero2_and_fsdp2_are_measured_or_rejected(benchmark: ModuleType) -> None:
    measured = {benchmark.key(row) for row in benchmark.stored() if "metered" in row and "losses" in row}
    names = {name for name in OPTIMIZERS if name not in benchmark.SAME}
    cells = {(name, layout) for name in names for layout in ("single", "ddp", "zero2", "fsdp2")}
    assert {cell for cell in cells - measured if not benchmark.rejection_of(*cell)} == set()


def test_memory_losses_and_resumed_runs_of_offered_cells_are_within_the_limits(benchmark: ModuleType) -> None:
    assert benchmark.wrong_cells(benchmark.stored()) == []
