"""A case of each parallel axis is trained and metered again: the stored measurements are no relics."""

from __future__ import annotations

import json

import pytest
from parallel_memory import MEASURED, TARGET_MEAN, measure, rows
from parallel_memory_cases import grid

pytestmark = pytest.mark.distributed

NAMES = (
    "sp2-zero2-llama-bf16-x1-full",
    "tp2-zero1-llama-fp32-x1-full",
    "ep2-zero2-mixtral-bf16-x1-full",
    "pp2-zero1-llama-bf16-x1-full",
)


def test_metered_peaks_equal_stored_and_predicted_peaks() -> None:
    stored = {row.name: row for row in rows(json.loads(MEASURED.read_text(encoding="utf-8")))}
    found = rows(measure([case for case in grid() if case.name in NAMES]))
    assert {row.case.name for row in found} == set(NAMES)
    for row in found:
        assert row.metered_bytes == pytest.approx(stored[row.name].metered_bytes, rel=0.02), row.name
        assert abs(row.error) < TARGET_MEAN, row.name
