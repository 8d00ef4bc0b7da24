"""Classes of the installed Transformers are planned, planned by an upper bound, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.plugins.planning import plan


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", "stored"),
        ("DeepseekV3ForCausalLM", "stored"),
        ("GptOssForCausalLM", "stored"),
        ("Qwen3NextForCausalLM", "stored"),
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

    config = getattr(transformers, architecture).config_class().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    try:
        found = plan(str(tmp_path / "config.json"), "128x8xH100-80GB", calibration=None).activations
    except ShardwrightError as error:
        found = "refused"
        assert str(error)
    assert found == expected
