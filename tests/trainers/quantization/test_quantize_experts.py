"""Mixtures of experts survive quantization: every expert is packed under the name that loaders look for."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch
from safetensors import safe_open
from shardwright.cli.main import run
from shardwright.ds_configs.quantization.layers import selected_layers
from shardwright.ds_configs.quantization.scheme import scheme_named
from shardwright.plugins.compressed_tensors import restore_expert_names
from shardwright.plugins.llm_compressor import kept_conversion_mappings, torchvision_is_not_needed
from shardwright.plugins.transformers.meta_model import open_source
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

SIZES = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 384},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig, set_seed

    configs = {
        "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
        "qwen3-moe": Qwen3MoeConfig(
            **SIZES, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, head_dim=32
        ),
    }
    found = {}
    for name, config in configs.items():
        set_seed(0)
        found[name] = tmp_path_factory.mktemp("mixtures") / name
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(found[name])
        byte_tokenizer(384).save_pretrained(found[name])
    return found


def names_in(directory) -> set[str]:
    with safe_open(directory / "model.safetensors", framework="pt") as stored:
        return set(stored.keys())


@pytest.mark.needs("llmcompressor")
@pytest.mark.parametrize(
    ("name", "method", "expert"),
    [
        ("mixtral", "gptq", "model.layers.1.block_sparse_moe.experts.3.w2"),
        ("qwen3-moe", "rtn", "model.layers.1.mlp.experts.3.down_proj"),
    ],
)
def test_round_trip(mixtures, tmp_path, capsys, name, method, expert):
    flags = ("--dataset", "python-help", "--num-samples", "8", "--seq-len", "32") if method == "gptq" else ()
    output = tmp_path / "q"
    command = ["quantize", str(mixtures[name]), "--method", method, *flags, "--no-evaluate", "--format", "json"]
    assert run([*command, "--output-dir", str(output)]) == 0
    found = json.loads(capsys.readouterr().out)["verification"]
    assert found["errors"] == []
    assert found["largest_logit_difference"] <= 1e-3
    assert found["packed_layers"] == 2 * (4 + 4 * 3)
    stored = names_in(output)
    assert f"{expert}.weight_packed" in stored
    routers = {entry for entry in stored if ".gate." in entry}
    assert routers == {entry for entry in names_in(mixtures[name]) if ".gate." in entry}, "a router was rounded"


@pytest.mark.needs("llmcompressor")
def test_fp32_biases_are_counted_in_the_checkpoint_size(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    routed["first_k_dense_replace"] = 1
    config = DeepseekV3Config(**SIZES | {"num_key_value_heads": 4}, **latent, **routed, moe_intermediate_size=128)
    source, output = tmp_path / "deepseek", tmp_path / "q"
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(source)
    byte_tokenizer(384).save_pretrained(source)
    with safe_open(source / "model.safetensors", framework="pt") as stored:
        biases = [name for name in stored.keys() if name.endswith("e_score_correction_bias")]  # noqa: SIM118
        assert biases and all(stored.get_slice(name).get_dtype() == "BF16" for name in biases)
    flags = ["--method", "rtn", "--group-size", "32", "--no-evaluate"]
    assert run(["quantize", str(source), *flags, "--output-dir", str(output)]) == 0
    with safe_open(output / "model.safetensors", framework="pt") as stored:
        assert all(stored.get_slice(name).get_dtype() == "F32" for name in biases)


@pytest.mark.needs("llmcompressor")
def test_upstream_still_needs_the_names_restored(mixtures, tmp_path):
    """llmcompressor 0.14.0.1 writes gate_proj for w1; when it no longer does, `restore_expert_names` can go."""
    from shardwright.plugins.llm_compressor import load_for_quantization, quantize_with_llm_compressor

    source = open_source(str(mixtures["mixtral"]))
    model = load_for_quantization(source)
    _, found = AutoModelForCausalLM.from_pretrained(mixtures["mixtral"], output_loading_info=True)
    assert not found["missing_keys"], "the next mixture of this process has random experts"
    quantize_with_llm_compressor(model=model, scheme=scheme_named("W4A16"), method="rtn").save(tmp_path)
    written = names_in(tmp_path)
    assert "model.layers.0.block_sparse_moe.experts.0.gate_proj.weight_packed" in written
    assert restore_expert_names(tmp_path, source.tensors) == 2 * 4 * 3 * 3
    dense = {name for name in source.tensors if ".experts." not in name}
    packed = {layer.name for layer in selected_layers(scheme_named("W4A16"), source.layers)}
    parts = {f"{name}.{part}" for name in packed for part in ("weight_packed", "weight_scale", "weight_shape")}
    assert names_in(tmp_path) == parts | {name for name in dense if name.removesuffix(".weight") not in packed}


@pytest.mark.needs("llmcompressor")
def test_upstream_still_asks_modules_that_need_torchvision():
    """transformers 5.17.0 under llmcompressor 0.14.0.1; when nothing is hidden any more, the workaround can go."""
    from transformers import monkey_patching  # noqa: F401  (what asks every module of Transformers that is loaded)

    def failing() -> list[str]:
        found = []
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.") and "__dir__" in vars(module):
                try:
                    dir(module)
                except ImportError:
                    found.append(name)
        return found

    missing = importlib.util.find_spec("torchvision") is None
    before = failing()
    assert bool(before) == missing
    with torchvision_is_not_needed():
        assert failing() == []
    assert set(before) <= set(sys.modules)


@pytest.mark.needs("llmcompressor")
def test_upstream_still_registers_how_one_model_is_written_for_all(mixtures):
    """llmcompressor 0.14.0.1; when later models find their experts, `kept_conversion_mappings` can go."""
    from llmcompressor.utils import load_context

    with kept_conversion_mappings():
        with torchvision_is_not_needed(), load_context(AutoModelForCausalLM):
            AutoModelForCausalLM.from_pretrained(mixtures["qwen3-moe"], dtype="auto")
        _, found = AutoModelForCausalLM.from_pretrained(mixtures["qwen3-moe"], output_loading_info=True)
        assert found["missing_keys"]


@pytest.mark.parametrize(
    ("flags", "rule", "fix"),
    [
        ("--scheme W4A16_ASYM", "24 matrices of experts would have zero points", "W4A16"),
        # transformers 5.17.0 looks for `weight_packed` of experts; W8A8 would store a byte for each code.
        ("--scheme W8A8", "24 matrices of experts", "W8A16"),
        ("--scheme NF4", "24 matrices would stay in 16 bit", "W4A16"),
        (
            "--method spqr --scheme W3A16 --dataset python-help --seq-len 32",
            "24 layers are parts of experts",
            "--method gptq",
        ),
    ],
)
def test_forms_of_experts_that_no_loader_reads_are_rejected(mixtures, tmp_path, capsys, flags, rule, fix):
    assert run(["quantize", str(mixtures["mixtral"]), *flags.split(), "--output-dir", str(tmp_path / "q")]) == 2
    message = capsys.readouterr().err
    assert rule in message and fix in message
    assert not list(tmp_path.iterdir())
