"""Classes of the installed Transformers are planned, planned by an upper bound, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.plugins.planning import plan

DEPTHS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


def shallow(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with two layers in every stack."""
    changed = {name: shallow(value) if isinstance(value, dict) else value for name, value in config.items()}
    changed |= {name: 2 for name in DEPTHS if isinstance(config.get(name), int)}
    return changed | {name: config[name][:2] for name in ("layer_types",) if config.get(name)}


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", "stored"),
        ("DeepseekV3ForCausalLM", "stored"),
        ("GptOssForCausalLM", "stored"),
        ("Qwen3NextForCausalLM", "upper bound"),
        ("WhisperForConditionalGeneration", "stored"),
        ("MambaForCausalLM", "upper bound"),
        ("Gemma4ForCausalLM", "upper bound"),
        ("AriaTextForCausalLM", "upper bound"),
        ("NeoMMEForMaskedLM", "upper bound"),
        ("PerceiverForMaskedLM", "upper bound"),
        ("ResNetForImageClassification", "refused"),
    ],
)
def test_a_class_comes_to_a_plan_or_a_reason(architecture: str, expected: str, tmp_path: Path) -> None:
    import transformers

    config = shallow(getattr(transformers, architecture).config_class().to_dict())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    try:
        found = plan(str(tmp_path / "config.json"), "8xH100-80GB", calibration=None).activations
    except ShardwrightError as error:
        found = "refused"
        assert str(error)
    assert found == expected
