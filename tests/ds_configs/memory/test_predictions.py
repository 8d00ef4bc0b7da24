"""No formula of memory, time or search moves unnoticed: drawn jobs have the predictions that are stored."""

from __future__ import annotations

import predictions
import pytest

RENEW = "If this is what the change is meant to do, run: python tests/predictions.py --write"


def test_drawn_jobs_have_the_stored_memory_and_time() -> None:
    moved = []
    for case in predictions.STORED["cases"]:
        lines = predictions.differences(case["values"], predictions.predictions(case["picks"]))
        moved += [f"{case['picks']}:", *(f"    {line}" for line in lines)] if lines else []
    assert not moved, "\n".join([*moved[:100], RENEW])


@pytest.mark.parametrize("name", predictions.STORED["searches"])
def test_searches_choose_and_reject_what_is_stored(name: str) -> None:
    moved = predictions.differences(predictions.STORED["searches"][name]["values"], predictions.search_values(name))
    assert not moved, "\n".join([*moved, RENEW])
