"""Broken models are rejected with an error that names the defect; a valid one loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faults.broken_models import BROKEN, broken_copy
from shardwright.ds_configs.specs.errors import InputError
from shardwright.plugins.safetensors import StoredTensor
from shardwright.plugins.transformers import second_model
from shardwright.plugins.transformers.loading import (
    auto_class,
    is_finite,
    load_causal_lm,
    loads_on_first_rank,
    nonfinite_weights,
    stored_errors,
)
from small_models import llama


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    llama(hidden_size=32, vocab_size=260, tie_word_embeddings=False).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_model_is_rejected_by_name(name: str, sound: Path, tmp_path: Path) -> None:
    directory = broken_copy(sound, name, tmp_path)
    with pytest.raises(InputError) as refused:
        load_causal_lm(str(directory), dtype="float32")
    assert refused.value.exit_code == 4
    assert not (directory / "ran").exists()


def test_unused_tensors_are_named(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from faults.broken_models import _save, _tensors

    directory = broken_copy(sound, "missing_head", tmp_path)
    _save({**_tensors(sound), "model.layers.0.extra.weight": torch.zeros(2)}, directory)
    load_causal_lm(str(directory), dtype="float32")
    assert "the model ignores 1 tensors of the checkpoint: model.layers.0.extra.weight" in capsys.readouterr().err


def test_every_rank_reads_the_weights_of_a_second_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 distributes the first rank's weights of the trained model only."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    assert loads_on_first_rank()
    model, reads_later = llama(hidden_size=32, vocab_size=260), []
    monkeypatch.setattr(
        second_model, "load_causal_lm", lambda *_, **__: reads_later.append(loads_on_first_rank()) or model
    )
    loaded = second_model.load_second_model("teacher", dtype=torch.float32, engine="fsdp2")
    assert reads_later == [False] and loads_on_first_rank()
    assert not loaded.training and not any(weight.requires_grad for weight in loaded.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_missing_and_misshapen_tensors_are_reported_from_headers_alone(tied: bool) -> None:
    with torch.device("meta"):
        model = llama(hidden_size=32, vocab_size=260, tie_word_embeddings=tied)
    every = {name: StoredTensor(dtype="F32", shape=tuple(one.shape)) for name, one in model.named_parameters()}
    head = every.pop("lm_head.weight", None)
    assert [error.value for error in stored_errors(every, model, "m")] == ([] if tied else [["lm_head.weight"]])
    whole = every if head is None else every | {"lm_head.weight": head}
    without_prefix = {name.removeprefix("model."): one for name, one in whole.items()}
    assert stored_errors(without_prefix, model, "m", base_prefix="model.") == []
    wrong = whole | {"model.norm.weight": replace(whole["model.norm.weight"], shape=(31,))}
    del wrong["model.embed_tokens.weight"]
    missing, other_shape = stored_errors(wrong, model, "m")
    assert (missing.value, other_shape.value) == (["model.embed_tokens.weight"], ["model.norm.weight"])


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.second = torch.nn.Linear(4, 5, bias=False)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("mask", torch.full((2,), float("-inf")), persistent=False)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
def test_one_bad_element_is_found(bad, dtype):
    tensor = torch.ones(7, 5).to(dtype)
    assert is_finite(tensor)
    tensor.view(-1)[17] = bad
    assert not is_finite(tensor)


def test_parameters_and_saved_buffers_are_named_and_masks_are_not():
    model = Model()
    assert nonfinite_weights(model) == []
    model.first.bias.data[1] = float("nan")
    model.kept[0] = float("inf")
    assert nonfinite_weights(model) == ["first.bias", "kept"]


def test_codes_of_4_bit_layers_are_no_numbers():
    class Linear4bit(torch.nn.Linear):
        """bitsandbytes packs codes into a tensor of any type."""

    model = torch.nn.Sequential(Linear4bit(2, 2), torch.nn.Linear(2, 2))
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    assert nonfinite_weights(model) == ["0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("model_type", "architecture", "automatic"),
    [
        ("llama", None, "AutoModelForCausalLM"),
        ("gemma3_text", None, "AutoModelForCausalLM"),
        ("llava", None, "AutoModelForImageTextToText"),
        ("qwen2_5_vl", None, "AutoModelForImageTextToText"),
        ("gemma3", "Gemma3ForConditionalGeneration", "AutoModelForImageTextToText"),
        ("llama4", None, "AutoModelForImageTextToText"),
        ("llama4", "Llama4ForCausalLM", "AutoModelForCausalLM"),
        ("qwen3_5", "Qwen3_5ForCausalLM", "AutoModelForCausalLM"),
    ],
)
def test_a_configuration_of_images_is_loaded_with_its_tower(
    model_type: str, architecture: str | None, automatic: str
) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, architectures=[architecture] if architecture else None)
    assert auto_class(config).__name__ == automatic
    assert auto_class(config, score_head=True).__name__ == "AutoModelForSequenceClassification"
