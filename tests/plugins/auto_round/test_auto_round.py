"""AutoRound: what it learned in memory is what its checkpoints hold."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from safetensors.torch import load_file
from shardwright.cli.main import run
from shardwright.ds_configs.quantization.scheme import changed, scheme_named
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.auto_round import equal_rows, quantize_with_auto_round
from shardwright.plugins.compressed_tensors.codes import dequantize, unpack_tensors
from shardwright.plugins.compressed_tensors.layout import layout_differences
from shardwright.plugins.llm_compressor.engine import load_for_quantization
from shardwright.plugins.transformers.quantized_model import open_source
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from small_models import llama

pytestmark = pytest.mark.slow

QUICK = {"iters": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "small"
    llama(vocab_size=384, max_position_embeddings=64).to(torch.bfloat16).save_pretrained(directory)
    byte_tokenizer(384).save_pretrained(directory)
    return open_source(str(directory))


@pytest.fixture(autouse=True)
def frozen_heap():
    """AutoRound collects garbage a dozen times, and each time visits every object of the test session."""
    gc.freeze()
    yield
    gc.unfreeze()


def samples(count=4, length=16):
    return [{"input_ids": [(7 * row + place) % 250 for place in range(length)]} for row in range(count)]


def quantized(source, scheme, *, calibration=None, report=lambda step: None, **options):
    return quantize_with_auto_round(
        load_for_quantization(source),
        byte_tokenizer(384),
        scheme,
        calibration=samples() if calibration is None else calibration,
        batch_size=2,
        options=QUICK | options,
        seed=0,
        report=report,
    )


def answers(model):
    with torch.inference_mode():
        return model(input_ids=torch.arange(96).reshape(2, 48)).logits.float()


@pytest.mark.needs("auto_round")
@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W8A16"])
def test_the_checkpoint_is_the_model(source, tmp_path, name):
    from transformers import AutoModelForCausalLM

    scheme = changed(scheme_named(name), group_size=32, ignore=("lm_head", r"re:.*\.layers\.1\.mlp\.down_proj"))
    steps = []
    found = quantized(source, scheme, report=steps.append)
    assert len(found.quantized_layers) == 13
    assert [step.names for step in steps] == [("model.layers.0",), ("model.layers.1",), ()]
    before = answers(found.model)
    learned = found.model.get_submodule("model.layers.0.mlp.up_proj").weight.detach().float().clone()
    found.save(tmp_path)
    stored = unpack_tensors("model.layers.0.mlp.up_proj", load_file(tmp_path / "model.safetensors"), scheme)
    packed = dequantize(stored.codes, stored.scale, stored.zero_point, scheme.weights).float()
    assert (packed - learned).abs().max() <= learned.abs().max() * 2**-7
    layers = tuple(layer for layer in source.layers if layer.name in found.quantized_layers)
    assert layout_differences(tmp_path, scheme, layers) == []
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    after, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", trust_remote_code=False, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert (answers(after.eval()) - before).abs().max() <= 1e-3


@pytest.mark.needs("auto_round")
@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM"])
def test_gptq_files_hold_the_weights(source, tmp_path, name):
    """Unpacked by hand: 4-bit codes along input channels, zero points stored one too low (AutoGPTQ's first format)."""
    found = quantized(source, changed(scheme_named(name), group_size=32), format="gptq")
    assert not found.loads_in_transformers
    wanted = found.model.get_submodule("model.layers.1.mlp.up_proj").weight.detach().float().clone()
    found.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    packed, zeros, scales = (stored[f"model.layers.1.mlp.up_proj.{part}"] for part in ("qweight", "qzeros", "scales"))
    shifts = torch.arange(0, 32, 4)
    codes_IO = ((packed[:, None, :] >> shifts[None, :, None]) & 15).flatten(0, 1)
    zeros_GO = ((zeros[:, :, None] >> shifts) & 15).flatten(1, 2) + 1
    groups = torch.arange(64) // 32
    unpacked_IO = (codes_IO - zeros_GO[groups]) * scales.float()[groups]
    assert (unpacked_IO.T - wanted).abs().max() <= wanted.abs().max() * 2**-8
    assert len([key for key in stored if key.endswith("qweight")]) == 14
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "gptq"


@pytest.mark.needs("auto_round")
def test_awq_files_have_every_layer(source, tmp_path):
    found = quantized(source, changed(scheme_named("W4A16_ASYM"), group_size=32), format="awq")
    assert not found.loads_in_transformers
    found.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {key.removesuffix(".qweight") for key in stored if key.endswith("qweight")} == set(found.quantized_layers)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "awq"


@pytest.mark.needs("auto_round")
def test_the_process_is_left_as_it_was(source):
    state = torch.random.get_rng_state()
    quantized(source, changed(scheme_named("W4A16"), group_size=32))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_all_errors_are_reported_together(source):
    with pytest.raises(UsageError) as caught:
        quantized(source, changed(scheme_named("W8A16"), ignore=()), calibration=[], format="awq", rounds=3)
    text = str(caught.value)
    assert "rounds" in text and "4-bit weights" in text and "needs text" in text and "lm_head" in text


def test_rows_of_one_length():
    assert equal_rows([[1] * 9, [2] * 10, [3] * 2]) == [[1] * 9, [2] * 9]
    assert equal_rows([[1, 2]]) == [[1, 2]]


@pytest.mark.needs("auto_round")
def test_the_command(source, tmp_path, capsys):
    flags = ["--scheme", "W4A16", "--method", "autoround", "--method-option", "iters=2", "--group-size", "32"]
    flags += ["--dataset", "python-help", "--num-samples", "4", "--seq-len", "16", "--no-evaluate", "--format", "json"]
    assert run(["quantize", source.name, *flags, "--output-dir", str(tmp_path / "q")]) == 0
    found = json.loads(capsys.readouterr().out)["verification"]
    assert found["errors"] == [] and found["packed_layers"] == 14
