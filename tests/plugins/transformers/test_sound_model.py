"""Broken models are rejected with an error that names the defect; a valid one loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faults.broken_models import BROKEN, broken_copy
from shardwright.ds_configs.specs.errors import InputError
from shardwright.plugins.safetensors.reading import StoredTensor
from shardwright.plugins.transformers.sound_model import load_causal_lm, stored_errors
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
