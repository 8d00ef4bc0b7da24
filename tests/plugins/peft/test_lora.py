"""LoRA by peft: which layers, which dtype, and names that no layer has."""

from __future__ import annotations

import pytest
import torch
from shardwright.plugins.peft import DEFAULT_RANK, add_lora
from shared_sequences import tiny

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("targets", "layers"), [("q_proj, v_proj", 2), (None, 7), ("all-linear", 7)])
def test_only_adapters_train(targets: str | None, layers: int) -> None:
    model = add_lora(tiny(), rank=None, targets=targets, fp32_adapters=True)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert len(trained) == 2 * layers * model.config.num_hidden_layers
    assert all(DEFAULT_RANK in each.shape and "lora" in name for name, each in trained.items())


@pytest.mark.parametrize(("fp32", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_adapters_are_fp32_where_no_engine_keeps_such_a_copy(fp32: bool, dtype: torch.dtype) -> None:
    model = add_lora(tiny().bfloat16(), rank=2, targets="q_proj", fp32_adapters=fp32)
    assert {each.dtype for each in model.parameters() if each.requires_grad} == {dtype}


def test_alpha_over_rank_scales_the_adapters() -> None:
    outputs = {}
    for alpha in (None, 4, 8.0):
        torch.manual_seed(0)
        model = add_lora(tiny(), rank=2, targets="q_proj", fp32_adapters=True, alpha=alpha, dropout=0.5).eval()
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.fill_(0.1)
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        assert layer.lora_dropout["default"].p == 0.5
        rows = torch.ones(1, layer.in_features)
        outputs[alpha] = (layer(rows) - layer.base_layer(rows)).detach()
    assert torch.equal(outputs[None], outputs[4])
    torch.testing.assert_close(outputs[8.0], 2 * outputs[4])
