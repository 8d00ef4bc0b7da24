"""Shrinking: the same classes and divisibilities, small enough for CPU ranks; transformers builds the results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import CONFIGS
from planning import DEEPSEEK_V3, GPT_OSS
from shardwright.ds_configs.legality.rules import RULES, legality_errors
from shardwright.ds_configs.memory.communication import default_zero_options
from shardwright.ds_configs.models.model_config import SIZED_FAMILIES, config_errors
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.shrink import (
    Change,
    changes_between,
    kept_layers,
    rehearsed_sequence,
    shrink_accelerate_config,
    shrink_deepspeed_config,
    shrink_layout,
    shrink_model_config,
    shrink_zero_options,
)
from shardwright.ds_configs.specs.errors import RefusedInputError, UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout, ZeroOptions
from shardwright.ds_configs.specs.model import ModelSpec

MODELS = sorted(CONFIGS.iterdir())
HARDWARE = parse_hardware("2x16xA100-80GB", nvme="/nvme:1TB")
DDP = Layout(engine="ddp", dp_replicate=8)
LENGTH = 4096


def read(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    assert not config_errors(config, source="test")
    spec = model_spec_from_config(config, name="test")
    assert spec is not None
    return spec


def shrink(config: Mapping[str, Any], layout: Layout = DDP, length: int = LENGTH) -> dict[str, Any]:
    return shrink_model_config(config, layout=layout, seq_len_tokens=length)[0]


def parallel_strategies() -> Iterator[Layout]:
    """Every engine and stage with tp, sp, ep in 1, 2, 4 that 32 ranks hold."""
    for tp, sp, ep in product((1, 2, 4), repeat=3):
        for stage in (0, 1, 2, 3):
            data = HARDWARE.world_size // (tp * sp)
            sizes = {"dp_replicate": data} if stage == 0 else {"dp_shard": data}
            yield Layout(engine="deepspeed", zero_stage=stage, tp=tp, sp=sp, ep=ep, **sizes)
    yield Layout(engine="fsdp2", dp_shard=16, cp=2)
    yield from (Layout(engine="deepspeed", zero_stage=1, dp_shard=32 // pp, pp=pp) for pp in (2, 4))


PARALLEL = tuple(parallel_strategies())


def numbers(value: object) -> Iterator[float]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)


def assert_never_grows(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Every value that was there stands at no more than it was, and nothing was added."""
    for key, value in after.items():
        assert key in before, f"{key} was absent"
        if isinstance(value, dict):
            assert_never_grows(before[key], value)
        elif not key.endswith(("_token_id", "_token_index")):
            new, old = list(numbers(value)), list(numbers(before[key]))
            assert len(new) <= len(old)
            assert max(new, default=0) <= max(old, default=0), key
        assert (value is None) == (before[key] is None), key


def assert_faithful(config: dict[str, Any], layout: Layout, small: dict[str, Any], changes: tuple[Change, ...]) -> None:
    original, shrunken = spec_of(config), spec_of(small)
    assert [p.name for p in shrunken.parameters] == [p.name for p in original.parameters]
    assert [(p.group, p.kind) for p in shrunken.parameters] == [(p.group, p.kind) for p in original.parameters]
    assert (shrunken.model_type, shrunken.architecture) == (original.model_type, original.architecture)
    assert (shrunken.tied_embeddings, shrunken.layer_classes) == (original.tied_embeddings, original.layer_classes)
    assert (shrunken.sliding_window is None) == (original.sliding_window is None)
    assert shrunken.parameter_count <= original.parameter_count
    if original.parameter_count > 10**8 and original.dimensions.hidden_size >= 1024:
        assert shrunken.parameter_count < min(10**8, original.parameter_count / 3)
    assert_never_grows(config, small)
    hidden, heads = original.dimensions, shrunken.dimensions
    assert (hidden.num_attention_heads == hidden.num_key_value_heads) == (
        heads.num_attention_heads == heads.num_key_value_heads
    )
    if hidden.query_size == hidden.hidden_size and config.get("head_dim") is not None:
        assert heads.query_size == heads.hidden_size
    assert {change.where for change in changes} >= {
        key for key in config if not isinstance(config[key], dict) and config[key] != small.get(key)
    }
    before = TrainingJob(seq_len_tokens=LENGTH)
    after = TrainingJob(seq_len_tokens=rehearsed_sequence(LENGTH, layout))
    for rule in RULES:
        if not any(rule(original, layout, before, HARDWARE)):
            errors = list(rule(shrunken, layout, after, HARDWARE))
            assert not errors, f"{rule.__name__}: {errors}"


@st.composite
def model_configs(draw: st.DrawFn) -> dict[str, Any]:
    family = draw(st.sampled_from(SIZED_FAMILIES))
    key_value_heads = draw(st.integers(1, 16))
    heads = key_value_heads * draw(st.integers(1, 16))
    head_dim = draw(st.sampled_from((2, 16, 32, 64, 80, 96, 128, 256)))
    layers, vocab = draw(st.integers(1, 96)), draw(st.integers(600, 300_000))
    hidden = heads * head_dim
    if family == "gpt2":
        inner = draw(st.sampled_from((None, 3 * hidden)))
        sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": inner}
        return {"model_type": family, **sizes, "n_positions": draw(st.integers(1024, 8192)), "vocab_size": vocab}
    hidden = hidden if draw(st.booleans()) else draw(st.integers(1, 64)) * 16 * heads
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": draw(st.integers(1, 6 * hidden)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": vocab,
        "pad_token_id": draw(st.integers(0, vocab - 1)),
        "max_position_embeddings": draw(st.integers(512, 131_072)),
    }
    if draw(st.booleans()):
        config["head_dim"] = head_dim
    if draw(st.booleans()):
        config |= {
            "sliding_window": draw(st.none() | st.integers(1, 32_768)),
            "use_sliding_window": draw(st.booleans()),
        }
        config["max_window_layers"] = draw(st.integers(0, layers))
    if draw(st.booleans()):
        period = draw(st.integers(1, 6))
        kinds = ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(layers)]
        config["layer_types"] = kinds
    experts = draw(st.integers(1, 256))
    moe = {"num_experts_per_tok": draw(st.integers(1, min(16, experts))), "moe_intermediate_size": 768}
    if family in ("mixtral", "qwen3_moe"):
        config |= {"num_local_experts" if family == "mixtral" else "num_experts": experts, **moe}
    return config


@settings(max_examples=100, deadline=None)
@given(config=model_configs(), layout=st.sampled_from(PARALLEL))
def test_shrunken_random_models_pass_the_same_rules(config, layout):
    small, changes = shrink_model_config(config, layout=layout, seq_len_tokens=LENGTH)
    assert_faithful(config, layout, small, changes)
    after = spec_of(small).dimensions
    before = spec_of(config).dimensions
    assert after.vocab_size >= 512
    if layout.pp <= before.num_layers:
        assert after.num_layers % layout.pp == 0
    assert before.head_dim % 2 or after.head_dim % 2 == 0
    if before.num_experts:
        assert after.experts_per_token == min(before.experts_per_token, 4) or after.num_experts == before.num_experts
        assert after.num_experts > after.experts_per_token or after.num_experts == before.num_experts
        assert after.num_experts >= min(2 * layout.ep, before.num_experts)
    if "layer_types" in config:
        assert len(small["layer_types"]) == after.num_layers
        if before.num_layers >= 12:
            assert set(small["layer_types"]) == set(config["layer_types"])
    window = config.get("sliding_window")
    if window is not None:
        length = rehearsed_sequence(LENGTH, layout)
        assert (window < LENGTH) == (small["sliding_window"] < length)
    again = shrink(small, layout, rehearsed_sequence(LENGTH, layout))
    assert spec_of(again).parameter_count <= spec_of(small).parameter_count


LLAMA_ROPE = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
LLAMA = read(MODELS[[path.name for path in MODELS].index("meta-llama--Llama-3.1-8B")]) | {
    "rope_parameters": {**LLAMA_ROPE, "original_max_position_embeddings": 8192, "rope_theta": 500_000.0},
    "bos_token_id": 128_000,
    "eos_token_id": [128_001, 128_008, 128_009],
}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336,
    "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "max_position_embeddings": 8192, "vocab_size": 256000,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152,
    "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6,
    "max_position_embeddings": 32768, "vocab_size": 262144, "rope_theta": 1_000_000, "rope_local_base_freq": 10000,
    "bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0,
}  # fmt: skip
PHI3 = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096, "vocab_size": 32064, "bos_token_id": 1, "eos_token_id": 32000,
    "pad_token_id": 32000, "sliding_window": 262144, "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0 + i / 36 for i in range(36)],
                     "long_factor": [1.0 + i for i in range(36)]},
}  # fmt: skip
GEMMA3_IMAGES = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": 262144,
    "boi_token_index": 255999, "eoi_token_index": 256000, "mm_tokens_per_image": 256,
    "text_config": GEMMA3 | {"hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 4,
                             "vocab_size": 262208, "num_hidden_layers": 34},
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
                      "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 896, "patch_size": 14},
}  # fmt: skip
BUILT: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "deepseek_v3": DEEPSEEK_V3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma3": GEMMA3_IMAGES,
    "phi3": PHI3,
    "gpt_oss": GPT_OSS,
    "mixtral": read(next(path for path in MODELS if "Mixtral" in path.name)),
    "qwen3_moe": read(next(path for path in MODELS if "30B-A3B" in path.name)),
    "gpt2": read(next(path for path in MODELS if "gpt2" in path.name)),
}


def build(config: dict[str, Any], *, meta: bool) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    parsed = AutoConfig.for_model(config["model_type"], **json.loads(json.dumps(values)))
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        return AutoModelForCausalLM.from_config(parsed, trust_remote_code=False)


def parameter_patterns(model: Any) -> set[str]:
    names = [name.split(".") for name, _ in model.named_parameters()]
    return {".".join("*" if part.isdigit() else part for part in name) for name in names}


@pytest.mark.parametrize("family", BUILT)
def test_transformers_builds_the_shrunken_config_with_the_same_parameters(family):
    config = BUILT[family]
    layout = Layout(engine="deepspeed", zero_stage=2, dp_shard=4, sp=2, ep=2)
    small = build(shrink(config, layout), meta=True)
    large = build(config, meta=True)
    assert type(small) is type(large)
    assert parameter_patterns(small) == parameter_patterns(large)
    counts = [sum(p.numel() for p in model.parameters()) for model in (small, large)]
    assert counts[0] < 90_000_000 and counts[0] < counts[1] / 40


def test_deepseek_keeps_groups_ranks_and_layer_types():
    layout = Layout(engine="deepspeed", zero_stage=2, dp_shard=8, ep=4)
    config, changes = shrink_model_config(DEEPSEEK_V3, layout=layout, seq_len_tokens=LENGTH)
    assert (config["num_hidden_layers"], config["first_k_dense_replace"]) == (4, 1)
    assert config["n_routed_experts"] % 4 == 0 and config["n_routed_experts"] > config["num_experts_per_tok"] == 4
    assert config["topk_group"] < config["n_group"] and config["n_routed_experts"] % config["n_group"] == 0
    assert config["topk_group"] * config["n_routed_experts"] // config["n_group"] >= config["num_experts_per_tok"]
    assert config["qk_nope_head_dim"] == 2 * config["qk_rope_head_dim"] == config["v_head_dim"] == 16
    assert config["kv_lora_rank"] < config["q_lora_rank"] < config["hidden_size"]
    assert "quantization_config" not in config
    assert "quantization_config" in [change.where for change in changes]


def test_indices_and_steps_of_sparse_layers_are_adapted():
    config = {"num_hidden_layers": 24, "decoder_sparse_step": 2, "mlp_only_layers": [1, 5]}
    kept = kept_layers(config, layers=4, pipeline_stages=1)
    assert kept == [0, 1, 22, 23]
    base = LLAMA | {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], **config}
    assert shrink(base)["mlp_only_layers"] == [1]
    assert shrink(LLAMA | {"no_rope_layers": [1, 1, 1, 0] * 8})["no_rope_layers"] == [1, 1, 1, 0]
    neo = shrink(LLAMA | {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 16]]})
    assert neo["attention_types"] == [[["global", "local", "global", "local"], 1]]


def test_rotary_parts_stay_even():
    phi = shrink(PHI3)
    head_dim = phi["hidden_size"] // phi["num_attention_heads"]
    rotated = int(head_dim * 0.75)
    assert rotated % 2 == 0 and len(phi["rope_scaling"]["short_factor"]) == rotated // 2
    assert phi["max_position_embeddings"] // phi["original_max_position_embeddings"] == 131072 // 4096
    sections = shrink(LLAMA | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}})
    assert sum(sections["rope_scaling"]["mrope_section"]) == sections["head_dim"] // 2


def test_special_tokens_of_nested_configs_move_together():
    small = shrink(GEMMA3_IMAGES)
    assert small["text_config"]["vocab_size"] == 1024
    ids = [small[name] for name in ("image_token_index", "boi_token_index", "eoi_token_index")]
    assert len(set(ids)) == 3 and all(512 <= token < 1024 for token in ids)
    assert small["text_config"]["eos_token_id"] == [1, 106]
    assert small["vision_config"]["num_hidden_layers"] == 4
    absent = {key: value for key, value in PHI3.items() if key != "pad_token_id"}
    assert 512 <= shrink(absent)["pad_token_id"] < 1024


@pytest.mark.parametrize(
    ("config", "fragment"),
    [
        ({}, "model_type"),
        ({"model_type": "bert"}, "must set its layers"),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "text_config"),
        (LLAMA | {"hidden_size": [1, 2]}, "hidden_size"),
        (LLAMA | {"num_key_value_heads": 5}, "num_key_value_heads"),
    ],
)
def test_rejects_configs_that_cannot_be_shrunk(config, fragment):
    with pytest.raises(RefusedInputError, match=fragment):
        shrink(config)


def test_layouts_keep_all_axes_except_data_parallelism():
    zero3 = Layout(engine="deepspeed", zero_stage=3, dp_shard=32, tp=2, micro_batch_size=8, offload_optimizer="cpu")
    small, changes = shrink_layout(zero3, ranks=4)
    assert small == replace(zero3, dp_shard=2, micro_batch_size=2)
    assert [(change.where, change.before, change.after) for change in changes] == [
        ("dp_shard", 32, 2),
        ("micro_batch_size", 8, 2),
    ]
    ddp = replace(DDP, gradient_accumulation_steps=16)
    assert shrink_layout(ddp, ranks=2)[0] == replace(ddp, dp_replicate=2, gradient_accumulation_steps=2)
    hybrid = Layout(engine="fsdp2", dp_replicate=4, dp_shard=8)
    assert shrink_layout(hybrid, ranks=8)[0] == replace(hybrid, dp_shard=2)
    assert shrink_layout(Layout(engine="single"), ranks=1) == (Layout(engine="single"), ())


@given(layout=st.sampled_from(PARALLEL), ranks=st.integers(1, 64))
def test_legal_layout_stays_legal_on_fewer_ranks(layout, ranks):
    model = spec_of(GEMMA2 if layout.cp == 1 else LLAMA)
    if legality_errors(model, layout, TrainingJob(seq_len_tokens=LENGTH), HARDWARE):
        return
    try:
        small, _ = shrink_layout(layout, ranks=ranks)
    except UsageError as error:
        legal = [int(word) for word in error.errors[0].fix.split() if word.isdigit()]
        assert legal
        for count in legal:
            shrink_layout(layout, ranks=count)
        return
    hardware = parse_hardware(f"1x{ranks}xA100-80GB")
    config = shrink(GEMMA2 if layout.cp == 1 else LLAMA, layout)
    job = TrainingJob(seq_len_tokens=rehearsed_sequence(LENGTH, layout))
    assert legality_errors(spec_of(config), small, job, hardware) == ()


@pytest.mark.parametrize("directory", MODELS[::3], ids=lambda path: path.name)
@pytest.mark.parametrize("lean", [False, True])
def test_zero_sizes_scale_with_the_model(directory, lean):
    config = read(directory)
    original, shrunken = spec_of(config), spec_of(shrink(config))
    for stage in (2, 3):
        zero = default_zero_options(original, TrainingJob(), stage=stage, lean=lean)
        zero = replace(zero, parameter_buffer_elements=original.largest_parameter // 8 if stage == 3 else 0)
        small = shrink_zero_options(zero, original=original, shrunken=shrunken)
        assert small.reduce_bucket_size % 2 == 0 or zero.reduce_bucket_size % 2
        for name in (
            "reduce_bucket_size",
            "stage3_prefetch_bucket_size",
            "sub_group_size",
            "stage3_max_reuse_distance",
        ):
            before, after = getattr(zero, name), getattr(small, name)
            assert after <= before and (after == 0) == (before == 0)
            if before:
                assert (after < shrunken.parameter_count) == (before < original.parameter_count), name
        threshold = zero.stage3_param_persistence_threshold
        persistent = {p.name for p in original.parameters if p.numel <= threshold}
        now = {p.name for p in shrunken.parameters if p.numel <= small.stage3_param_persistence_threshold}
        assert now == persistent
        if stage == 3:
            swapped = max(p.numel for p in shrunken.parameters if p.name not in now)
            assert swapped <= small.parameter_buffer_elements < zero.parameter_buffer_elements


DEEPSPEED = {
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "bf16": {"enabled": "auto"}, "zero_force_ds_cpu_optimizer": True, "my_key": [1],
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": "auto", "sub_group_size": 10**9,
        "param_persistence_threshold": 40960, "stage3_max_live_parameters": 10, "overlap_comm": True,
        "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 10**8, "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}  # fmt: skip
SMALL_ZERO = ZeroOptions(
    reduce_bucket_size=5000, stage3_param_persistence_threshold=1280, sub_group_size=9000, parameter_buffer_elements=700
)


PLANNED = Layout(engine="deepspeed", zero_stage=3, dp_shard=8, micro_batch_size=4, gradient_accumulation_steps=2)
REHEARSED = replace(PLANNED, dp_shard=2, micro_batch_size=2)


def rewritten(shrink_file: Any, values: Mapping[str, Any], **settings: Any) -> tuple[dict[str, Any], list[Change]]:
    copy = deepcopy(dict(values))
    shrink_file(copy, **settings)
    return copy, list(changes_between(values, copy))


def test_deepspeed_files_change_only_sizes():
    settings = {"zero": SMALL_ZERO, "nvme_path": "/new", "before": PLANNED, "after": REHEARSED}
    small, changes = rewritten(shrink_deepspeed_config, DEEPSPEED, **settings)
    section = DEEPSPEED["zero_optimization"]
    assert isinstance(section, dict)
    assert small == DEEPSPEED | {
        "train_batch_size": 2 * 2 * 2,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": section
        | {
            "reduce_bucket_size": 5000,
            "param_persistence_threshold": 1280,
            "sub_group_size": 9000,
            "offload_param": {"device": "nvme", "nvme_path": "/new", "buffer_size": 700, "pin_memory": True},
        },
    }
    assert Change(where="zero_optimization.offload_param.nvme_path", before="/nvme", after="/new") in changes
    assert len(changes) == 7


def test_accelerate_files_change_only_ranks():
    config = {
        "distributed_type": "DEEPSPEED", "num_processes": 32, "num_machines": 4, "main_process_ip": "head",
        "main_process_port": 29500, "machine_rank": 0,
        "deepspeed_config": {"deepspeed_config_file": "./ds_config.json", "zero3_init_flag": True},
    }  # fmt: skip
    small, changes = rewritten(shrink_accelerate_config, config, ranks=4, deepspeed_config_file="/d/ds.json")
    assert small == config | {
        "num_processes": 4,
        "num_machines": 1,
        "main_process_ip": "127.0.0.1",
        "deepspeed_config": {"deepspeed_config_file": "/d/ds.json", "zero3_init_flag": True},
    }
    assert len(changes) == 4
    assert rewritten(shrink_accelerate_config, {}, ranks=2, deepspeed_config_file="ds.json") == ({}, [])
    key = "parallelism_config_dp_shard_size"
    axes = {"parallelism_config_dp_replicate_size": 4, key: 8}
    for processes, shards in ((32, 2), (31, 8)):
        hybrid = {"num_processes": processes, "parallelism_config": axes}
        small, _ = rewritten(shrink_accelerate_config, hybrid, ranks=8, deepspeed_config_file="ds.json")
        assert small["parallelism_config"][key] == shards and small["num_processes"] == 8
