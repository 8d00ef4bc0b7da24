"""Model classes that support quantization, checked with classes of Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distilling import tiny
from shardwright.ds_configs.legality.model_classes import model_class_errors
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.transformers.meta_model import open_source
from shardwright.trainers.qat.callback import QATCallback

pytestmark = pytest.mark.slow

REFUSED = {"gpt2": "such as transformer.h.0", "t5": "an encoder-decoder", "bert_mlm": "must be a causal"}


def test_model_classes_are_checked_by_work_and_targets() -> None:
    plain: dict[str, Any] = {"is_causal": True, "is_encoder_decoder": False}
    assert model_class_errors("LlamaForCausalLM", work="quantize", **plain) == []
    both = {"is_causal": False, "is_encoder_decoder": True}
    assert model_class_errors("T5ForConditionalGeneration", work="qat", **both) == []
    assert len(model_class_errors("Mixed", work="quantize", **both, transposed_layers=("h.0.c_fc",))) == 2
    (error,) = model_class_errors("GPT2LMHeadModel", work="quantize", **plain, transposed_layers=("h.0.c_fc",))
    assert error.fix == "use a model with linear layers", "no targets would be looked at"
    named = model_class_errors("GPT2LMHeadModel", work="qat", **plain, transposed_layers=("h.0.c_fc",), targets=("a",))
    assert named == []


@pytest.mark.parametrize("kind", REFUSED)
def test_quantize_rejects_a_class_before_reading_weights(kind: str, tmp_path: Path) -> None:
    tiny(kind).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=REFUSED[kind]):
        open_source(str(tmp_path))


def test_training_with_rounding_names_transposed_layers(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    with pytest.raises(UsageError, match=REFUSED["gpt2"]):
        QATCallback("W4A16").prepare(TrainingArguments(str(tmp_path), use_cpu=True), tiny("gpt2"))
