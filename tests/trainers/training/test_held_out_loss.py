"""The held-out loss of a training run: what it counts."""

from __future__ import annotations

import math

import pytest
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.trainers.counting.counts import evaluated_mean


def test_a_batch_that_is_not_finite_is_not_left_out() -> None:
    """As Transformers 5.23 filters losses by default, and 5.17 does not."""
    assert evaluated_mean([4.0, 6.0], [2, 3]) == 2.0
    assert math.isnan(evaluated_mean([4.0, math.nan], [2, 3]))


def test_a_set_without_labels_has_no_loss() -> None:
    with pytest.raises(UsageError, match="eval_dataset: has no token with a label"):
        evaluated_mean([0.0, 0.0], [0, 0])
