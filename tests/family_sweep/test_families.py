"""The quick part of the sweep over families: heads, encoder-decoders and classes that the tables name.

All of them: `python benchmarks/families.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from family_sweep.checks import finding, samples
from family_sweep.tiny_configs import NOT_OF_TEXT_ALONE, every_class, tiny_model
from shardwright.ds_configs.legality.model_classes import UNSUPPORTED
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.trainers.qat.callback import QATCallback

pytestmark = pytest.mark.slow

FUSED = ("CohereForCausalLM", "GraniteForCausalLM", "OPTForCausalLM", "T5ForConditionalGeneration")
BIAS_BEHIND_THE_HEAD = (
    *("BartForConditionalGeneration", "BlenderbotForConditionalGeneration", "LEDForConditionalGeneration"),
    *("MBartForConditionalGeneration", "MarianMTModel", "PegasusForConditionalGeneration"),
    *("BigBirdPegasusForConditionalGeneration", "MvpForConditionalGeneration", "PLBartForConditionalGeneration"),
)
OTHER_LOGITS = ("FalconH1ForCausalLM", "RecurrentGemmaForCausalLM")


@pytest.mark.parametrize("class_name", [*FUSED, *BIAS_BEHIND_THE_HEAD])
def test_a_loss_in_the_place_of_the_head_is_that_of_whole_logits(class_name: str) -> None:
    found = finding("distillation", class_name)
    assert found["state"] == "passes", found
    assert found["said"].startswith("fused")


@pytest.mark.parametrize("class_name", OTHER_LOGITS)
def test_other_logits_are_taken_whole(class_name: str) -> None:
    found = finding("distillation", class_name)
    assert found["state"] == "passes", found


@pytest.mark.parametrize("class_name", ["Qwen3ForCausalLM", "T5ForConditionalGeneration"])
def test_rounding_is_exported(class_name: str) -> None:
    assert finding("QAT export", class_name)["state"] == "passes"


def test_a_family_is_rounded_after_training() -> None:
    assert finding("quantize", "OPTForCausalLM")["state"] == "passes"


@pytest.mark.parametrize("class_name", ["MambaForCausalLM", "GPTBigCodeForCausalLM"])
def test_what_nothing_loads_again_is_refused_before_training(class_name: str, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    with pytest.raises(UsageError, match="past their forward"):
        QATCallback("W4A16").prepare(TrainingArguments(str(tmp_path), use_cpu=True), tiny_model(class_name))


def test_the_tables_name_what_transformers_has() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    parts = {"gemma4_unified_text", "hrm_text"}
    assert UNSUPPORTED.keys() - parts <= CONFIG_MAPPING_NAMES.keys()
    assert every_class().keys() >= NOT_OF_TEXT_ALONE.keys()
    assert len(samples()[0]["input_ids"]) == len(samples()[0]["labels"])
