"""Model FLOPs utilization of steps, and the reason that a plan gives when it is low."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from planning import public_model
from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.step_time.estimate import StepTime
from shardwright.ds_configs.step_time.utilization import LOW_UTILIZATION, utilization

LLAMA_8B, LLAMA_70B = public_model("meta-llama/Llama-3.1-8B"), public_model("meta-llama/Llama-3.1-70B")
H100 = parse_hardware("8xH100-80GB")
STEP = StepTime(seconds=2.0, low_seconds=1.0, high_seconds=4.0, tokens_per_second=50_000.0, terms={})


@pytest.mark.parametrize(("method", "passes"), [("full", 3), ("lora", 2)])
def test_utilization_counts_products_and_causal_attention_once_per_pass(method, passes):
    job = TrainingJob(method=method, seq_len_tokens=8192)
    sizes = LLAMA_8B.dimensions
    matrices = LLAMA_8B.parameter_count - LLAMA_8B.embedding_parameters - 65 * sizes.hidden_size
    attention = 3 * 4 * sizes.num_layers * 8192 / 2 * sizes.query_size
    expected = 50_000 * (2 * passes * matrices + attention) / (8 * H100.flops_per_s)
    assert utilization(STEP, LLAMA_8B, H100, job) == pytest.approx(expected)


def test_utilization_counts_the_experts_that_a_token_visits():
    mixtral, job = public_model("mistralai/Mixtral-8x7B-v0.1"), TrainingJob()
    active = replace(mixtral, dimensions=replace(mixtral.dimensions, experts_per_token=8))
    two, all_eight = (utilization(STEP, model, H100, job) for model in (mixtral, active))
    assert 3.4 < all_eight / two < 3.7


def test_a_plan_of_low_utilization_names_what_takes_the_time():
    plan = make_plan(LLAMA_70B, H100, TrainingJob())
    chosen = plan.chosen
    reached = utilization(chosen.time, plan.model, plan.hardware, plan.job)
    assert reached < LOW_UTILIZATION
    figures = re.search(r"MFU is (.+)%; the rest of a step is mostly optimizer on the host \((\d+)%\)", chosen.reason)
    assert figures is not None
    assert float(figures[1]) == pytest.approx(100 * reached, abs=0.1)
    assert float(figures[2]) == pytest.approx(100 * chosen.time.terms["host_optimizer"] / chosen.time.seconds, abs=1)
