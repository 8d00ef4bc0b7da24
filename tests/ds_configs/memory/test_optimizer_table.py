"""The table of optimizers against the steps, losses and resumed runs that `benchmarks/optimizer_table.py` stored."""

from __future__ import annotations

import optimizer_table as table
import pytest

pytestmark = pytest.mark.slow


def test_every_offered_optimizer_was_trained_as_planned() -> None:
    rows = table.stored()
    assert not table.wrong_cells(rows)
    page = table.page(rows)
    assert page == table.PAGE.read_text(encoding="utf-8"), "run benchmarks/optimizer_table.py --stored --write"
    assert "| open |" not in page


def test_predictions_hold_for_buckets_of_all_gradients() -> None:
    """Of ZeRO-1 and ZeRO-2, whose copies and partitions of gradients exist only after the backward pass then."""
    rows = [row for row in table.stored() if row["layout"] in ("zero1", "zero2", "zero2-offload")]
    assert len(rows) > 25
    exact = [row for row in rows if abs(table.predicted(*table.key(row)) / row["metered"] - 1) < 2e-3]
    assert len(exact) > 0.7 * len(rows)
