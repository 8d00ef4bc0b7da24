"""The upper bound from a model's structure exceeds every stored family, grows with its inputs, and is reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved_tensors import saved_storages
from shardwright.ds_configs.memory.activations import (
    Attention,
    Mode,
    bounded_activations,
    estimate_activations,
)
from shardwright.ds_configs.models.images import image_tokens
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.plan.plan import Plan
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.plugins.planning import load_model_spec, plan

BYTES = (
    "saved_bytes_per_layer",
    "checkpointed_bytes_per_layer",
    "outside_layer_bytes",
    "backward_transient_bytes",
    "recompute_backward_transient_bytes",
    "forward_transient_bytes",
    "loss_forward_peak_bytes",
    "loss_backward_peak_bytes",
)
DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
SMALL_MT5 = {
    "model_type": "mt5",
    "architectures": ["MT5ForConditionalGeneration"],
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 256,
}


@st.composite
def stored_models(draw: st.DrawFn) -> ModelSpec:
    family = draw(st.sampled_from([*DENSE, "mixtral", "qwen3_moe", "gpt2"]))
    head_dim, groups, repeats = draw(st.sampled_from([32, 64, 128])), draw(st.integers(1, 8)), draw(st.integers(1, 8))
    heads = groups * repeats
    if family == "gpt2":
        config: dict[str, Any] = {"n_embd": heads * head_dim, "n_layer": 3, "n_head": heads, "n_positions": 4096}
        config |= {"vocab_size": draw(st.integers(1000, 100_000))}
    else:
        hidden = heads * head_dim
        config = {
            "num_hidden_layers": 3,
            "hidden_size": hidden,
            "intermediate_size": draw(st.integers(1, 8)) * hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": head_dim,
            "vocab_size": draw(st.integers(1000, 300_000)),
        }
    if family == "mixtral":
        config |= {"num_local_experts": draw(st.integers(4, 16)), "num_experts_per_tok": draw(st.integers(1, 4))}
    if family == "qwen3_moe":
        config |= {"num_experts": draw(st.integers(16, 256)), "num_experts_per_tok": draw(st.integers(1, 10))}
        config |= {"moe_intermediate_size": draw(st.integers(2, 16)) * 128}
    model = model_spec_from_config(config | {"model_type": family}, name=family)
    assert model is not None
    return model


@given(
    model=stored_models(),
    mode=st.sampled_from(get_args(Mode)),
    batch=st.integers(1, 16),
    length=st.integers(64, 16_384),
    attention=st.sampled_from(["fused", "masked", "eager"]),
)
def test_no_stored_family_needs_more(
    model: ModelSpec, mode: Mode, batch: int, length: int, attention: Attention
) -> None:
    """Every quantity of every family whose traced bytes are known, in any shape."""
    job = TrainingJob(seq_len_tokens=length)
    window = length // 2 if attention == "masked" else None
    windowed = replace(model, sliding_window=window, attention="eager" if attention == "eager" else None)
    bound = bounded_activations(windowed, job, micro_batch_size=batch, mode=mode)
    traced = estimate_activations(
        family=model.model_type,
        release=model.release,
        dimensions=model.dimensions,
        micro_batch_size=batch,
        seq_len_tokens=length,
        mode=mode,
        attention=attention,
    )
    below = {name for name in BYTES if getattr(bound, name) < getattr(traced, name)}
    assert not below, below
    # A bound of any height would hold; this one is within a small factor of what layers keep.
    assert bound.saved_bytes_per_layer < 6 * traced.saved_bytes_per_layer


_TEXT = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 512, "pad_token_id": 0},
}
_TOWER = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 2}
_TOWER |= {"image_size": 56, "patch_size": 7}
_GRID = [[56 * row, 56 * column] for row in (1, 2) for column in (1, 2)]
_ROUTED = {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 128, "attention_chunk_size": 1024}
_SHUFFLED = dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 256)
TILED: dict[str, dict[str, Any]] = {
    "LlavaNextForConditionalGeneration": {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _TOWER | {"model_type": "clip_vision_model"},
        "image_grid_pinpoints": _GRID,
    },
    "LlavaOnevisionForConditionalGeneration": {
        "text_config": _TEXT | {"model_type": "qwen2"},
        "vision_config": _TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        "image_grid_pinpoints": _GRID,
    },
    "Llama4ForConditionalGeneration": {
        "text_config": _TEXT | _ROUTED,
        "vision_config": _TOWER | _SHUFFLED | {"pixel_shuffle_ratio": 0.5},
    },
}


@pytest.mark.parametrize("architecture", TILED)
@pytest.mark.parametrize(("height", "width"), [(100, 90), (50, 150)])
def test_towers_of_tiles_keep_less_than_the_bound(architecture: str, height: int, width: int, tmp_path: Path) -> None:
    import torch
    import transformers

    kind = getattr(transformers, architecture)
    config = kind.config_class(**TILED[architecture], image_token_index=500, architectures=[architecture])
    config.save_pretrained(tmp_path)
    spec = load_model_spec(str(tmp_path)).spec
    trained = {"vision_tower": "trained", "projector": "trained"}
    job = TrainingJob(images_per_sample=1, image_size=f"{width}x{height}", seq_len_tokens=512, **trained)
    image = image_tokens(spec, job)
    assert image is not None
    model = kind(config).to(torch.bfloat16).train()
    ids = torch.randint(1, 400, (1, 512))
    ids[0, 5 : 5 + image.features] = 500
    pixels = torch.randn(image.tiles, 3, 56, 56, dtype=torch.bfloat16)
    is_llama = "Llama4" in architecture
    sizes = {} if is_llama else {"image_sizes": torch.tensor([[height, width]])}
    known = [*model.parameters(), *model.buffers(), pixels, ids]
    with saved_storages(known) as kept:
        (model.vision_model if is_llama else model.model.vision_tower)(pixels)
    bound = bounded_activations(spec, job, micro_batch_size=1, mode="bf16")
    assert sum(kept.values()) < bound.tower_saved_bytes < 3 * sum(kept.values())
    with saved_storages(known) as kept:
        model(input_ids=ids, pixel_values=pixels if is_llama else pixels[None], use_cache=False, **sizes)
    layers = bound.saved_bytes_per_layer * spec.dimensions.num_layers
    assert sum(kept.values()) < layers + bound.tower_saved_bytes + bound.outside_layer_bytes


def written(directory: Path, config: dict[str, Any]) -> str:
    path = directory / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_plan_of_family_without_coefficients_reports_upper_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = plan(written(tmp_path, SMALL_MT5), "8xA100-80GB", calibration=None)
    assert made.activations == "upper bound"
    assert any("upper bound" in note for note in caplog.messages)
    assert made.to_dict()["activations"] == "upper bound"
    made.write(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan") == made


def test_model_without_bound_is_rejected_with_reason(tmp_path: Path) -> None:
    config = {"model_type": "convnext", "architectures": ["ConvNextForImageClassification"]}
    with pytest.raises(UsageError, match=r"no upper bound can be computed: convnext.* has convolutions"):
        plan(written(tmp_path, config), "8xA100-80GB", calibration=None)


@pytest.mark.parametrize(
    ("change", "heads"),
    [({}, 1), ({"multi_query": False}, 8), ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2)],
)
def test_falcon_counts_computed_key_value_heads(tmp_path: Path, change: dict[str, Any], heads: int) -> None:
    config = {"model_type": "falcon", "architectures": ["FalconForCausalLM"], "hidden_size": 64, "vocab_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 8}
    spec = load_model_spec(written(tmp_path, config | change)).spec
    assert spec.dimensions.num_key_value_heads == heads
    projected = next(p for p in spec.parameters if p.name.endswith("query_key_value.weight"))
    assert projected.shape[0] == spec.dimensions.query_size + 2 * spec.dimensions.key_value_size
