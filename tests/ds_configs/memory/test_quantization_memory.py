"""Predicted memory of quantization runs against what the byte meter counted, stored and live."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from planning import public_model
from shardwright.ds_configs.quantization.layers import LinearLayer, selected_layers
from shardwright.ds_configs.quantization.scheme import QuantizationScheme, changed, scheme_named
from shardwright.ds_configs.quantization.sizes import PROCESS_BYTES, QuantizationMemory, QuantizationRun
from shardwright.ds_configs.specs.model import Dimensions
from shardwright.plugins.llm_compressor import quantize_with_llm_compressor
from shardwright.plugins.metering import ByteMeter
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

VOCAB, HEADS = 512, 8


def llama_layers(hidden: int, intermediate: int, count: int, key_values: int) -> list[LinearLayer]:
    shared = key_values * hidden // HEADS
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (shared, hidden),
        "self_attn.v_proj": (shared, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    layers = [
        LinearLayer(name=f"model.layers.{index}.{name}", out_features=rows, in_features=columns)
        for index in range(count)
        for name, (rows, columns) in shapes.items()
    ]
    return [*layers, LinearLayer(name="lm_head", out_features=VOCAB, in_features=hidden, is_head=True)]


def preset(method: str, name: str) -> QuantizationScheme:
    """The named scheme, with the small groups that SpQR is for."""
    return changed(scheme_named(name), group_size=16) if method == "spqr" else scheme_named(name)


def predict(method, scheme, samples, seq_len, batch, hidden, intermediate, count, key_values=4, **changes):
    layers = llama_layers(hidden, intermediate, count, key_values)
    weights = sum(layer.numel for layer in layers) + VOCAB * hidden + (2 * count + 1) * hidden
    given = {
        "layers": layers,
        "scheme": preset(method, scheme) if isinstance(scheme, str) else scheme,
        "method": method,
        "dimensions": Dimensions(
            num_layers=count,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_attention_heads=HEADS,
            num_key_value_heads=key_values,
            head_dim=hidden // HEADS,
            vocab_size=VOCAB,
        ),
        "weight_bytes": 2 * weights,
        "num_samples": samples,
        "seq_len": seq_len,
        "batch_size": batch,
    }
    given |= changes
    return QuantizationRun(**given | {"layers": selected_layers(given["scheme"], given["layers"])}).memory()


METERED = [
    (("gptq", "W4A16", 8, 256, 1, 512, 1024, 3), 37_678_396),
    (("gptq", "W4A16", 4, 64, 2, 512, 1536, 2), 49_940_785),
    (("gptq", "W4A16", 2, 32, 1, 256, 768, 1), 11_087_025),
    (("gptq", "W4A16", 16, 256, 1, 256, 512, 2, 8), 16_581_308),
    (("awq", "W4A16", 8, 256, 1, 512, 1024, 3), 40_123_712),
    (("awq", "W4A16_ASYM", 4, 128, 1, 256, 512, 1, 8), 6_275_744),
    (("awq", "W4A16", 6, 64, 2, 256, 1024, 1), 7_663_248),
    (("rtn", "W8A8_STATIC", 8, 256, 2, 256, 512, 2), 17_556_182),
    (("rtn", "W4A16", 4, 64, 2, 512, 1536, 2), 20_070_376),
    (("spqr", "W3A16", 4, 128, 1, 256, 512, 2), 8_648_976),
    (("smoothquant", "W8A8", 16, 128, 2, 256, 512, 2), 8_168_096),
]
"""Peak tensor bytes of run and save: method, scheme, samples, seq_len, batch, hidden, intermediate, layers."""


@pytest.mark.parametrize(("case", "metered"), METERED)
def test_prediction_is_within_five_percent_of_measurement(case, metered):
    assert predict(*case).tensor_bytes == pytest.approx(metered, rel=0.05)


@pytest.mark.needs("llmcompressor")
def test_live_run_stays_within_five_percent(tmp_path):
    case = ("gptq", "W4A16", 4, 64, 1, 256, 512, 1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=4,
    )
    set_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    with ByteMeter() as meter:
        model = LlamaForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16)
        for parameter in model.parameters():
            # What was read from a mapped file is seen by no operator.
            parameter.data = parameter.data.clone()
        gc.collect()
        meter.enter("other")
        meter.reset_peaks()
        calibration = [{"input_ids": torch.randint(0, VOCAB, (64,)).tolist()} for _ in range(4)]
        quantize_with_llm_compressor(
            model=model,
            scheme=scheme_named("W4A16"),
            method="gptq",
            calibration=calibration,
        ).save(Path(tmp_path) / "out")
    metered = max(meter.reading().peaks.values())
    assert predict(*case).tensor_bytes == pytest.approx(metered, rel=0.05)


def llama_8b(**changes) -> QuantizationMemory:
    hidden, intermediate = 4096, 14336
    given = {"seq_len": 2048, "batch": 1, "samples": 512, "method": "gptq", "device": "cuda"} | changes
    layers = llama_layers(hidden, intermediate, 32, 2)
    return predict(
        given["method"],
        given.get("scheme", "W4A16"),
        given["samples"],
        given["seq_len"],
        given["batch"],
        hidden,
        intermediate,
        32,
        layers=layers,
        dimensions=public_model("meta-llama/Llama-3.1-8B").dimensions,
        weight_bytes=16 * 10**9,
        device=given["device"],
    )


def test_an_accelerator_holds_one_layer_and_the_host_the_rest():
    memory = llama_8b()
    assert set(memory.device_terms) == {"layer_weights", "hessian_copies", "fp32_weights", "hessians"}
    # Three copies of down_proj's matrix of second moments, 14336² in fp32.
    assert memory.device_terms["hessian_copies"] == 3 * 4 * 14336**2
    assert memory.peak_device_bytes < 6 * 10**9
    assert memory.host_terms["model_weights"] == 16 * 10**9
    assert memory.host_terms["process"] == PROCESS_BYTES
    # 513 samples of 2048 tokens: hidden states, rotary tables and one mask each.
    assert memory.host_terms["layer_inputs"] == 513 * 2048 * (4096 + 2 * 128 + 2048) * 2


def test_methods_of_other_engines_are_estimated_too():
    assert llama_8b(method="bitsandbytes", scheme="NF4").phase == "loading"
    assert "hessian_copies" in llama_8b(method="spqr", scheme="W3A16").device_terms
