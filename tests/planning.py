"""Small models, activation bytes and strategies that planning tests share."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from paths import CONFIGS
from shardwright.ds_configs.memory.activations import ActivationEstimate, Mode
from shardwright.ds_configs.models.families import model_spec_from_config
from shardwright.ds_configs.models.model_config import config_errors, parse_config_json
from shardwright.ds_configs.plan.gallery import gallery_entry, gallery_plan
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.plugins.releases import transformers_release

RELEASE = transformers_release()
"""Of the installed Transformers, with which real models are built."""


def public_model(name: str) -> ModelSpec:
    """The spec of a public model by its Hub id."""
    file = CONFIGS / name.replace("/", "--") / "config.json"
    spec = model_spec_from_config(parse_config_json(file.read_bytes(), source=name), name=name)
    assert spec is not None
    return spec


@cache
def gallery_directory(name: str = "llama-3.1-8b_8xA100-80GB") -> Path:
    """A directory with the files of a gallery plan, which the session removes."""
    directory = Path(tempfile.mkdtemp()) / name
    gallery_plan(gallery_entry(name)).write(directory)
    return directory


def llama(**changes: Any) -> ModelSpec:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
        "tie_word_embeddings": False,
        **changes,
    }
    assert not config_errors(config, source="test")
    spec = model_spec_from_config(config, name="small-llama")
    assert spec is not None
    return spec


def no_activations(micro_batch_size: int, mode: Mode) -> ActivationEstimate:
    """Zero activation bytes, to look at model states alone."""
    return ActivationEstimate(
        saved_bytes_per_layer=0,
        checkpointed_bytes_per_layer=0,
        outside_layer_bytes=0,
        backward_transient_bytes=0,
        recompute_backward_transient_bytes=0,
        forward_transient_bytes=0,
        loss_forward_peak_bytes=0,
        loss_kept_bytes=0,
        loss_backward_peak_bytes=0,
        autocast_weight_copy_bytes_per_parameter=0,
        source="none",
    )
