"""Tuning on published tables: few trials of the best variant of each layout lose almost nothing."""

from __future__ import annotations

from collections import defaultdict
from statistics import mean

import pytest
from published_steps import PublishedStep, published_steps
from shardwright.ds_configs.search.tuning import WORTH_MEASURING
from step_time_accuracy import predictions_as_shipped


@pytest.fixture(scope="module")
def cases() -> list[tuple[PublishedStep, float]]:
    steps = [step for step in published_steps() if step.group]
    return list(zip(steps, predictions_as_shipped(steps), strict=True))


def kept_seconds(rows: list[tuple[PublishedStep, float]], *, trials: int) -> tuple[float, int]:
    """Return the measured seconds of what a tuning keeps, and its trials; rows have predictions."""
    variants: dict[object, tuple[float, float]] = {}
    for case, predicted in rows:
        layout = case.layout
        ranks = layout.dp_replicate, layout.dp_shard, case.software.optimizer_ranks
        variant = (layout.engine, layout.zero_stage, *layout.axes.items(), *ranks)
        if variant not in variants or predicted < variants[variant][0]:
            variants[variant] = predicted, case.seconds
    # Equal predictions stay in the table's order: the measurement must not decide which is tried.
    fastest_first = sorted(variants.values(), key=lambda times: times[0])
    limit = fastest_first[0][0] * (1 + WORTH_MEASURING)
    measured = [seconds for predicted, seconds in fastest_first if predicted <= limit][:trials]
    return min(measured), len(measured)


@pytest.mark.parametrize(
    ("table", "trials", "mean_regret", "worst_regret"),
    [("vTrain single node", 5, 0.005, 0.05), ("vTrain multi-node", 5, 0.005, 0.05), ("DeepSpeed", 4, 0.02, 0.02)],
)
def test_few_trials_lose_almost_nothing(
    cases: list[tuple[PublishedStep, float]], table: str, trials: int, mean_regret: float, worst_regret: float
) -> None:
    groups: dict[str, list[tuple[PublishedStep, float]]] = defaultdict(list)
    for case, predicted in cases:
        if case.table.startswith(table):
            groups[case.group].append((case, predicted))
    regrets, counts = [], []
    for rows in groups.values():
        # From three configurations on, the best of them is a result.
        if len(rows) >= 3:
            seconds, count = kept_seconds(rows, trials=trials)
            regrets.append(seconds / min(case.seconds for case, _ in rows) - 1)
            counts.append(count)
    assert mean(counts) <= trials
    assert mean(regrets) <= mean_regret and max(regrets) <= worst_regret
