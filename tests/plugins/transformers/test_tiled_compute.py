"""What tiles of an MLP keep until the backward pass, and what ZeRO-3 gathers for tiles of a head with adapters."""

from __future__ import annotations

import weakref
from typing import Any

import deepspeed
import peft
import pytest
import torch
from shardwright.plugins.transformers.tiled_compute import share_tiled_mlps, tile_mlps
from small_models import llama
from torch.utils.checkpoint import checkpoint


def test_a_recomputed_layer_keeps_no_input_of_its_tiled_mlp() -> None:
    model = llama(num_hidden_layers=1)
    tile_mlps(model, 3)
    mlp, inputs = model.model.layers[0].mlp, list[Any]()

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        normed = hidden * 2
        inputs.append(weakref.ref(normed))
        return mlp(normed)

    hidden = torch.randn(1, 10, model.config.hidden_size, requires_grad=True)
    output = checkpoint(layer, hidden, use_reentrant=False)
    assert inputs[0]() is None
    output.sum().backward()
    plain = llama(num_hidden_layers=1).model.layers[0].mlp
    plain.load_state_dict(mlp.state_dict())
    expected = torch.autograd.grad(plain(hidden * 2).sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected)


def test_zero3_gathers_a_head_with_adapters_once_for_all_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["lm_head"])).get_base_model()
    for parameter in model.parameters():
        parameter.ds_id = 0
    gathered: list[tuple[Any, Any]] = []
    monkeypatch.setattr(deepspeed.zero, "register_external_parameter", lambda *pair: gathered.append(pair))
    tile_mlps(model, None)
    share_tiled_mlps(model)
    shared = [model.get_output_embeddings(), *(layer.mlp for layer in model.model.layers)]
    expected = {(id(module), id(weight)) for module in shared for weight in module.parameters()}
    assert {(id(module), id(weight)) for module, weight in gathered} == expected
