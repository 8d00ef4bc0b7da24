"""What stands in a quantized file, against numbers worked out by hand: names, shapes, types and the order of bits."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from shardwright.ds_configs.quantization.scheme import changed, scheme_named
from shardwright.plugins.compressed_tensors import round_to_nearest
from shardwright.plugins.llm_compressor import quantize_with_llm_compressor
from small_models import llama

pytestmark = pytest.mark.needs("llmcompressor")

LAYER = "model.layers.0.self_attn.q_proj"
WIDTH, GROUP = 32, 16
LOW_WORD, HIGH_WORD = 0x76543210, 0xFEDCBA98 - (1 << 32)
"""Codes -8 to -1 and 0 to 7, eight in a word, each plus 8, the first one in the lowest four bits."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("source")
    llama(hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, vocab_size=64, max_position_embeddings=32).to(
        torch.bfloat16
    ).save_pretrained(directory)
    return directory


def written(source, directory, weight_OI, scheme, calibration=(), before=lambda model: None):
    """Quantize with these query weights, and return the tensors of that layer and the stated configuration."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.model.layers[0].self_attn.q_proj.weight.data.copy_(weight_OI)
    before(model)
    if scheme.activations_are_static:
        quantize_with_llm_compressor(model=model, scheme=scheme, method="rtn", calibration=calibration).save(directory)
    else:
        round_to_nearest(model, scheme).save(directory)
    tensors = {
        name.removeprefix(f"{LAYER}."): tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
        if name.startswith(f"{LAYER}.")
    }
    return tensors, json.loads((directory / "config.json").read_text())["quantization_config"]


def assert_tensors(found, expected):
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()} == expected


def test_symmetric_int4(source, tmp_path):
    # Scale 1 = 7.5 / 7.5; -7.5 rounds to the even -8, and 7.5 is cut to 7 first.
    row = torch.tensor([-7.5, *range(-7, 7), 7.5])
    weight = torch.zeros(WIDTH, WIDTH)
    weight[0, :GROUP], weight[0, GROUP:] = row, 2 * row
    found, stated = written(source, tmp_path, weight, changed(scheme_named("W4A16"), group_size=GROUP))
    assert_tensors(
        found,
        {
            "weight_packed": ((WIDTH, WIDTH * 4 // 32), torch.int32),
            "weight_scale": ((WIDTH, WIDTH // GROUP), torch.bfloat16),
            "weight_shape": ((2,), torch.int64),
        },
    )
    assert found["weight_packed"][0].tolist() == [LOW_WORD, HIGH_WORD, LOW_WORD, HIGH_WORD]
    assert found["weight_scale"][0].tolist() == [1.0, 2.0]
    assert found["weight_shape"].tolist() == [WIDTH, WIDTH]
    assert stated["format"] == "pack-quantized" and stated["ignore"] == ["lm_head"]
    weights = stated["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["symmetric"], weights["group_size"]) == (4, True, GROUP)


def test_asymmetric_int4(source, tmp_path):
    # Row r runs from -r to 15 - r: scale 15 / 15, zero point -8 + r, so that every row has the codes -8 to 7.
    weight = torch.zeros(WIDTH, WIDTH)
    for row in range(8):
        weight[row, :GROUP] = torch.arange(16.0) - row
    found, stated = written(source, tmp_path, weight, changed(scheme_named("W4A16_ASYM"), group_size=GROUP))
    assert_tensors(
        found,
        {
            "weight_packed": ((WIDTH, WIDTH * 4 // 32), torch.int32),
            "weight_scale": ((WIDTH, WIDTH // GROUP), torch.bfloat16),
            "weight_shape": ((2,), torch.int64),
            "weight_zero_point": ((WIDTH * 4 // 32, WIDTH // GROUP), torch.int32),
        },
    )
    for row in range(8):
        assert found["weight_packed"][row, :2].tolist() == [LOW_WORD, HIGH_WORD]
    assert found["weight_scale"][:8, 0].tolist() == [1.0] * 8
    # Zero points are packed down the rows: that of row r stands at bit 4r, plus 8.
    assert found["weight_zero_point"][0, 0].item() == LOW_WORD
    assert stated["config_groups"]["group_0"]["weights"]["symmetric"] is False
