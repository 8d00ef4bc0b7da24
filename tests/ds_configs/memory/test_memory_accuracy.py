"""The memory model against the metered peaks of real training runs, which `benchmarks/memory_accuracy.py` stored."""

from __future__ import annotations

import json
from itertools import product

import pytest
from memory_accuracy import GRID, Row, case_table, group_table, rows, verdict
from memory_cases import ADAPTED, FAMILIES, UNEQUAL, VALUES, Case, grid, pairs

pytestmark = pytest.mark.slow


def stored() -> list[Row]:
    return rows(json.loads(GRID.measured.read_text(encoding="utf-8")))


def test_predictions_match_measured_peaks() -> None:
    passed, sentence = verdict(stored())
    assert passed, sentence
    document = GRID.document.read_text(encoding="utf-8")
    for shown in (f"{sentence}.", group_table(stored()), case_table(stored())):
        assert shown in document, "the document shows other figures"


def test_the_stored_measurements_are_the_grid() -> None:
    assert sorted(row.case.name for row in stored()) == sorted(case.name for case in grid())


def test_every_legal_pair_of_values_occurs_in_the_grid() -> None:
    cases = [case for case in grid() if case not in (*ADAPTED, *UNEQUAL, *FAMILIES)]
    every = [Case(**dict(zip(VALUES, values, strict=True))) for values in product(*VALUES.values())]
    wanted = {pair for case in every if case.is_legal for pair in pairs(case)}
    assert wanted == {pair for case in cases for pair in pairs(case)}
    assert len(cases) >= 60
    assert len(set(cases)) == len(cases)
