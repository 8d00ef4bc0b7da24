"""Tuning on published tables: few trials of the best variant of each layout lose almost nothing."""

from __future__ import annotations

import pytest
from published_steps import PublishedStep, published_steps
from step_time_accuracy import predictions_as_shipped
from tuner_choice import tuned


@pytest.fixture(scope="module")
def cases() -> list[tuple[PublishedStep, float]]:
    steps = [step for step in published_steps() if step.group]
    return list(zip(steps, predictions_as_shipped(steps), strict=True))


@pytest.mark.parametrize(
    ("table", "trials", "mean_regret", "worst_regret"),
    [("vTrain single node", 5, 0.005, 0.05), ("vTrain multi-node", 5, 0.005, 0.05), ("DeepSpeed", 4, 0.02, 0.02)],
)
def test_few_trials_lose_almost_nothing(
    cases: list[tuple[PublishedStep, float]], table: str, trials: int, mean_regret: float, worst_regret: float
) -> None:
    result = tuned([case for case in cases if case[0].table.startswith(table)], trials=trials)
    assert result is not None and result.mean_trials <= trials
    assert result.mean_regret <= mean_regret and result.worst_regret <= worst_regret
