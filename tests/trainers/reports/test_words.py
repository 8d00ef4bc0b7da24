"""Numbers as reports show them."""

from __future__ import annotations

import doctest

import pytest
from shardwright.cli import command_line
from shardwright.trainers.reports import comparison, words


@pytest.mark.parametrize("module", [words, comparison, command_line])
def test_examples(module) -> None:
    assert doctest.testmod(module).failed == 0


def test_a_standard_error_is_that_of_the_mean() -> None:
    mean, error = words.mean_with_error([1.0, 2.0, 3.0, 4.0])
    assert (mean, error) == (2.5, pytest.approx((5 / 3) ** 0.5 / 2))
    assert words.mean_with_error([1.0]) == (1.0, None)
