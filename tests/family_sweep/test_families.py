"""Checks of small models of some families: heads, encoder-decoders and classes that the tables name."""

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
    *("BartForConditionalGeneration", "BlenderbotForConditionalGeneration", "MarianMTModel"),
    *("MvpForConditionalGeneration", "PLBartForConditionalGeneration"),
)


@pytest.mark.parametrize("class_name", [*FUSED, *BIAS_BEHIND_THE_HEAD])
def test_chunked_loss_equals_the_loss_of_full_logits(class_name: str) -> None:
    found = finding("distillation", class_name)
    assert found.state == "passes", found
    assert found.said.startswith("fused")


def test_families_without_a_kernel_use_full_logits() -> None:
    found = finding("distillation", "RecurrentGemmaForCausalLM")
    assert found.state == "passes", found


@pytest.mark.parametrize("class_name", ["Qwen3ForCausalLM", "T5ForConditionalGeneration"])
def test_qat_export_matches_training(class_name: str) -> None:
    assert finding("QAT export", class_name).state == "passes"


@pytest.mark.needs("llmcompressor")
def test_families_quantize_after_training() -> None:
    assert finding("quantize", "OPTForCausalLM").state == "passes"


@pytest.mark.parametrize("class_name", ["MambaForCausalLM", "GPTBigCodeForCausalLM"])
def test_rejects_families_without_a_loadable_checkpoint(class_name: str, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    with pytest.raises(UsageError, match="outside their forward"):
        QATCallback("W4A16").prepare(TrainingArguments(str(tmp_path), use_cpu=True), tiny_model(class_name))


def test_tables_name_known_model_types() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    parts = {"gemma4_unified_text", "hrm_text"}
    assert UNSUPPORTED.keys() - parts <= CONFIG_MAPPING_NAMES.keys()
    assert every_class().keys() >= NOT_OF_TEXT_ALONE.keys()
    assert len(samples()[0]["input_ids"]) == len(samples()[0]["labels"])
