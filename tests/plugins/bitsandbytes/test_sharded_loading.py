"""4-bit layers whose weights ZeRO-3 gathers and releases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from shardwright.ds_configs.memory.rank_parameters import share_parameters
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.bitsandbytes import read_weights_in_backward
from shardwright.plugins.peft import four_bit_loading
from shardwright.plugins.transformers.meta_model import model_spec_from_meta
from small_models import mixture


@pytest.fixture
def layer() -> Linear4bit:
    generator = torch.Generator().manual_seed(0)
    layer = Linear4bit(128, 64, bias=False, compute_dtype=torch.float32, quant_storage=torch.float32, quant_type="nf4")
    weight = torch.randn(64, 128, generator=generator)
    layer.weight = type(layer.weight)(weight, requires_grad=False, quant_type="nf4", quant_storage=torch.float32)
    return layer.to("cpu")


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 128, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def kept_weight(output: torch.Tensor) -> torch.Tensor:
    """Return the packed weight that the product's node has for its backward pass."""
    node = output.grad_fn
    found = [one for one in (node, *(before for before, _ in node.next_functions)) if hasattr(one, "tensors")]
    _, weight = found[0].tensors
    return weight


def test_the_product_keeps_the_weight_past_its_release(layer: Linear4bit) -> None:
    """What makes `read_weights_in_backward` necessary (bitsandbytes 0.50.2); without it, delete both."""
    gathered = layer.weight.data
    output = layer(inputs())
    layer.weight.data = torch.empty(0)
    assert kept_weight(output).untyped_storage().data_ptr() == gathered.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_were_released_and_gathered_again_give_the_same_gradient(
    layer: Linear4bit, dtype: torch.dtype
) -> None:
    expected = inputs(dtype)
    layer(expected).square().sum().backward()
    read_weights_in_backward(torch.nn.Sequential(layer))
    own, gathered = inputs(dtype), layer.weight.data
    output = layer(own)
    layer.weight.data = torch.empty(0)
    assert kept_weight(output).numel() == 0
    layer.weight.data = gathered.clone()
    output.square().sum().backward()
    torch.testing.assert_close(own.grad, expected.grad, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_fused_experts_stay_in_16_bit_as_planned(family: str, tmp_path: Path) -> None:
    # Once Transformers packs them, plans can too.
    from transformers import AutoModelForCausalLM

    mixture(family).to(torch.bfloat16).save_pretrained(tmp_path)
    spec = model_spec_from_meta(json.loads((tmp_path / "config.json").read_text()), name="m")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=four_bit_loading(torch.bfloat16)
    )
    weights = dict(loaded.named_parameters())
    assert all(
        weight.dtype == torch.bfloat16 and weight.dim() == 3
        for name, weight in weights.items()
        if "experts.gate_up_proj" in name and "bias" not in name
    )
    planned = share_parameters(spec, TrainingJob(method="qlora", lora_targets=("experts",)))
    # Transformers 5.24 keeps routers in fp32; plans count 16 bits, which is less than 0.1 % of a mixture's bytes apart.
    stored = sum(
        weight.numel() * (2 if name.endswith(".gate.weight") else weight.element_size())
        for name, weight in weights.items()
    )
    assert stored == planned.frozen_bytes - planned.scale_bytes
