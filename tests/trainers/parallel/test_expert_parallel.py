"""Expert parallelism without ranks: rules, arithmetic, and settings that are rejected before a Trainer exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parallel_rules import rule_errors
from shardwright.ds_configs.legality.axes import AUTO_EP_MODEL_TYPES, expert_errors
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.deepspeed.auto_ep import expert_model_errors, write_section
from shardwright.trainers.parallel.balance_loss import (
    RoutedTokens,
    balance_loss_share,
)
from shardwright.trainers.parallel.expert import ExpertParallelCallback
from transformers import TrainingArguments

pytestmark = pytest.mark.slow

LEGAL: dict[str, Any] = {"ep": 4, "model_type": "mixtral", "num_experts": 8, "dp_shard": 8, "zero_stage": 2}
EXPERTS = 4


def mixtral(**settings: Any) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MixtralForCausalLM(
        MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=32, num_local_experts=EXPERTS, **settings)
    )


@given(
    ep=st.integers(2, 64),
    num_experts=st.integers(1, 256),
    data_parallel_size=st.integers(1, 64),
    model_type=st.sampled_from(AUTO_EP_MODEL_TYPES),
)
def test_sizes_are_legal_exactly_when_they_divide(
    ep: int, num_experts: int, data_parallel_size: int, model_type: str
) -> None:
    errors = rule_errors(
        expert_errors, ep=ep, model_type=model_type, num_experts=num_experts, dp_shard=data_parallel_size
    )
    divides = num_experts % ep == 0 and data_parallel_size % ep == 0
    assert divides == (not errors)
    for error in errors:
        assert f"% {ep} = " in error.rule
        for legal in error.fix.removeprefix("nearest legal values: ").split(", "):
            assert num_experts % int(legal) == 0
            assert data_parallel_size % int(legal) == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ep": 0}, "at least 1"),
        ({"num_experts": 0}, "the model is dense"),
        ({"model_type": "gpt_oss"}, "supported: mixtral, qwen2_moe, qwen3_moe, deepseek_v2, deepseek_v3"),
        ({"engine": "fsdp2"}, "not fsdp2"),
        ({"tp": 2}, "cannot be combined with tp = 2"),
        ({"pp": 2}, "cannot be combined with pp = 2"),
        ({"sp": 2}, "cannot be combined with sp = 2"),
        ({"cp": 2}, "cannot be combined with cp = 2"),
        ({"zero_stage": 3, "hpz_partition_size": 8}, "cannot be combined with hpz_partition_size = 8 in ZeRO-3"),
        ({"zero_stage": 3, "quantized_gradients": True}, "cannot be combined with quantized_gradients in ZeRO-3"),
        ({"offload_param": "nvme"}, "cannot save expert optimizer states from NVMe"),
        ({"offload_optimizer": "nvme"}, "cannot save expert optimizer states from NVMe"),
        ({"method": "qlora"}, "ep = 4: is not supported with qlora"),
        ({"zero_stage": 0, "precision": "bf16"}, "requires fp32"),
    ],
)
def test_each_violated_rule_is_one_error(change: dict[str, Any], named: str) -> None:
    assert rule_errors(expert_errors, **LEGAL) == []
    (error,) = rule_errors(expert_errors, **LEGAL | change)
    assert named in str(error)
    assert rule_errors(expert_errors, **LEGAL | change | {"ep": 1}) == []


def test_every_named_model_type_has_a_preset() -> None:
    from deepspeed.module_inject.auto_ep_presets.registry import preset_name_for_hf_model_type

    assert all(preset_name_for_hf_model_type(model_type) for model_type in AUTO_EP_MODEL_TYPES)


def routed(logits_TE: torch.Tensor, top_k: int = 2) -> RoutedTokens:
    selected_TK = logits_TE.topk(top_k, dim=-1).indices
    return RoutedTokens(logits_TE=logits_TE, selected_TK=selected_TK)


@pytest.mark.parametrize("padded", [False, True])
def test_shares_sum_to_the_balance_loss_of_the_global_batch(padded: bool) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(0)
    ranks, tokens = 3, 10
    logits = [torch.randn(ranks, tokens, EXPERTS, requires_grad=True) for _ in range(2)]
    mask_RT = (torch.rand(ranks, tokens) < 0.7).float() if padded else None
    flat = tuple(each.reshape(-1, EXPERTS) for each in logits)
    expected = load_balancing_loss_func(flat, EXPERTS, 2, None if mask_RT is None else mask_RT.reshape(1, -1))
    gradients = torch.autograd.grad(expected, logits)

    sums: list[torch.Tensor] = []

    def share(rank: int, sum_over_ranks: Any) -> torch.Tensor:
        layers = [routed(each[rank]) for each in logits]
        return balance_loss_share(layers, None if mask_RT is None else mask_RT[rank], sum_over_ranks)

    for rank in range(ranks):
        share(rank, lambda tensor: sums.append(tensor.clone()))
    total = torch.stack(sums).sum(0)
    shares = [share(rank, lambda tensor: tensor.copy_(total)) for rank in range(ranks)]
    assert sum(shares).item() == pytest.approx(expected.item(), rel=1e-6)
    for found, wanted in zip(torch.autograd.grad(sum(shares), logits), gradients, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: mixtral().model, "has no layers `model.layers.N.mlp`"),
        (lambda: mixtral().requires_grad_(False), "experts.gate_up_proj is frozen"),
        (lambda: mixtral(router_jitter_noise=0.1), "AutoEP's router adds no noise"),
    ],
)
def test_models_that_would_train_differently_are_rejected(model: Any, named: str) -> None:
    (error,) = expert_model_errors(model())
    assert named in str(error)


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a factory of TrainingArguments with DeepSpeed; reset the state of the process afterwards."""
    from fresh_process import forget_last_run

    def make(section: dict[str, Any] | None = None, stage: int = 2, **settings: Any) -> Any:
        configuration: dict[str, Any] = {"zero_optimization": {"stage": stage}, "train_batch_size": "auto"}
        if section is not None:
            configuration["expert_parallel"] = section
        return TrainingArguments(str(tmp_path), use_cpu=True, deepspeed=configuration, report_to="none", **settings)

    yield make
    forget_last_run()


def errors_of(callback: ExpertParallelCallback, made: Any, model: Any) -> list[str]:
    with pytest.raises(UsageError) as caught:
        callback.prepare(made, model)
    return [str(error) for error in caught.value.errors]


def test_contradicting_section_keys_are_reported_together(arguments: Callable[..., Any]) -> None:
    section = {"enabled": False, "autoep_size": 4, "use_groupd_mm": True, "top_k": 1}
    messages = errors_of(ExpertParallelCallback(2), arguments(section), mixtral())
    assert "ep = 2: must divide the data-parallel ranks (1 % 2 = 1)" in messages[0]
    assert [text.partition(" ")[0].partition(":")[0] for text in messages[1:]] == [
        *("expert_parallel.enabled", "expert_parallel.autoep_size"),
        *("expert_parallel.use_groupd_mm", "expert_parallel.top_k"),
    ]
    assert "did you mean 'use_grouped_mm'?" in messages[3]


def test_reentrant_recomputation_with_balance_loss_is_rejected(arguments: Callable[..., Any]) -> None:
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    messages = errors_of(ExpertParallelCallback(2), arguments(**settings), mixtral(output_router_logits=True))
    assert any("use_reentrant = True" in text for text in messages)


def test_greedy_routing_still_needs_its_keys() -> None:
    """A failure means that DeepSpeed no longer reads `n_group` for greedy routing: remove `_routing` then."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8}
    routing = {"topk_method": "greedy", "n_routed_experts": 8, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 2}
    config = DeepseekV2Config(
        **sizes, **heads, **routing, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=0, vocab_size=32
    )
    model = DeepseekV2ForCausalLM(config)
    configuration: dict[str, Any] = {}
    write_section(configuration, config, 2)
    groups = [
        AutoEP(model, parse_autoep_config(section)).ep_parser()[0].num_expert_groups
        for section in ({"enabled": True, "autoep_size": 2}, configuration["expert_parallel"])
    ]
    assert groups == [4, 1]
