"""A few cases of the accuracy grid are trained and metered again: the stored measurements are no relics."""

from __future__ import annotations

import json

import pytest
from memory_accuracy import MEASURED, measure, rows
from memory_cases import grid

pytestmark = pytest.mark.distributed

NAMES = (
    "llama-zero2-fp32-x1-ckpt-none-2r-full",
    "mixtral-fsdp2-bf16-x1-full-none-2r-full",
    "qwen3-zero1-bf16-x1-full-optimizer-2r-full",
    "qwen3-zero3-bf16-x1-ckpt-optimizer+param-2r-full",
)


def test_metered_peaks_equal_stored_and_predicted_peaks(deepspeed_cpu_ops: None) -> None:
    stored = {row.case.name: row for row in rows(json.loads(MEASURED.read_text(encoding="utf-8")))}
    found = rows(measure([case for case in grid() if case.name in NAMES]))
    assert sorted(row.case.name for row in found) == sorted(NAMES)
    for row in found:
        assert row.metered_bytes == pytest.approx(stored[row.case.name].metered_bytes, rel=0.02), row.case.name
        assert abs(row.error) < 0.03, row.case.name
