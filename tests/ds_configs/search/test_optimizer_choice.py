"""`--optimizer auto` for a model of 8 billion parameters: the smallest change of numerics with which it fits."""

from __future__ import annotations

import pytest
from planning import public_model
from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob


@pytest.mark.parametrize(
    ("hardware", "host_memory", "optimizer", "words"),
    [
        ("1xA6000", None, "adafactor", "adamw_torch_8bit with bf16 weights do not fit."),
        ("8xA100-80GB", None, "adamw_torch_fused", "which fits: no change of numerics is needed"),
        # The optimizer is offloaded, and optimizers that were tried later are no reason.
        ("1xRTX4090", "256GB", "adamw_torch_fused", "which fits: no change of numerics is needed"),
    ],
)
def test_auto_returns_the_smallest_change_that_fits(
    hardware: str, host_memory: str | None, optimizer: str, words: str
) -> None:
    job = TrainingJob(seq_len_tokens=4096, optimizer="auto", weights_dtype="auto")
    model = public_model("meta-llama/Llama-3.1-8B")
    plan = make_plan(model, parse_hardware(hardware, host_memory=host_memory), job)
    assert plan.job.optimizer == optimizer
    assert words in plan.chosen.reason
