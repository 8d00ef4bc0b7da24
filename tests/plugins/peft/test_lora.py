"""LoRA by peft: which layers, which dtype, and names that no layer has."""

from __future__ import annotations

import json

import pytest
import torch
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.model import adapters
from shardwright.plugins.peft import DEFAULT_RANK, add_lora, raise_rates_of_b
from shardwright.plugins.transformers.meta_model import model_spec_from_meta
from shared_sequences import tiny
from small_models import MIXTURE_SIZES, llama, mixture

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


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_norms_of_dora_are_planned_with_their_shapes(model_type: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, num_hidden_layers=2, **sizes))
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    spec = model_spec_from_meta(config, name="m")
    planned = [p for p in adapters(spec, rank=3, targets=["all-linear"], variant="dora") for _ in range(p.count)]
    adapted = add_lora(model, rank=3, targets=None, variant="dora", fp32_adapters=True)
    trained = [tuple(each.shape) for each in adapted.parameters() if each.requires_grad]
    assert sorted(trained) == sorted(each.shape for each in planned)


def test_rslora_divides_by_the_root_of_the_rank() -> None:
    model = add_lora(tiny(), rank=4, targets="q_proj", fp32_adapters=True, alpha=6, variant="rslora")
    assert model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] == 3


def test_pissa_starts_as_the_model_with_its_largest_singular_vectors() -> None:
    model, ids = llama().eval(), torch.arange(40).reshape(2, 20)
    name = "layers.0.mlp.up_proj"
    weight = model.model.get_submodule(name).weight.detach().clone()
    with torch.no_grad():
        before = model(ids).logits
        adapted = add_lora(model, rank=4, targets="up_proj", fp32_adapters=True, variant="pissa").eval()
        torch.testing.assert_close(adapted(ids).logits, before, rtol=1e-4, atol=1e-5)
    layer = adapted.base_model.model.model.get_submodule(name)
    largest = torch.linalg.svdvals(weight)[4]
    assert torch.linalg.svdvals(layer.base_layer.weight)[0] == pytest.approx(float(largest), rel=1e-3)


@pytest.mark.parametrize("targets", ["q_proj", "experts"])
def test_lora_plus_raises_the_rates_of_b_alone(targets: str) -> None:
    base = mixture("qwen3_moe") if targets == "experts" else tiny()
    model = add_lora(base, rank=2, targets=targets, fp32_adapters=True, plus_ratio=8.0)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW([{"params": [*trained.values()], "weight_decay": 0.1}], lr=1e-3)
    raise_rates_of_b(model, optimizer)
    rates = {id(each): group["lr"] for group in optimizer.param_groups for each in group["params"]}
    assert {name: rates[id(each)] for name, each in trained.items()} == {
        name: 8e-3 if "lora_B" in name else 1e-3 for name in trained
    }
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1}
