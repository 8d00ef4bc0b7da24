"""Legality rules of tensor parallelism, the DeepSpeed section it writes, and settings it rejects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parallel_rules import rule_errors
from shardwright.ds_configs.legality.axes import TENSOR_PARALLEL_FAMILIES, WITHOUT_TENSOR_PLAN, tensor_parallel_errors
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.deepspeed.auto_tp import (
    layers_without_rule,
    tensor_parallel_section,
    tensor_plan,
)
from shardwright.trainers.parallel.tensor import TensorParallelCallback

pytestmark = pytest.mark.slow

LEGAL: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "model_type": "llama",
    "zero_stage": 0,
    "world_size": 16,
    "ranks_per_node": 8,
}


def errors(size: int, **changes: Any) -> list[str]:
    return [str(error) for error in rule_errors(tensor_parallel_errors, tp=size, **(LEGAL | changes))]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 30}, "must divide the attention heads (30 % 4 = 2); nearest legal values: 2"),
        ({"num_key_value_heads": 2}, "must divide the key/value heads (2 % 4 = 2); nearest legal values: 2"),
        ({"intermediate_size": 1001}, "must divide the width of the MLP (1001 % 4 = 1)"),
        ({"ranks_per_node": 2}, "must divide the accelerators of a node (2 % 4 = 2)"),
        ({"world_size": 6}, "must divide the ranks (6 % 4 = 2)"),
        ({"zero_stage": 3}, "requires ZeRO stage 0 to 2, not 3"),
        ({"engine": "fsdp2", "zero_stage": None}, "is not supported with FSDP2"),
        (
            {"num_experts": 8, "intermediate_size": 1001},
            "AutoTP does not support mixtures of experts (8 experts per layer); use expert parallelism (ep) instead",
        ),
        ({"method": "lora"}, "is not supported with lora"),
        ({"sp": 2}, "cannot be combined with sp = 2"),
        ({"cp": 2}, "cannot be combined with cp = 2"),
        ({"ep": 2}, "cannot be combined with ep = 2"),
        ({"model_type": "gpt2"}, "model_type = 'gpt2': stores transposed Conv1D weights"),
        ({"model_type": "mamba"}, "is not verified with AutoTP"),
    ],
)
def test_each_rule_reports_the_violated_value(changes: dict[str, Any], message: str) -> None:
    (error,) = errors(4, **changes)
    assert message in error
    assert errors(1, **changes) == []


def test_all_errors_are_reported_together() -> None:
    messages = errors(5, zero_stage=3, method="qlora", sp=2)
    assert len(messages) == 8
    assert all(message.startswith("tp = 5: ") for message in messages)


@given(
    size=st.integers(1, 16),
    heads=st.integers(1, 64),
    groups=st.integers(1, 16),
    width=st.integers(1, 512),
    node=st.integers(1, 16),
)
def test_layout_is_legal_exactly_when_all_dimensions_are_divisible(
    size: int, heads: int, groups: int, width: int, node: int
) -> None:
    found = rule_errors(
        tensor_parallel_errors,
        tp=size,
        zero_stage=0,
        num_attention_heads=heads * groups,
        num_key_value_heads=groups,
        intermediate_size=width,
        vocab_size=7,
        ranks_per_node=node,
    )
    # Heads are a multiple of the groups of key/value heads.
    assert bool(found) == any(number % size for number in (groups, width, node))
    for error in found:
        assert error.value == size
        legal = [int(number) for number in error.fix.removeprefix("nearest legal values: ").split(", ")]
        assert legal
        assert not any(number % other for number in (groups, width, node) for other in legal)


def small(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    names = {"vocab_size": 64, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model(family, **(sizes | names | changes))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", sorted(TENSOR_PARALLEL_FAMILIES))
def test_every_matrix_of_a_supported_family_has_a_rule(family: str) -> None:
    model = small(family)
    assert layers_without_rule(model) == []
    assert tensor_plan(model)


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "stablelm"])
def test_families_without_tensor_plan_are_rejected(family: str) -> None:
    """A failure means that Transformers gained a plan for a family: verify it and remove it from the list."""
    assert "layers.*.self_attn.o_proj" not in tensor_plan(small(family, tie_word_embeddings=False))
    assert family in WITHOUT_TENSOR_PLAN
    assert layers_without_rule(small(family))


def test_autotp_still_lacks_the_split_input_style() -> None:
    """A failure means that DeepSpeed (0.19.8 seen) translates it: `partition_config` is then no longer needed."""
    from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES

    assert "rowwise_split_input" not in SUPPORTED_STYLES


def test_deepspeed_accepts_the_written_section() -> None:
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

    config = TPTrainingConfig(**tensor_parallel_section(small("phi3"), 4))
    assert config.autotp_size == 4
    found = config.get_partition_config_object()
    spec = found.find_matching_spec("model.layers.0.self_attn.qkv_proj.weight")
    assert spec is not None
    assert spec.gather_output


WRITTEN = {"autotp_size": 2, "vocab_parallel_lm_head": False}


def arguments(configuration: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Return the `TrainingArguments` fields that the callback reads, for two ranks."""
    values = {
        "bf16": False,
        "fp16": False,
        "deepspeed_plugin": SimpleNamespace(deepspeed_config=configuration) if configuration is not None else None,
        "world_size": 2,
        "process_index": 1,
        "parallelism_config": None,
        "accelerator_config": SimpleNamespace(split_batches=False, dispatch_batches=None),
    }
    return SimpleNamespace(**(values | changes))


def test_train_batch_size_is_multiplied_for_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    mismatches = ["- ds train_batch_size=12 vs hf train_batch_size (calculated)=24", "- another"]
    configuration: dict[str, Any] = {"zero_optimization": {"stage": 1}, "train_batch_size": 12}
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    given = arguments(configuration, **sizes, hf_deepspeed_config=SimpleNamespace(mismatches=mismatches))
    TensorParallelCallback(2).prepare(given, small("llama"))
    assert configuration["train_batch_size"] == 24
    assert given.hf_deepspeed_config.mismatches == ["- another"]


def test_prepare_writes_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    configuration: dict[str, Any] = {"zero_optimization": {"stage": 1}}
    TensorParallelCallback(2).prepare(arguments(configuration), small("llama"))
    assert configuration["tensor_parallel"] == WRITTEN
    assert configuration["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


@pytest.mark.parametrize(
    ("size", "configuration", "changes", "message"),
    [
        (2, None, {}, "requires DeepSpeed (AutoTP)"),
        (2, {"zero_optimization": {"stage": 3}}, {}, "not 3"),
        (4, {"zero_optimization": {"stage": 1}}, {}, "must divide the key/value heads (2 % 4 = 2)"),
        (2, {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 4}}, {}, "requires 2"),
        (
            2,
            {"zero_optimization": {"stage": 1}, "expert_parallel": {"enabled": True, "autoep_size": 2}},
            {},
            "cannot be combined with ep = 2",
        ),
        (
            2,
            {"zero_optimization": {"stage": 1}},
            {"parallelism_config": SimpleNamespace(tp_size=2, sp_size=2, cp_size=1)},
            "cannot be combined with sp = 2",
        ),
        (
            2,
            {"zero_optimization": {"stage": 1}},
            {"accelerator_config": SimpleNamespace(split_batches=True, dispatch_batches=True)},
            "accelerator_config.split_batches = True",
        ),
    ],
)
def test_prepare_rejects_unsupported_settings(
    size: int, configuration: dict[str, Any] | None, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        TensorParallelCallback(size).prepare(arguments(configuration, **changes), small("llama"))
    assert message in str(error.value)
