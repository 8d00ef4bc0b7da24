"""LoRA by peft: which layers, which dtype, and names that no layer has."""

from __future__ import annotations

import json

import pytest
import torch
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.model import adapters
from shardwright.plugins.peft import DEFAULT_RANK, add_lora
from shardwright.plugins.transformers.meta_model import model_spec_from_meta
from shared_sequences import tiny
from small_models import MIXTURE_SIZES, mixture

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


TARGETS = ("all-linear", "experts", "all-linear,experts", "q_proj,experts", "experts.down_proj", "down_proj")


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("model_type", MIXTURE_SIZES)
def test_adapters_of_experts_are_planned_with_their_shapes(model_type: str, targets: str) -> None:
    model = mixture(model_type)
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    spec = model_spec_from_meta(config, name="m")
    planned = [each for each in adapters(spec, rank=3, targets=targets.split(",")) for _ in range(each.count)]
    adapted = add_lora(model, rank=3, targets=targets, fp32_adapters=True)
    trained = [tuple(each.shape) for each in adapted.parameters() if each.requires_grad]
    assert sorted(trained) == sorted(each.shape for each in planned) != []


@pytest.mark.parametrize("targets", ["experts", "all-linear"])
def test_dropout_of_experts_is_rejected(targets: str) -> None:
    with pytest.raises(UsageError, match=r"lora_dropout = 0\.1: is not supported for fused experts"):
        add_lora(mixture("mixtral"), rank=2, targets=targets, fp32_adapters=True, dropout=0.1)
