"""Configurations that nobody meant: a plan or one line of why not, with little built, whatever they hold."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.ds_configs.specs.errors import ConfigError, RefusedInputError, ShardwrightError, UsageError
from shardwright.plugins.planning import plan

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {**SIZES, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
LATENT = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
LINEAR = {"num_experts": 4, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 128},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 100},
    "qwen3_moe": SIZES | EXPERTS | {"num_experts": 4, "mlp_only_layers": []},
    "gemma3_text": SIZES | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    "gemma3": {"text_config": SIZES | {"model_type": "gemma3_text"}, "vision_config": VISION, "mm_tokens_per_image": 1},
    "deepseek_v3": SIZES | EXPERTS | LATENT,
    "qwen3_next": SIZES | EXPERTS | LINEAR,
    "bert": SIZES | {"max_position_embeddings": 64},
    "whisper": {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 100, "pad_token_id": 0}
    | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_source_positions": 64},
    "clip": {"text_config": SIZES | {"max_position_embeddings": 16}, "vision_config": VISION, "projection_dim": 8},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 100},
}
ABSURD: tuple[Any, ...] = (
    *(None, -1, 0, 1_000, 10**6, 10**9, 10**30, 1.5, float("inf"), True, "x", ""),
    *([], [-1], [10**9, None], ["x"], [["global"], 10**9], {}, {"a": None}, {"text_config": {}}),
    {"rope_type": "x", "num_hidden_layers": -1},
)


@st.composite
def hostile(draw: st.DrawFn) -> dict[str, Any]:
    """A small configuration of a family, one or two of whose values, nested ones too, are dropped or replaced."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    config = json.loads(json.dumps(FAMILIES[family] | {"model_type": family}))
    for _ in range(draw(st.integers(1, 2))):
        places = [(config, key) for key in config]
        places += [(part, key) for part in config.values() if isinstance(part, dict) for key in part]
        part, key = draw(st.sampled_from(places))
        if draw(st.booleans()):
            # A copy, because the next change may edit the value.
            part[key] = deepcopy(draw(st.sampled_from(ABSURD)))
        else:
            del part[key]
    return config


@settings(max_examples=60)
@given(config=hostile())
def test_any_config_is_planned_or_rejected(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> None:
    file = tmp_path_factory.mktemp("hostile") / "config.json"
    file.write_text(json.dumps(config))
    try:
        plan(str(file), "1xA100-80GB", seq_len=16, micro_batch_size=1, calibration=None)
    except ShardwrightError as error:
        assert error.exit_code in (2, 3, 4)
        assert len(str(error).splitlines()) == len(getattr(error, "errors", str(error).splitlines()))


@pytest.mark.parametrize("family", FAMILIES)
def test_unmodified_configs_are_valid(family: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(FAMILIES[family] | {"model_type": family}))
    assert plan(str(file), "1xA100-80GB", seq_len=16, micro_batch_size=1, calibration=None).model.parameter_count > 1000


def refusal(tmp_path: Path, config: dict[str, Any]) -> ConfigError:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises((RefusedInputError, UsageError)) as caught:
        plan(str(file), "1xA100-80GB", calibration=None)
    (error,) = caught.value.errors
    return error


@pytest.mark.parametrize(
    ("more", "way_out"),
    [
        ({"transformers_version": "7.1.0"}, "was written by transformers 7.1.0, which supports it"),
        ({}, "names no version that supports it"),
    ],
)
def test_unknown_model_type_suggests_a_newer_transformers(more: dict[str, Any], way_out: str, tmp_path: Path) -> None:
    error = refusal(tmp_path, SIZES | {"model_type": "unheard_of", **more})
    assert (error.value, way_out in error.fix) == ("unheard_of", True)
