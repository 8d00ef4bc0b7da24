"""Numbers as reports show them."""

from __future__ import annotations

import doctest

import pytest
from shardwright.cli import settings
from shardwright.trainers.reports import markdown, plans, report


@pytest.mark.parametrize("module", [report, plans, markdown, settings])
def test_examples(module) -> None:
    assert doctest.testmod(module).failed == 0


def test_mean_with_error_returns_the_error_of_the_mean() -> None:
    mean, error = report.mean_with_error([1.0, 2.0, 3.0, 4.0])
    assert (mean, error) == (2.5, pytest.approx((5 / 3) ** 0.5 / 2))
    assert report.mean_with_error([1.0]) == (1.0, None)
