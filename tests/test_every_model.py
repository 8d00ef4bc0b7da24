"""Classes of the installed Transformers are planned, planned by an upper bound, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardwright.tools.every_model import classes, outcome


@pytest.mark.parametrize(
    ("architecture", "model_type", "expected"),
    [
        ("LlamaForCausalLM", "llama", "planned"),
        ("DeepseekV3ForCausalLM", "deepseek_v3", "planned"),
        ("GptOssForCausalLM", "gpt_oss", "planned"),
        ("Qwen3NextForCausalLM", "qwen3_next", "planned by an upper bound"),
        ("WhisperForConditionalGeneration", "whisper", "planned"),
        ("MambaForCausalLM", "mamba", "planned by an upper bound"),
        ("Gemma4ForCausalLM", "gemma4_text", "planned by an upper bound"),
        ("AriaTextForCausalLM", "aria_text", "planned by an upper bound"),
        ("NeoMMEForMaskedLM", "neomme", "planned by an upper bound"),
        ("PerceiverForMaskedLM", "perceiver", "planned by an upper bound"),
        ("ResNetForImageClassification", "resnet", "refused"),
    ],
)
def test_a_class_comes_to_a_plan_or_a_reason(architecture: str, model_type: str, expected: str, tmp_path: Path) -> None:
    result, reason = outcome(architecture, model_type, tmp_path, limit_seconds=0)
    assert result == expected, reason
    assert bool(reason) == (expected == "refused")


def test_the_classes_are_those_of_transformers() -> None:
    found = classes()
    assert found["T5ForConditionalGeneration"] == "t5"
    assert len(found) > 300
