"""Time of a run, and warnings about a plan."""

from __future__ import annotations

import pytest
from planning import RELEASE, public_model
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.search.run_estimates import doubts, run_estimate
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.step_time.estimate import StepTime

NODE = parse_hardware("8xH100-80GB")
LLAMA_8B = public_model("meta-llama/Llama-3.1-8B")


def test_run_estimate_has_steps_and_hours() -> None:
    time = StepTime(seconds=2.0, low_seconds=1.0, high_seconds=4.0, tokens_per_second=5e5, terms={})
    run = run_estimate(time, NODE, tokens=1e9)
    assert (run.steps, run.seconds, run.low_seconds, run.high_seconds) == (1000, 2000.0, 1000.0, 4000.0)
    assert run.gpu_hours == pytest.approx(1000 * 2.0 * 8 / 3600)
    assert "1,000 steps" in str(run)


def test_doubts_name_what_was_not_checked() -> None:
    plan = make_plan(LLAMA_8B, parse_hardware("8xMI300X"), TrainingJob())
    assert any(
        "no step times of MI300X" in text for text in doubts(plan.chosen.layout, LLAMA_8B, plan.hardware, plan.job)
    )
    plan = make_plan(LLAMA_8B, NODE, TrainingJob())
    assert doubts(plan.chosen.layout, LLAMA_8B, plan.hardware, plan.job) == ()
    wide = make_plan(LLAMA_8B, parse_hardware("2x8xH100-80GB"), TrainingJob())
    (found,) = doubts(wide.chosen.layout, LLAMA_8B, wide.hardware, wide.job)
    assert "with half of that a step of this layout takes 1." in found


def test_fused_experts_of_qlora_are_named() -> None:
    mixture = public_model("mistralai/Mixtral-8x7B-v0.1")
    plan = make_plan(mixture, NODE, TrainingJob(method="qlora"))
    found = doubts(plan.chosen.layout, mixture, NODE, plan.job)
    assert any("fused experts (97% of the parameters) stay in 16 bit" in text for text in found)
    assert not any("16 bit" in text for text in doubts(plan.chosen.layout, mixture, NODE, TrainingJob(method="lora")))


def test_plans_with_linear_attention_name_its_kernels() -> None:
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    }
    model = model_spec_from_config(config, name="next", release=RELEASE)
    assert model is not None
    plan = make_plan(model, NODE, TrainingJob(seq_len_tokens=2048))
    assert any("flash-linear-attention" in text for text in doubts(plan.chosen.layout, model, plan.hardware, plan.job))
