"""Recomputation of the first layers alone: the flags, the memory that it keeps, and gradients that stay the same."""

from __future__ import annotations

import pytest
import torch
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.transformers.gradient_checkpointing import (
    checkpoint_first_layers,
    decoder_layers,
    offload_checkpoints,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def model_of(model_type: str, **sizes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(_SIZES | sizes))
    return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_are_the_same_and_the_first_layers_run_twice(count) -> None:
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    plain, partial = model_of("llama"), model_of("llama")
    partial.gradient_checkpointing_enable()
    checkpoint_first_layers(partial, count)
    runs = [0] * 4
    for index, layer in enumerate(decoder_layers(partial)):

        def counted(module, arguments, index=index):
            runs[index] += 1

        layer.mlp.register_forward_pre_hook(counted)
    for model in (plain, partial):
        model.train()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert runs == [2 if index < count else 1 for index in range(4)]
    for one, other in zip(plain.parameters(), partial.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_the_decoder_of_two_stacks_counts() -> None:
    config = AutoConfig.for_model("t5", d_model=32, d_ff=64, d_kv=8, num_heads=4, num_layers=2, vocab_size=64)
    model = AutoModelForSeq2SeqLM.from_config(config, trust_remote_code=False)
    model.gradient_checkpointing_enable()
    assert checkpoint_first_layers(model, 1) == 2
    assert [block.gradient_checkpointing for block in model.get_decoder().block] == [True, False]
    assert [block.gradient_checkpointing for block in model.get_encoder().block] == [True, True]


def test_layers_stay_the_same_when_checkpointing_is_disabled_for_a_while() -> None:
    model = model_of("llama")
    model.gradient_checkpointing_enable()
    checkpoint_first_layers(model, 2)
    offload_checkpoints(model, 1)
    functions = [layer._gradient_checkpointing_func for layer in decoder_layers(model)]
    for _ in range(2):
        model.gradient_checkpointing_disable()
        assert not model.is_gradient_checkpointing
        model.gradient_checkpointing_enable()
        assert [layer.gradient_checkpointing for layer in decoder_layers(model)] == [True, True, False, False]
        assert [layer._gradient_checkpointing_func for layer in decoder_layers(model)] == functions


@pytest.mark.needs("trl")
def test_transformers_still_enables_all_layers_again() -> None:
    from trl.models.utils import disable_gradient_checkpointing

    model = model_of("llama")
    model.gradient_checkpointing_enable()
    for index, layer in enumerate(decoder_layers(model)):
        layer.gradient_checkpointing = index < 1
    with disable_gradient_checkpointing(model):
        assert not model.is_gradient_checkpointing
    assert all(layer.gradient_checkpointing for layer in decoder_layers(model))


def test_what_cannot_be_recomputed_is_rejected() -> None:
    with pytest.raises(UsageError, match="finds no layers"):
        checkpoint_first_layers(torch.nn.Linear(2, 2), 1)
    with pytest.raises(UsageError, match="needs gradient checkpointing, which is off"):
        checkpoint_first_layers(model_of("llama"), 1)
