"""The light installation counts the models of the sweep as Transformers builds them, or leaves them to it."""

from __future__ import annotations

import json

import pytest
from family_sweep.layouts import HYBRIDS, hybrid_config
from family_sweep.test_families import BIAS_BEHIND_THE_HEAD, FUSED
from family_sweep.tiny_configs import every_class
from planning import RELEASE
from shardwright.ds_configs.models.stored_shapes import load_shapes, model_spec_from_config
from shardwright.plugins.transformers.meta_model import model_spec_from_meta
from shardwright.tools.parameter_shapes import differences

NOT_COUNTED = {
    "BambaForCausalLM": "names its layers with attention by their numbers",
    "JambaForCausalLM": "counts layers by periods with an offset",
    "Lfm2ForCausalLM": "rounds the width of its layers by settings of its own",
    "MarianMTModel": "has a vocabulary whose last token pads",
    "Zamba2ForCausalLM": "shares one layer among several places",
}
"""Models of the sweep that are left to Transformers, and why their tensors are no expressions of a configuration."""


@pytest.mark.full
def test_light_counts_equal_those_of_transformers() -> None:
    import transformers

    stored = {name.partition(" ")[0] for name in load_shapes(RELEASE)["classes"]}
    different = {}
    for name in stored & every_class().keys():
        model_class = getattr(transformers, name)
        config = json.loads(model_class.config_class().to_json_string()) | {"architectures": [name]}
        found = model_spec_from_config(config, name="m", release=RELEASE)
        if found is not None and (errors := differences(found, model_spec_from_meta(config, name="m"))):
            different[name] = errors
    assert different == {}


@pytest.mark.parametrize("name", [*HYBRIDS, *FUSED, *BIAS_BEHIND_THE_HEAD])
def test_models_of_the_sweep_are_planned_without_transformers(name: str) -> None:
    import transformers

    config_class = getattr(transformers, name).config_class
    config = hybrid_config(name) if name in HYBRIDS else config_class()
    values = json.loads(config.to_json_string()) | {"architectures": [name]}
    found = model_spec_from_config(values, name="m", release=RELEASE)
    assert (found is None) == (name in NOT_COUNTED)
    assert found is None or differences(found, model_spec_from_meta(values, name="m")) == []
