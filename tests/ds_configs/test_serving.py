"""Memory arithmetic of serving, and what vLLM rejects."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import public_config
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.serving import (
    CachedLayer,
    ServedModel,
    ServingRequest,
    StoredWeight,
    cached_layers,
    key_value_cache,
    plan_serving,
    weight_bytes,
)
from shardwright.ds_configs.specs.errors import DoesNotFitError, UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.model import Dimensions

LLAMA_8B = public_config("meta-llama/Llama-3.1-8B")
SIZES = Dimensions(
    num_layers=12,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=512,
)


def served(**changes) -> ServedModel:
    config = LLAMA_8B | changes
    spec = model_spec_from_config(config, name="model")
    assert spec is not None
    return ServedModel(spec=spec, config=config, weights={})


def request(hardware="1xA100-80GB", **changes) -> ServingRequest:
    return ServingRequest(hardware=parse_hardware(hardware), **changes)


def test_llama_3_caches_128_kib_per_token():
    """32 layers · 8 heads · (128 + 128) · 2 bytes, as the model's users count it."""
    plan = plan_serving(served(), request())
    assert plan.token_bytes == 131_072
    assert plan.block_bytes == 16 * 131_072
    assert plan.memory["weights"] == 2 * 8_030_261_248
    assert plan.blocks == plan.memory["cache"] // plan.block_bytes
    assert plan.max_model_len == 131_072
    assert plan.blocks_per_sequence == 8192


def test_fp8_cache_holds_twice_as_much():
    half = plan_serving(served(), request(kv_cache_dtype="fp8"))
    assert half.token_bytes == 65_536
    assert "--kv-cache-dtype" in half.line
    stated = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float", "num_bits": 8}}
    assert plan_serving(served(quantization_config=stated), request()).kv_cache_dtype == "fp8"


@pytest.mark.parametrize(
    ("hardware", "amx", "latent", "tokens"),
    [
        ("CPU", False, False, 128),
        ("CPU", True, False, 128),
        ("CPU", False, True, 16),
        ("CPU", True, True, 128),
        ("1xA100-80GB", False, False, 16),
        ("1xA100-80GB", False, True, 64),
    ],
)
def test_blocks_have_the_tokens_of_the_kernel_that_vllm_selects(hardware, amx, latent, tokens):
    """vLLM 0.32.0, `platforms/cpu.py`: 16 tokens only for the kernel of latent attention without AMX tiles."""
    ranks = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128} if latent else {}
    plan = plan_serving(served(**ranks), request(hardware, amx=amx, kv_cache_bytes=2**30, max_model_len=128))
    assert plan.block_bytes == tokens * plan.token_bytes


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"sliding_window": 8, "model_type": "mistral"}, [8] * 12),
        ({"sliding_window": 8, "use_sliding_window": False, "model_type": "qwen2"}, [None] * 12),
        ({"sliding_window": 8, "model_type": "gemma2"}, [8, None] * 6),
        ({"sliding_window": 8, "model_type": "gemma3_text"}, ([8] * 5 + [None]) * 2),
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 6}, [None, 8] * 6),
        ({"text_config": {"sliding_window": 8, "model_type": "gemma3_text"}}, ([8] * 5 + [None]) * 2),
    ],
)
def test_windows_follow_the_family(config, windows):
    assert [layer.window for layer in cached_layers(config, SIZES)] == windows


@pytest.mark.parametrize(
    ("hardware", "batched", "sequences", "block", "steps"),
    [("CPU", 2048, 128, 128, 1), ("1xA100-80GB", 2048, 256, 16, 2), ("1xH100-80GB", 8192, 1024, 16, 2)],
)
def test_a_window_also_holds_the_tokens_of_steps_in_flight(hardware, batched, sequences, block, steps):
    """With the defaults of a vLLM 0.32.0 server, which schedules a second step on GPUs while one runs."""
    windowed = served(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=1024)
    plan = plan_serving(windowed, request(hardware, kv_cache_bytes=2**34))
    assert (plan.max_num_batched_tokens, plan.max_num_seqs, plan.block_tokens) == (batched, sequences, block)
    assert plan.blocks_per_sequence == -(-(1023 + steps * batched) // block) + 1


def test_rejects_recurrent_layers_by_name():
    with pytest.raises(UsageError, match="linear_attention"):
        cached_layers({"layer_types": ["linear_attention"] * 12}, SIZES)


def test_full_and_sliding_layers_share_a_pool():
    """Six layers, five of them sliding: groups of one layer, and a window holds its tokens and those in flight."""
    layers = [CachedLayer(heads=2, numbers_per_head=64, window=window) for window in (64, 64, 64, 64, 64, None)]
    cache = key_value_cache(tuple(layers), number_bytes=2, block_tokens=16)
    assert cache.block_bytes == 2 * 64 * 2 * 16
    assert len(cache.groups) == 6
    assert cache.sequence_blocks(4096, tokens_in_flight=128) == 4096 // 16 + 5 * (-(-(63 + 128) // 16) + 1)


@given(
    windows=st.lists(st.sampled_from([None, 16, 100, 4096]), min_size=1, max_size=12),
    memory=st.integers(0, 10**9),
    more=st.integers(0, 10**9),
    length=st.integers(1, 100_000),
)
def test_more_memory_never_fits_less(windows, memory, more, length):
    layers = tuple(CachedLayer(heads=2, numbers_per_head=64, window=window) for window in windows)
    cache = key_value_cache(layers, number_bytes=2, block_tokens=16)
    longest = [
        cache.longest_sequence(cache.blocks(size), limit=length, tokens_in_flight=256)
        for size in (memory, memory + more)
    ]
    assert longest[0] <= longest[1] <= length
    for found, size in zip(longest, (memory, memory + more), strict=True):
        if found:
            assert cache.sequence_blocks(found, tokens_in_flight=256) * cache.block_bytes <= size
        if found < length:
            assert cache.sequence_blocks(found + 1, tokens_in_flight=256) > cache.blocks(size)


def test_selects_the_fewest_gpus_for_the_longest_sequence():
    large = served(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64)
    plan = plan_serving(large, request("8xA100-80GB"))
    assert plan.tensor_parallel_size == 4
    assert any("--data-parallel-size 2" in note for note in plan.notes)


def test_weights_are_sharded_except_replicated_ones():
    tensors = {
        "q_proj.weight": StoredWeight(stored_bytes=800, is_matrix=True, is_fp32=False),
        "model.layers.0.self_attn.k_proj.weight": StoredWeight(stored_bytes=200, is_matrix=True, is_fp32=False),
        "norm.weight": StoredWeight(stored_bytes=10, is_matrix=False, is_fp32=False),
        "self_attn.kv_a_proj_with_mqa.weight": StoredWeight(stored_bytes=50, is_matrix=True, is_fp32=False),
    }
    shares = {"tensor_parallel_size": 4, "num_key_value_heads": 2, "halve_fp32": True}
    assert weight_bytes(tensors, **shares) == 200 + 100 + 10 + 50


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensor_parallel_size": 3, "hardware": "4xA100-80GB"},
            "must divide the 32 attention heads; use one of 1, 2, 4",
        ),
        ({"tensor_parallel_size": 2}, "must be at most 1, the GPUs of a node"),
        ({"max_model_len": 10**7}, "must be at most 131,072, the positions of the model"),
    ],
)
def test_rejects_unsupported_settings(changes, message):
    with pytest.raises(UsageError, match=message):
        plan_serving(served(), request(**changes))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "shardwright_small"}, "serve its parent directory"),
        ({"kv_cache_scheme": {"type": "int", "num_bits": 8}}, "'int 8': is not supported by vLLM"),
        ({}, "vocabulary of the model: it has 32,000"),
    ],
)
def test_rejects_formats_of_the_model_and_of_a_draft(section, message):
    changed = served(quantization_config=section, vocab_size=32000 if not section else 128256)
    with pytest.raises(UsageError, match=message):
        plan_serving(served(), request(), draft=changed)
    if section:
        with pytest.raises(UsageError, match=message):
            plan_serving(changed, request())


def test_speculative_decoding_shares_the_pool():
    draft = served(num_hidden_layers=16, hidden_size=2048, intermediate_size=8192, head_dim=64)
    alone, both = plan_serving(served(), request()), plan_serving(served(), request(), draft=draft)
    assert both.token_bytes == 131_072 + 16 * 8 * 128 * 2
    assert both.memory["draft_weights"] == 2 * draft.spec.parameter_count
    assert both.sequences < alone.sequences
    stated = json.loads(both.line[both.line.index("--speculative-config") + 1])
    assert stated == {"method": "draft_model", "model": "model", "num_speculative_tokens": 4}


def test_errors_suggest_a_length_that_fits():
    with pytest.raises(DoesNotFitError, match="not even one token fits"):
        plan_serving(served(), request("1xT4"))
    with pytest.raises(DoesNotFitError, match=r"--max-model-len \d+ fits"):
        plan_serving(served(), request("1xL4", max_model_len=131_072))
    cut = plan_serving(served(), request("1xL4"))
    assert cut.max_model_len < 131_072
    assert any("limited to" in note for note in cut.notes)
