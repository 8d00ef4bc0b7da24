"""Local model directories as they are found on real disks: cut off, misplaced, unreadable, misleading."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardwright.ds_configs.specs.errors import RefusedInputError, ShardwrightError, UsageError
from shardwright.plugins.huggingface_hub import model_directory, read_model_source
from shardwright.plugins.planning import load_model_spec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
}
PARAMETERS = 2 * 16 * 8 + 3 * 8 + 4 * 8 * 8 + 3 * 8 * 12
INDEX = "model.safetensors.index.json"


def safetensors(elements: int, *, missing_bytes: int = 0, header: bytes | None = None) -> bytes:
    """Return a safetensors file with one 16-bit tensor, cut off by some bytes."""
    tensor = {"x": {"dtype": "BF16", "shape": [elements], "data_offsets": [0, 2 * elements]}}
    text = json.dumps({"__metadata__": {"format": "pt"}, **tensor}).encode() if header is None else header
    whole = len(text).to_bytes(8, "little") + text + bytes(2 * elements)
    return whole[: len(whole) - missing_bytes]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(CONFIG))
    return place


def test_a_complete_checkpoint_agrees_and_another_is_noted(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(safetensors(PARAMETERS))
    loaded = load_model_spec(str(directory))
    assert (loaded.spec.parameter_count, loaded.notes) == (PARAMETERS, ())
    assert loaded.spec.name == str(directory)
    (directory / "model.safetensors").write_bytes(safetensors(PARAMETERS // 2))
    (note,) = load_model_spec(str(directory)).notes
    assert note == f"the checkpoint has {PARAMETERS // 2:,} parameters, but LlamaForCausalLM has {PARAMETERS:,}"


def test_shards_may_be_links_as_in_the_cache_of_the_hub(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(safetensors(PARAMETERS))
    (directory / "a.safetensors").symlink_to(tmp_path / "blob")
    (directory / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert read_model_source(str(directory)).checkpoint_parameters == PARAMETERS


def test_a_file_that_is_not_a_model_is_named(directory: Path) -> None:
    (directory / "config.json").rename(directory / "adapter_config.json")
    with pytest.raises(
        UsageError,
        match=r"has no config.json; it is an adapter: merge it with shardwright merge, or pass its base model",
    ):
        load_model_spec(str(directory))
    (directory / "adapter_config.json").unlink()
    with pytest.raises(UsageError, match=r"has no config.json; pass a model directory"):
        load_model_spec(str(directory))
    os.mkfifo(directory / "pipe.json")
    with pytest.raises(UsageError, match=r"has no config.json"):
        load_model_spec(str(directory / "pipe.json"))


def test_a_huge_config_is_rejected_without_reading_all_of_it(directory: Path) -> None:
    with (directory / "config.json").open("ab") as file:
        file.write(b" " * 5 * 2**20)
    with pytest.raises(RefusedInputError, match=r"must be at most 4194304 bytes"):
        load_model_spec(str(directory))
    with (directory / "config.json").open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(RefusedInputError, match=r"must be at most 4194304 bytes"):
        load_model_spec(str(directory))


def test_a_commit_is_downloaded_unless_its_tokenizer_is_cached(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning caches `config.json` alone."""
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: str(directory / "config.json"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: "downloaded")
    found = []
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / file).write_bytes((directory / "config.json").read_bytes())
        found += [model_directory("org/name", revision="a" * 40, weights=weights) for weights in (False, True)]
    downloaded = Path("downloaded")
    assert found == [downloaded, downloaded, directory, downloaded, directory, directory]
    assert model_directory("org/name", revision="main") == downloaded


@given(name=st.text(max_size=40))
def test_any_name_that_is_no_path_and_no_hub_id_is_a_usage_error(name: str) -> None:
    if name[:1].isascii() and name[:1].isalnum():
        name = f"./{name}"
    with pytest.raises(ShardwrightError):
        read_model_source(name)
