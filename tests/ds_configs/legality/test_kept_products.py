"""Plans with selective recomputation: their cost, and where it is not supported."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning import RELEASE, llama, public_model
from shardwright.ds_configs.memory.activations import estimate_activations, load_selective
from shardwright.ds_configs.plan.plan import make_plan, plan_from_dict, plan_to_dict
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob

LLAMA = public_model("meta-llama/Llama-3.1-8B")
A100 = parse_hardware("8xA100-80GB")


def test_selective_recomputation_trades_memory_for_time():
    job = TrainingJob(gradient_checkpointing="selective", strategy="fsdp2", micro_batch_size=1)
    plans = {
        kind: make_plan(LLAMA, A100, replace(job, gradient_checkpointing=kind)) for kind in ("off", "selective", "on")
    }
    seconds = {kind: made.chosen.time.seconds for kind, made in plans.items()}
    peaks = {kind: made.chosen.memory.gpu.allocated_bytes for kind, made in plans.items()}
    assert seconds["off"] < seconds["selective"] < seconds["on"]
    assert peaks["off"] > peaks["selective"] > peaks["on"]
    made = plans["selective"]
    assert made.chosen.strategy.keeps_products and made.chosen.strategy.gradient_checkpointing
    assert "keeps matrix products and attention" in made.chosen.reason
    assert plan_from_dict(plan_to_dict(made), source="here").chosen.strategy == made.chosen.strategy


@pytest.mark.parametrize("family", sorted(load_selective(RELEASE)))
def test_selective_recomputation_keeps_inputs_and_products(family):
    """Counted by hand: input, attention with its fp32 maxima, and what six or seven matrices give."""
    sizes = LLAMA.dimensions
    if family == "gpt2":
        sizes = public_model("openai-community/gpt2").dimensions
    asked = {"family": family, "release": RELEASE, "dimensions": sizes, "micro_batch_size": 2, "seq_len_tokens": 64}
    found = estimate_activations(mode="bf16", **asked)
    hidden, inner, key_value = sizes.hidden_size, sizes.intermediate_size, sizes.key_value_size
    up = inner if family in ("gpt2", "starcoder2", "arcee") else 2 * inner
    # Input, query, attention and its fp32 maxima, output; keys and values; the MLP's two or three products.
    counted = 2 * (3 * hidden + 2 * sizes.query_size + 2 * key_value + up) + 4 * sizes.num_attention_heads
    kept = found.selective.kept_bytes_per_layer / (2 * 64)
    assert counted <= kept <= 1.1 * counted
    assert found.checkpointed_bytes_per_layer < found.selective.kept_bytes_per_layer < found.saved_bytes_per_layer


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensor_parallel_size": 2}, "data parallelism only"),
        ({"method": "lora"}, "full training only"),
        ({"precision": "fp32"}, "unknown for llama in fp32"),
    ],
)
def test_rejects_selective_recomputation_where_unsupported(changes, reason):
    with pytest.raises(UsageError, match=reason):
        make_plan(LLAMA, A100, TrainingJob(gradient_checkpointing="selective", **changes))


def test_rejects_selective_recomputation_without_traces():
    with pytest.raises(UsageError, match="unknown for mixtral"):
        mixture = public_model("mistralai/Mixtral-8x7B-v0.1")
        make_plan(mixture, A100, TrainingJob(gradient_checkpointing="selective"))
    assert make_plan(llama(), A100, TrainingJob(gradient_checkpointing="selective")).chosen.strategy.keeps_products
