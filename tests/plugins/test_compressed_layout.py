"""Headers and configuration of a checkpoint are compared with the expected ones."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from shardwright.ds_configs.quantization.layers import LinearLayer, quantization_config
from shardwright.ds_configs.quantization.scheme import changed, scheme_named
from shardwright.ds_configs.quantization.sizes import packed_tensors, tensor_bytes
from shardwright.plugins.compressed_tensors import layout_differences

LAYERS = tuple(LinearLayer(name=f"model.layers.{index}.up_proj", out_features=24, in_features=64) for index in (0, 1))
SCHEMES = {
    "W4A16": changed(scheme_named("W4A16"), group_size=32),
    "W3A16_ASYM": changed(scheme_named("W3A16_ASYM"), group_size=32),
    "W8A8_STATIC": scheme_named("W8A8_STATIC"),
    "FP8_DYNAMIC": scheme_named("FP8_DYNAMIC"),
    "NVFP4": scheme_named("NVFP4"),
    "MXFP4A16": scheme_named("MXFP4A16"),
}


def tensors_of(scheme):
    tensors = {"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)}
    for layer in LAYERS:
        for part, (shape, dtype) in packed_tensors(scheme, layer, "bfloat16").items():
            tensors[f"{layer.name}.{part}"] = torch.zeros(shape, dtype=getattr(torch, dtype))
    return tensors


def written(directory, scheme, tensors=None, **config):
    save_file(tensors if tensors is not None else tensors_of(scheme), directory / "model.safetensors")
    stated = {"dtype": "bfloat16", "quantization_config": quantization_config(scheme)} | config
    (directory / "config.json").write_text(json.dumps(stated))
    return directory


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_lost_parts_and_wrong_sizes_are_named(tmp_path, scheme):
    norm = (((64,), "bfloat16"),)
    parts = [part for layer in LAYERS for part in packed_tensors(scheme, layer, "bfloat16").values()]
    size = tensor_bytes([*norm, *parts])
    assert layout_differences(written(tmp_path, scheme), scheme, LAYERS, expected_bytes=size) == []
    found = layout_differences(tmp_path, scheme, LAYERS, expected_bytes=size + 1)
    assert found == [f"tensors have {size} bytes, but {size + 1} were expected"]

    for part in packed_tensors(scheme, LAYERS[1], "bfloat16"):
        tensors = tensors_of(scheme)
        del tensors[f"{LAYERS[1].name}.{part}"]
        (found,) = layout_differences(written(tmp_path, scheme, tensors), scheme, LAYERS)
        assert found.startswith(f"{LAYERS[1].name}.{part} is missing")


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("0.up_proj.weight_packed", torch.zeros(24, 4, dtype=torch.int32), "weight_packed is"),
        ("0.up_proj.weight_scale", torch.zeros(24, 2), "weight_scale is"),
        ("0.up_proj.weight", torch.zeros(24, 64), "up_proj.weight is unexpected"),
        ("0.down_proj.weight_packed", torch.zeros(2), "down_proj.weight_packed is unexpected"),
    ],
)
def test_wrong_and_superfluous_tensors_are_named(tmp_path, name, tensor, words):
    scheme = SCHEMES["W4A16"]
    tensors = tensors_of(scheme) | {f"model.layers.{name}": tensor}
    (found,) = layout_differences(written(tmp_path, scheme, tensors), scheme, LAYERS)
    assert words in found


def test_a_different_configuration_is_reported(tmp_path):
    scheme = SCHEMES["W4A16"]
    other = quantization_config(SCHEMES["W8A8_STATIC"])
    (found,) = layout_differences(written(tmp_path, scheme, quantization_config=other), scheme, LAYERS)
    assert "format is 'int-quantized', not 'pack-quantized'" in found
    found = layout_differences(written(tmp_path, scheme, quantization_config=None), scheme, LAYERS)
    assert found == ["config.json: quantization_config is missing"]
    found = layout_differences(written(tmp_path, scheme, quantization_config={"quant_method": "gptq"}), scheme, LAYERS)
    assert "quant_method is 'gptq'" in found[0]
