"""Classes of models that can be quantized: each row of the table is met by a real class of Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distilling import tiny
from shardwright.ds_configs.legality.model_classes import model_class_faults
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.transformers.quantization_source import open_source
from shardwright.trainers.qat.callback import QATCallback

pytestmark = pytest.mark.slow

REFUSED = {"gpt2": "in Conv1D, such as transformer.h.0", "t5": "an encoder with a decoder", "bert_mlm": "no causal"}


def test_what_is_asked_of_a_class() -> None:
    plain: dict[str, Any] = {"is_causal": True, "is_encoder_decoder": False}
    assert model_class_faults("LlamaForCausalLM", work="quantize", **plain) == []
    both = {"is_causal": False, "is_encoder_decoder": True}
    assert model_class_faults("T5ForConditionalGeneration", work="qat", **both) == []
    assert len(model_class_faults("Mixed", work="quantize", **both, transposed_layers=("h.0.c_fc",))) == 2
    (fault,) = model_class_faults("GPT2LMHeadModel", work="quantize", **plain, transposed_layers=("h.0.c_fc",))
    assert fault.fix == "use a model of linear layers", "no targets would be looked at"
    named = model_class_faults("GPT2LMHeadModel", work="qat", **plain, transposed_layers=("h.0.c_fc",), targets=("a",))
    assert named == []


@pytest.mark.parametrize("kind", REFUSED)
def test_quantize_refuses_a_class_before_weights_are_read(kind: str, tmp_path: Path) -> None:
    tiny(kind).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=REFUSED[kind]):
        open_source(str(tmp_path))


def test_training_with_rounding_names_transposed_layers(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    with pytest.raises(UsageError, match=REFUSED["gpt2"]):
        QATCallback("W4A16").prepare(TrainingArguments(str(tmp_path), use_cpu=True), tiny("gpt2"))
