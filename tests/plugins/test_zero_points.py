"""Checkpoints with packed zero points load in Transformers, with the numbers that their codes stand for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from safetensors.torch import save_file
from shardwright.ds_configs.quantization.layers import quantization_config
from shardwright.ds_configs.quantization.scheme import QuantizationScheme, WeightQuantization, changed, scheme_named
from shardwright.plugins import patches
from shardwright.plugins.compressed_tensors import load_packed_zero_points, pack_tensors, state_dequantize, to_upstream
from shardwright.trainers.qat.rounding import Rounding, round_weight
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SCHEMES = {
    "by group": scheme_named("W4A16_ASYM"),
    "by channel": changed(scheme_named("W4A16_ASYM"), group_size=-1),
    "3 bits": scheme_named("W3A16_ASYM"),
}
BY_TENSOR = WeightQuantization(bits=4, strategy="tensor", group_size=None, symmetric=False)


def written(directory: Path, scheme: QuantizationScheme, stated: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).bfloat16()
    stored, expected = {}, {}
    for name, weight in model.state_dict().items():
        if not name.endswith("proj.weight"):
            stored[name] = expected[name] = weight
            continue
        rounding = Rounding(quantization=scheme.weights, rule="minmax", stored_dtype=weight.dtype)
        matrix = round_weight(weight, rounding)
        stored |= pack_tensors(name.removesuffix(".weight"), matrix, scheme)
        expected[name] = matrix.value(scheme.weights)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": stated}
    (directory / "config.json").write_text(json.dumps(config))
    return expected


def loaded(directory: Path) -> Any:
    model, keys = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
    assert not any(keys.values()), "keys are missing, left over or of another shape"
    model(input_ids=torch.zeros(1, 1, dtype=torch.long))
    return model.state_dict()


@pytest.mark.parametrize(("name", "says_dequantize"), [("by group", False), ("by channel", True), ("3 bits", True)])
def test_weights_are_those_of_the_codes(name: str, says_dequantize: bool, tmp_path: Path) -> None:
    stated = quantization_config(SCHEMES[name])
    assert stated.pop("dequantize") is True
    expected = written(tmp_path, SCHEMES[name], stated)
    if says_dequantize:
        file = tmp_path / "config.json"
        config = json.loads(file.read_text())
        state_dequantize(config["quantization_config"])
        assert config["quantization_config"]["dequantize"] is True
        file.write_text(json.dumps(config))
    else:
        load_packed_zero_points()
    found = loaded(tmp_path)
    assert all(torch.equal(found[key], weight) for key, weight in expected.items())


@pytest.mark.parametrize(
    ("scheme", "changes"),
    [
        (scheme_named("W4A16"), {}),
        (replace(scheme_named("W4A16_ASYM"), weights=BY_TENSOR), {}),
        (scheme_named("W4A16_ASYM"), {"kv_cache_scheme": {"num_bits": 8}}),
    ],
)
def test_other_checkpoints_keep_their_configuration(scheme: QuantizationScheme, changes: dict[str, Any]) -> None:
    stated = quantization_config(scheme) | changes
    stated.pop("dequantize", None)
    state_dequantize(stated)
    assert "dequantize" not in stated


def test_upstream_expects_unpacked_zero_points() -> None:
    """Fails when compressed-tensors packs zero points on the meta device too: the patch and the key can go then."""
    scheme = to_upstream(SCHEMES["by group"])
    made = {"weight": (16, 256), "weight_scale": (16, 2), "weight_zero_point": (16, 2)}
    tensors = {name: torch.empty(shape, device="meta") for name, shape in made.items()}
    (upstream,) = (patches.upstream_value(each) for each in patches.PATCHES if each.name == "packed-zero-points")
    with patches.applied("packed-zero-points", lambda _: staticmethod(upstream)):
        found = PackedQuantizationCompressor.compress(tensors, scheme)
    assert found["weight_zero_point"].shape == (16, 2)
    load_packed_zero_points()
    assert PackedQuantizationCompressor.compress(tensors, scheme)["weight_zero_point"].shape == (2, 2)
