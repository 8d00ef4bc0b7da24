"""Model types that Transformers does not know: planned as the family of a known class."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paths import CONFIGS
from planning import DEEPSEEK_V3
from shardwright.ds_configs.specs.errors import RefusedInputError
from shardwright.plugins.huggingface_hub import ModelSource
from shardwright.plugins.planning import LoadedModel, load_model_spec, model_from_source

DEEPSEEK = DEEPSEEK_V3 | {
    **{"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 128, "num_hidden_layers": 3},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 16, "num_experts_per_tok": 4},
    **{"first_k_dense_replace": 1, "vocab_size": 2000},
}
CODE = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}


def public(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8"))
    return config


def loaded(config: dict[str, Any], directory: Path) -> LoadedModel:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_model_spec(str(directory), by_structure=True)


@pytest.mark.parametrize(
    ("config", "own_type"),
    [
        (DEEPSEEK, "kimi_k2"),
        (public("mistralai--Mixtral-8x7B-v0.1"), "own_mixture"),
        (public("Qwen--Qwen2.5-0.5B"), "own_qwen"),
        (public("openai-community--gpt2"), "own_gpt"),
        # A class that is not stored: its name leads to the family.
        (
            public("meta-llama--Llama-3.2-1B") | {"model_type": "helium", "architectures": ["HeliumForCausalLM"]},
            "own_helium",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_known_class_decides_the_family(config: dict[str, Any], own_type: str, tmp_path: Path) -> None:
    family = loaded(config, tmp_path / "family").spec
    model = loaded(config | {"model_type": own_type} | CODE, tmp_path / "own")
    assert model.spec.parameter_count == family.parameter_count
    assert (model.spec.model_type, model.spec.dimensions) == (family.model_type, family.dimensions)
    assert any(own_type in note and family.model_type in note for note in model.notes)
    assert model.spec.source == "structure"
    with pytest.raises(RefusedInputError, match="unknown to transformers"):
        loaded(config | {"model_type": own_type}, tmp_path / "without code")


def test_remote_code_of_a_known_class_is_not_planned_as_another_known_type(tmp_path: Path) -> None:
    model = loaded(DEEPSEEK | CODE | {"model_type": "llama"}, tmp_path / "own")
    assert model.spec.parameter_count == loaded(DEEPSEEK, tmp_path / "family").spec.parameter_count
    assert any("'llama'" in note and "DeepseekV3ForCausalLM" in note for note in model.notes)


def test_a_class_of_another_family_than_the_known_type_is_reported(tmp_path: Path) -> None:
    config = public("meta-llama--Llama-3.2-1B") | {"architectures": ["MistralForCausalLM"]}
    notes = loaded(config, tmp_path / "own").notes
    assert any("MistralForCausalLM" in note and "'llama'" in note for note in notes)


@pytest.mark.parametrize(("stored", "is_noted"), [(1.0, False), (1.002, False), (1.01, True), (0.98, True)])
@pytest.mark.parametrize("has_head", [False, True])
def test_a_checkpoint_may_store_a_tied_head_twice(stored: float, is_noted: bool, has_head: bool) -> None:
    config = public("openai-community--gpt2")
    head = config["vocab_size"] * config["n_embd"] if has_head else 0
    source = ModelSource(name="m", revision=None, config=config, checkpoint_parameters=None)
    count = round(stored * (model_from_source(source).spec.parameter_count + head))
    notes = model_from_source(replace(source, checkpoint_parameters=count)).notes
    assert any("the checkpoint has" in note for note in notes) == is_noted
