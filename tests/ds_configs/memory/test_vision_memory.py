"""The memory of models that read images against metered runs, which `benchmarks/vision_memory.py` stored."""

from __future__ import annotations

import json
from statistics import mean

import pytest
from vision_memory import GRID, TARGET_MEAN, TARGET_WORST, case_table, grid, group_table, rows, verdict

pytestmark = pytest.mark.slow


def test_predictions_match_measured_peaks_of_towers() -> None:
    found = rows(json.loads(GRID.measured.read_text(encoding="utf-8")))
    assert sorted(row.case.name for row in found) == sorted(case.name for case in grid())
    assert mean(abs(row.error) for row in found) <= TARGET_MEAN
    assert max(abs(row.error) for row in found) <= TARGET_WORST
    document = GRID.document.read_text(encoding="utf-8")
    for shown in (f"{verdict(found)[1]}.", group_table(found), case_table(found)):
        assert shown in document, "the document shows other figures"
