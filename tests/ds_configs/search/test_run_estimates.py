"""Questions about a run, against arithmetic done here."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import public_model
from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.search.run_estimates import (
    checkpoint_interval_seconds,
    clusters,
    doubts,
    lost_to_failures,
    parse_duration,
    plain_batch_sizes,
    run_cost,
    slowest_node,
    smallest_for_deadline,
)
from shardwright.ds_configs.specs.errors import ShardwrightError, UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.step_time.estimate import StepTime

NODE = parse_hardware("8xH100-80GB")
LLAMA_8B = public_model("meta-llama/Llama-3.1-8B")


def step(seconds: float, tokens: float) -> StepTime:
    return StepTime(
        seconds=seconds, low_seconds=seconds / 2, high_seconds=2 * seconds, tokens_per_second=tokens / seconds, terms={}
    )


def test_run_cost_has_steps_hours_energy_and_price() -> None:
    cost = run_cost(step(2.0, 1e6), NODE, tokens=1e9, gpu_hour_price=3.0)
    hours = 1000 * 2.0 * 8 / 3600
    assert (cost.steps, cost.seconds) == (1000, 2000.0)
    assert cost.gpu_hours == pytest.approx(hours)
    assert cost.energy_kwh == pytest.approx(hours * 0.7 * 1.45)
    assert cost.price == pytest.approx(3 * hours)
    assert (cost.low_seconds, cost.high_seconds) == (1000.0, 4000.0)
    assert "1,000 steps" in str(cost)
    assert run_cost(step(2.0, 1e6), replace(NODE, gpu="custom"), tokens=1e9).energy_kwh is None
    with pytest.raises(UsageError, match="tokens = -1"):
        run_cost(step(2.0, 1e6), NODE, tokens=-1)


@given(gpus=st.integers(1, 3000), tokens=st.floats(1e9, 1e13))
def test_the_smallest_cluster_meets_the_deadline_and_one_node_less_does_not(gpus: int, tokens: float) -> None:
    def solve(cluster):
        return step(1.0, 1000.0 * cluster.world_size)

    deadline = tokens / (1000.0 * gpus)
    found = smallest_for_deadline(NODE, solve, tokens=tokens, deadline_seconds=deadline + 1)
    assert found.cost.seconds <= deadline + 1
    size = found.hardware.world_size
    # Below a node by halves, beyond it by nodes.
    fewer = size - 8 if found.hardware.nodes > 1 else size // 2
    if fewer:
        smaller = replace(NODE, nodes=1, gpus_per_node=fewer)
        assert run_cost(solve(smaller), smaller, tokens=tokens).seconds > deadline + 1


def test_impossible_deadline_names_the_fastest_cluster() -> None:
    with pytest.raises(
        ShardwrightError,
        match=r"deadline = 1 days: no cluster of H100-80GB meets it; the fastest, 1xH100-80GB, takes 11",
    ):
        smallest_for_deadline(NODE, lambda cluster: step(1.0, 1e6), tokens=1e12, deadline_seconds=86400)
    with pytest.raises(ShardwrightError, match="does not fit on up to 16,384"):
        smallest_for_deadline(NODE, lambda cluster: None, tokens=1e12, deadline_seconds=86400)


def test_clusters_grow_by_doubling() -> None:
    sizes = [cluster.world_size for cluster in clusters(NODE, most=64)]
    assert sizes == [1, 2, 4, 8, 16, 32, 64]


@given(save=st.floats(1, 600), ranks=st.sampled_from([8, 1024, 16384]))
def test_checkpoint_interval_loses_less_than_nearby_intervals(save: float, ranks: int) -> None:
    """Young's model of what is lost, `save / interval + interval / 2 mtbf`, has its minimum near the interval."""
    mtbf = 50_000 * 3600 / ranks
    interval = checkpoint_interval_seconds(save_seconds=save, world_size=ranks)
    assert interval == pytest.approx(sqrt(2 * save * mtbf), rel=0.2)

    def lost(every: float) -> float:
        return save / every + every / (2 * mtbf)

    assert lost(interval) <= 1.05 * min(lost(interval * factor) for factor in (0.5, 0.8, 1.25, 2))
    assert 0 < lost_to_failures(save_seconds=save, world_size=ranks) < 1


def test_checkpoint_interval_is_at_most_the_mtbf() -> None:
    assert checkpoint_interval_seconds(save_seconds=1e6, world_size=8, mtbf_hours=1) == 3600
    with pytest.raises(UsageError, match="save_seconds"):
        checkpoint_interval_seconds(save_seconds=0, world_size=8)


@given(batch=st.integers(1, 10_000), ranks=st.integers(1, 512), micro=st.integers(1, 8))
def test_plain_batch_sizes_are_the_nearest_multiples(batch: int, ranks: int, micro: int) -> None:
    found = plain_batch_sizes(global_batch_size=batch, ranks=ranks, micro_batch_size=micro)
    assert all(size % (ranks * micro) == 0 for size in found)
    assert found[0] <= batch <= found[-1] or found[0] == ranks * micro
    assert all(abs(size - batch) < ranks * micro for size in found)


def test_slowest_of_unequal_nodes_limits_the_cluster() -> None:
    old, new = parse_hardware("8xA100-40GB"), parse_hardware("2x8xH100-80GB")
    cluster, notes = slowest_node([new, old])
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu) == (3, 8, "A100-40GB")
    assert cluster.gpu_bytes == old.gpu_bytes
    assert cluster.flops_per_s == old.flops_per_s
    assert any(
        note.startswith("flops_per_s: limited to") and "A100-40GB" in note and note.endswith("more: 2")
        for note in notes
    )
    odd, notes = slowest_node([new, parse_hardware("6xH100-80GB")])
    assert (odd.world_size, odd.gpus_per_node) == (18, 6)
    assert any("4 accelerators stay idle" in note for note in notes)
    with pytest.raises(UsageError, match="at least one node"):
        slowest_node([])


@pytest.mark.parametrize("hardware", ["3x8xH100-80GB", "6xA100-80GB", "5x4xA100-80GB"])
def test_accelerator_counts_need_not_be_powers_of_two(hardware: str) -> None:
    plan = make_plan(LLAMA_8B, parse_hardware(hardware), TrainingJob(global_batch_size=360, seq_len_tokens=2048))
    assert plan.chosen.strategy.world_size == plan.hardware.world_size
    assert plan.chosen.strategy.global_batch_size == 360


def test_doubts_name_what_was_not_checked() -> None:
    plan = make_plan(LLAMA_8B, parse_hardware("8xMI300X"), TrainingJob())
    assert any(
        "no step times of MI300X" in text for text in doubts(plan.chosen.strategy, LLAMA_8B, plan.hardware, plan.job)
    )
    plan = make_plan(LLAMA_8B, NODE, TrainingJob())
    assert doubts(plan.chosen.strategy, LLAMA_8B, plan.hardware, plan.job) == ()
    wide = make_plan(LLAMA_8B, parse_hardware("2x8xH100-80GB"), TrainingJob())
    (found,) = doubts(wide.chosen.strategy, LLAMA_8B, wide.hardware, wide.job)
    assert "with half of that a step of this layout takes 1." in found


@pytest.mark.parametrize(("text", "seconds"), [("5d", 432_000), ("36h", 129_600), ("90m", 5400), ("30s", 30)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["5", "d", "-1d", "5y", "nand"])
def test_invalid_durations_are_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="such as 5d"):
        parse_duration(text)


def test_the_cheapest_plan_may_leave_accelerators_idle() -> None:
    job = TrainingJob(global_batch_size=16, seq_len_tokens=512)
    slow = replace(parse_hardware("4x8xH100-80GB"), network_bytes_per_s=1e9)
    cheap = make_plan(LLAMA_8B, slow, replace(job, objective="cost"))
    fast = make_plan(LLAMA_8B, slow, job)
    each = [plan.chosen.time.tokens_per_second / plan.hardware.world_size for plan in (cheap, fast)]
    assert cheap.hardware.world_size < fast.hardware.world_size
    assert each[0] > each[1]


def test_changes_of_the_numbers_are_only_offered() -> None:
    plan = make_plan(public_model("meta-llama/Llama-3.2-1B"), parse_hardware("1xRTX4090"), TrainingJob())
    assert plan.job.optimizer == "adamw_torch_fused"
    offered = {offer.change: offer.times_faster for offer in plan.offers}
    # The offer keeps the global batch, which this job left open.
    assert offered["--global-batch-size 1 --optimizer adamw_8bit"] > 1.05
    assert make_plan(LLAMA_8B, parse_hardware("8xH200"), TrainingJob()).offers == ()


def test_padding_an_odd_vocabulary_is_offered() -> None:
    gpt2 = public_model("openai-community/gpt2")
    offers = make_plan(gpt2, parse_hardware("8xA100-80GB"), TrainingJob(seq_len_tokens=1024)).offers
    assert [offer.change for offer in offers] == ["model.resize_token_embeddings(50304) instead of 50257 rows"]
    # nanoGPT, whose other layers are compiled, became about 25 % faster by it on A100.
    assert 1.1 < offers[0].times_faster < 1.3
