"""Sequence parallelism: rules, shards and tiles, without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_rules import rule_errors
from shardwright.ds_configs.legality.axes import sequence_parallel_errors
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.deepspeed.engine import accept_train_batch_size, train_batch_size
from shardwright.plugins.transformers.tiled_compute import tile_mlps
from shardwright.trainers.counting.counts import labelled_tokens, shifted_labels
from shardwright.trainers.parallel.sequence import (
    argument_errors,
    cut,
    digest_of,
    loss_labels,
    model_errors,
    padding_and_packing,
)
from shared_sequences import arguments, sizes_of, tiny

pytestmark = pytest.mark.slow

IGNORED = -100
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 32}
LEGAL: dict[str, Any] = {
    "sp": 4,
    "engine": "deepspeed",
    "world_size": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "seq_len_tokens": 64,
}


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        ({"sp": 0}, "sp", "must be at least 1"),
        ({"engine": "fsdp2"}, "sp", "DeepSpeed"),
        ({"world_size": 6}, "sp", "6 % 4 = 2"),
        ({"num_attention_heads": 6}, "sp", "must divide the attention heads (6 % 4 = 2); nearest legal value: 2"),
        ({"num_attention_heads": 24, "num_key_value_heads": 6}, "sp", "(6 % 4 = 2); nearest legal value: 2"),
        ({"seq_len_tokens": 66}, "seq_len", "must be a multiple of sp (66 % 4 = 2); nearest legal values: 64 or 68"),
        ({"attention": "eager"}, "attn_implementation", "attn_implementation='sdpa'"),
        (
            {"attention": "eager", "offered_attention": ["flash_attention_2"]},
            "attn_implementation",
            "='flash_attention_2'",
        ),
        ({"attention": "eager", "offered_attention": []}, "attn_implementation", "use another model"),
        ({"attention": "flex_attention"}, "attn_implementation", "requires a mask"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "sp", "linear_attention layers carry a state"),
        ({"model_type": "mamba2"}, "sp", "mamba2 layers carry a state"),
        ({"model_type": "doge"}, "sp", "doge does not use the attention registry"),
        ({"model_type": "gpt2"}, "sp", "gpt2 has no loss with shift_labels"),
        ({"model_type": "gpt_oss"}, "sp", "gpt_oss has attention sinks"),
        ({"attention_window_tokens": 32}, "attn_implementation", "use flash_attention_2, or sequences up to 32 tokens"),
        ({"layer_types": ["chunked_attention"], "attention": "flash_attention_2"}, "attn_implementation", "use sp = 1"),
        ({"has_equal_head_widths": False}, "sp", "requires equal key and value widths"),
        ({"rope_type": "longrope"}, "rope_type", "last position of the full sequence"),
        ({"cp": 2}, "sp", "cp = 2"),
        ({"tp": 2, "pp": 2}, "sp", "tp = 2, pp = 2"),
    ],
)
def test_sequence_parallel_rules(change: dict[str, Any], where: str, message: str) -> None:
    (error,) = rule_errors(sequence_parallel_errors, **LEGAL | change)
    assert error.where == where
    assert message in str(error)


def test_legal_layouts_have_no_errors() -> None:
    assert rule_errors(sequence_parallel_errors, **LEGAL) == []
    assert rule_errors(sequence_parallel_errors, **LEGAL | {"attention_window_tokens": 64}) == []
    flash = {"attention": "flash_attention_2", "layer_types": ["sliding_attention", "full_attention"]}
    assert rule_errors(sequence_parallel_errors, **LEGAL | flash | {"attention_window_tokens": 8}) == []
    assert rule_errors(sequence_parallel_errors, **LEGAL | {"attention": "kernels-community/flash-attn2"}) == []
    off = {"sp": 1, "engine": "ddp", "attention": "eager", "num_attention_heads": 7}
    assert rule_errors(sequence_parallel_errors, **LEGAL | off) == []


@given(
    size=st.integers(1, 12),
    world=st.integers(1, 24),
    heads=st.integers(1, 24),
    kv=st.integers(1, 12),
    length=st.integers(1, 99),
)
def test_sizes_are_legal_exactly_when_deepspeed_accepts_them(
    size: int, world: int, heads: int, kv: int, length: int
) -> None:
    """The conditions are those of `UlyssesSPAttentionHF`, its groups and its data loader."""
    errors = rule_errors(
        sequence_parallel_errors,
        sp=size,
        engine="deepspeed",
        world_size=world,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        seq_len_tokens=length,
    )
    broken = [world % size, heads % size, kv % size and size % kv, length % size]
    assert len(errors) == sum(1 for rest in broken if rest)


def test_models_without_shareable_attention_are_rejected() -> None:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        MistralConfig,
        MistralForCausalLM,
        RobertaConfig,
        RobertaForCausalLM,
    )

    assert model_errors(tiny(), size=2, world_size=2) == []
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    odd = tiny(attn_implementation="eager", num_key_value_heads=1, rope_parameters=dynamic)
    errors = model_errors(odd, size=3, world_size=4)
    assert [error.where for error in errors] == ["sp", "sp", "attn_implementation", "rope_type"]
    windowed = MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=16))
    assert [error.where for error in model_errors(windowed, size=2, world_size=2)] == ["attn_implementation"]
    (error,) = model_errors(RobertaForCausalLM(RobertaConfig(**SIZES)), size=2, world_size=2)
    assert "both sides" in str(error)
    (error,) = model_errors(BertForMaskedLM(BertConfig(**SIZES, is_decoder=True)), size=2, world_size=2)
    assert "causal language model" in str(error)


STAGE3_WITHOUT_REDUCE_SCATTER = {"zero_optimization": {"stage": 3, "reduce_scatter": False}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"average_tokens_across_devices": False}, "means over the tokens of all ranks"),
        ({"train_sampling_strategy": "batch_rebalance"}, "gives different samples"),
        ({"eval_use_gather_object": True}, "gathers from every rank"),
        ({"predict_with_generate": True}, "call model.generate"),
        ({"accelerator_config": SimpleNamespace(split_batches=True)}, "splits a batch"),
        ({"accelerator_config": SimpleNamespace(split_batches=False, dispatch_batches=True)}, "from the first"),
        ({"neftune_noise_alpha": 5.0}, "scales noise by the length"),
        (
            {"deepspeed_plugin": SimpleNamespace(deepspeed_config=STAGE3_WITHOUT_REDUCE_SCATTER)},
            "adds gradients of some parameters over a sequence and averages those of others",
        ),
        ({"parallelism_config": sizes_of(sp=2, dp_replicate_size=2)}, "dp_replicate_size = 2"),
        (
            {"parallelism_config": sizes_of(sp=2, sp_handler=SimpleNamespace(sp_seq_length_is_variable=False))},
            "fixes the",
        ),
        ({"deepspeed_plugin": SimpleNamespace(deepspeed_config={"train_batch_size": 24})}, "write 12 or 'auto'"),
        ({"deepspeed_plugin": SimpleNamespace(deepspeed_config={"sequence_parallel_size": 4})}, "contradicts"),
        (
            {"deepspeed_plugin": SimpleNamespace(deepspeed_config={"tensor_parallel": {"autotp_size": 2}})},
            "cannot be combined",
        ),
        ({"parallelism_config": SimpleNamespace(sp_size=4, cp_size=1, tp_size=1)}, "requested size 2"),
        ({"parallelism_config": SimpleNamespace(sp_size=2, cp_size=1, tp_size=2)}, "tp_size = 2"),
    ],
)
def test_contradicting_arguments_are_rejected(change: dict[str, Any], message: str) -> None:
    (error,) = argument_errors(arguments(**change), size=2)
    assert message in str(error)


def test_transformers_still_rejects_the_true_batch_size(tmp_path: Any) -> None:
    """A failure means that transformers (5.17.0 seen) counts ranks that share a sequence once."""
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    own = TrainingArguments(str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=3, use_cpu=True)
    config = HfTrainerDeepSpeedConfig({"train_batch_size": 12, "zero_optimization": {"stage": 2}})
    with patch.object(TrainingArguments, "world_size", 4):
        config.trainer_config_process(own)
        assert train_batch_size(own, size=2) == 12
        assert config.mismatches
        own.hf_deepspeed_config, own.deepspeed_plugin = config, SimpleNamespace(deepspeed_config=config.config)
        accept_train_batch_size(own, size=2)
    assert config.mismatches == []
    started = arguments(deepspeed_plugin=SimpleNamespace(deepspeed_config={"train_batch_size": 12}))
    accept_train_batch_size(started, size=2)
    assert started.deepspeed_plugin.deepspeed_config["train_batch_size"] == "auto"


@given(data=st.data(), samples=st.integers(1, 3), tokens=st.integers(2, 17), ranks=st.integers(1, 5))
@settings(max_examples=60)
def test_shards_hold_every_token_and_label_exactly_once(data: Any, samples: int, tokens: int, ranks: int) -> None:
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    ids = torch.randint(1, 50, (samples, tokens), generator=draw)
    labels = torch.where(torch.rand(samples, tokens, generator=draw) < 0.4, IGNORED, ids)
    weights = torch.rand(samples, tokens, 3, generator=draw)
    batch = {"input_ids": ids, "labels": labels, "weights": weights, "names": ["a"], "scale": torch.ones(samples)}
    shards = [cut(batch, ranks=ranks, rank=rank, pad_token_id=7) for rank in range(ranks)]
    whole = {name: torch.cat([shard[name] for shard in shards], dim=1) for name in ("input_ids", "position_ids")}
    length = -(-tokens // ranks)
    assert all(shard["input_ids"].shape == (samples, length) for shard in shards)
    assert torch.equal(whole["input_ids"][:, :tokens], ids)
    assert (whole["input_ids"][:, tokens:] == 7).all()
    assert torch.equal(whole["position_ids"], torch.arange(length * ranks).expand(samples, -1))
    assert torch.equal(torch.cat([shard["weights"] for shard in shards], dim=1)[:, :tokens], weights)
    # What a single process would compare with the logits of each position.
    expected = torch.full((samples, length * ranks), IGNORED)
    expected[:, : tokens - 1] = labels[:, 1:]
    assert torch.equal(torch.cat([shard["shift_labels"] for shard in shards], dim=1), expected)
    assert int((labels[:, 1:] != IGNORED).sum()) == int(labelled_tokens([batch]))  # type: ignore[arg-type]
    for shard in shards:
        assert (shard["names"], shard["unsharded_tokens"]) == (["a"], tokens)
        assert torch.equal(shard["scale"], batch["scale"])  # type: ignore[arg-type]
        shifting, aligned = (loss_labels(shard["shift_labels"], shifts=shifts) for shifts in (True, False))
        assert torch.equal(shifting[:, 1:], aligned)
        assert (aligned != IGNORED).any()


def test_shifted_labels_are_not_shifted_again() -> None:
    shifted = torch.tensor([[5, 6, IGNORED, IGNORED]])
    assert shifted_labels({"shift_labels": shifted, "labels": shifted + 1}) is shifted
    assert shifted_labels({"input_ids": shifted}) is None
    assert labelled_tokens([{"input_ids": shifted}]) is None


def test_masks_and_positions_show_padding_and_packing() -> None:
    right, left = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    restarts, counting = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[3, 4, 5, 6]])
    assert padding_and_packing([{"input_ids": right}]) == (False, False)
    assert padding_and_packing([{"attention_mask": right}]) == (False, False)
    assert padding_and_packing([{"attention_mask": right}, {"attention_mask": left}]) == (True, False)
    assert padding_and_packing([{"position_ids": counting}]) == (False, False)
    assert padding_and_packing([{"position_ids": restarts}]) == (False, True)
    # Collators put any position beside padding.
    assert padding_and_packing([{"position_ids": restarts, "attention_mask": right[:1]}]) == (False, False)
    assert padding_and_packing([{"attention_mask": torch.tensor([[1, 1, 2, 2]])}]) == (False, True)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def test_first_tiled_mlp_trains_after_a_frozen_embedding() -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    mlp = tiny().model.layers[0].mlp
    x = torch.randn(1, 8, 32)
    # Fails when deepspeed (0.19.8) lets parameters alone ask for a gradient.
    assert not TiledMLP.apply(lambda _, tile: mlp(tile), mlp, x, 2, list(mlp.parameters())).requires_grad
    holder = torch.nn.Module()
    holder.mlp, holder.config = mlp, tiny().config
    expected = gradients(mlp, mlp(x).square().sum())
    tile_mlps(holder, 2)
    found = gradients(mlp, mlp(x).square().sum())
    assert all(torch.allclose(found[name], one, atol=1e-5) for name, one in expected.items())


def test_fused_tiled_loss_misses_factors_of_its_head() -> None:
    """A failure means that deepspeed (0.19.8 seen) scales the head's gradient with the loss: it can be used then."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    head, x, y = torch.nn.Linear(8, 16, bias=False), torch.randn(1, 6, 8, requires_grad=True), torch.randint(16, (1, 6))

    def loss_of(module: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(module(hidden), labels, reduction="sum")

    expected = gradients(head, 0.25 * loss_of(head, x[0], y[0]))["weight"]
    found = gradients(head, 0.25 * TiledFusedLogitsLoss.apply(loss_of, head, x, y, None, 2, [head.weight], "sum"))
    assert found == {} or not torch.allclose(found["weight"], expected)


def test_document_borders_require_positions() -> None:
    borders = {"cu_seq_lens_q": torch.tensor([0, 3, 5]), "max_length_q": 3}
    batch = {"input_ids": torch.arange(5)[None], "position_ids": torch.tensor([[0, 1, 2, 0, 1]]), **borders}
    assert cut(batch, ranks=2, rank=1).keys() == {"input_ids", "position_ids", "unsharded_tokens"}
    with pytest.raises(UsageError, match="position_ids"):
        cut({"input_ids": torch.arange(5)[None], **borders}, ranks=2, rank=0)


def test_layers_without_exchanged_attention_are_rejected() -> None:
    from shardwright.plugins.deepspeed.ulysses import SharedSequence
    from transformers import DogeConfig, DogeForCausalLM

    shared, model = SharedSequence(2), tiny()
    shared.exchanges = 1
    with pytest.raises(UsageError, match="in 1 of 2 layers"):
        shared.check_exchanges(model)
    shared.exchanges = 2
    shared.check_exchanges(model)
    own = DogeForCausalLM(
        DogeConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=32)
    )
    own.config.model_type = "another"
    assert any("registry of attention functions" in str(error) for error in model_errors(own, size=2, world_size=2))
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    assert any("attention sink" in str(error) for error in model_errors(model, size=2, world_size=2))


def test_batches_with_other_content_have_other_digests() -> None:
    ids = torch.arange(10).reshape(2, 5)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    same = {name: value.clone() for name, value in reversed(batch.items())} | {"text": "not a tensor"}
    assert digest_of(same) == digest_of(batch)
    others = (ids.flip(0), ids.reshape(5, 2), ids.to(torch.float64))
    changes = [*({"input_ids": other} for other in others), {"pixels": ids}]
    assert digest_of(batch) not in {digest_of(batch | change) for change in changes}


def test_attention_takes_its_mask_by_name() -> None:
    """Some models of Transformers pass it so, such as Doge."""
    from shardwright.plugins.deepspeed import ulysses

    def core(module: Any, query: Any, key: Any, value: Any, attention_mask: Any) -> tuple[Any, Any]:
        return query, attention_mask

    module, chosen = torch.nn.Module(), ulysses._ChosenAttention(core)
    assert chosen(module, 1, 2, 3, attention_mask=4) == (1, 4)
    shared = SimpleNamespace(active=True, exchanges=0, attention=core)
    chosen.sequences[module] = shared  # type: ignore[assignment]
    assert chosen(module, 1, 2, 3, attention_mask=4) == (1, None) and shared.exchanges == 1
