"""All commands reject the same models before loading them, and name the path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.broken_models import broken_copy
from shardwright.ds_configs.specs.errors import RefusedInputError
from shardwright.plugins.transformers.meta_model import open_source
from shardwright.trainers.data.models import StartingModel, load_config, load_model
from shardwright.trainers.distillation.student import StudentRequest, make_student, plan_student
from shardwright.trainers.evaluation.evaluate import read_eval_model
from small_models import llama


def trained(model: str, work: Path) -> Any:
    source = StartingModel(model=model)
    return load_model(source, load_config(source), "float32", 0)


def cut(model: str, work: Path) -> Any:
    return make_student(plan_student(model, StudentRequest(layers=1)), model, work / "student")


LOADERS: dict[str, Callable[[str, Path], Any]] = {
    "train": trained,
    "student": cut,
    "quantize": lambda model, work: open_source(model),
    "evaluate": lambda model, work: read_eval_model(model, "model", revision=None),
    "evaluate's baseline": lambda model, work: read_eval_model(model, "baseline", revision=None),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    llama(hidden_size=32, vocab_size=260, tie_word_embeddings=False).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", ["integer_weights", "kernel_of_the_hub", "index_without_shard"])
@pytest.mark.parametrize("loader", LOADERS)
def test_every_loader_rejects_a_broken_model_with_its_path(loader: str, name: str, sound: Path, tmp_path: Path) -> None:
    assert LOADERS[loader](str(sound), tmp_path / "sound") is not None
    directory = broken_copy(sound, name, tmp_path / "of-models")
    with pytest.raises(RefusedInputError) as refused:
        LOADERS[loader](str(directory), tmp_path)
    assert str(directory) in str(refused.value)
