"""The reader of safetensors files: it accepts what safetensors accepts, and rejects what it rejects, and more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from shardwright.ds_configs.specs.errors import RefusedInputError
from shardwright.plugins.safetensors import (
    INDEX,
    each_tensor,
    load_tensors,
    read_checkpoint,
    read_header,
)

TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "b": torch.tensor([1, 2, 3]),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(2.5),
    "eight": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
}


def test_a_header_equals_what_safetensors_reads(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file, metadata={"format": "pt"})
    header = read_header(file)
    assert header.metadata == {"format": "pt"}
    with safe_open(file, framework="pt") as stored:
        assert header.tensors.keys() == set(stored.keys())
        for name, tensor in header.tensors.items():
            part = stored.get_slice(name)
            assert (tensor.dtype, list(tensor.shape)) == (part.get_dtype(), part.get_shape())
    assert all(torch.equal(found.float(), TENSORS[name].float()) for name, found in load_tensors(file).items())


@settings(max_examples=50, deadline=None)
@given(at=st.integers(0, 400), bits=st.integers(1, 255), cut=st.integers(0, 40))
def test_a_damaged_file_is_one_error_that_names_it(tmp_path_factory, at, bits, cut):
    """One byte of a sound file changed, or its end cut off."""
    file = tmp_path_factory.mktemp("x") / "x.safetensors"
    save_file(TENSORS, file)
    content = bytearray(file.read_bytes())
    if at < len(content):
        content[at] ^= bits
    file.write_bytes(content[: len(content) - cut])
    try:
        assert cut == 0 or not read_header(file)
    except RefusedInputError as error:
        assert str(error).startswith(f"{file}: is not a complete safetensors file")


@pytest.fixture
def shards(tmp_path):
    names = {"a": "1.safetensors", "b": "2.safetensors"}
    for name, file in names.items():
        save_file({name: torch.ones(2)}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return tmp_path


def changed(directory: Path, **names: Any) -> None:
    stated = json.loads((directory / INDEX).read_text())
    (directory / INDEX).write_text(json.dumps({"weight_map": stated["weight_map"] | names}))


def test_all_shards_of_a_checkpoint_are_read(shards):
    found = read_checkpoint(shards)
    assert {name: tensor.file.name for name, tensor in found.items()} == {"a": "1.safetensors", "b": "2.safetensors"}
    assert [name for name, _ in each_tensor(found)] == ["a", "b"]


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "..", ".", "", "sub/x", "missing.safetensors", 5])
def test_an_index_names_files_of_its_directory(shards, name):
    changed(shards, a=name, b=name)
    with pytest.raises(RefusedInputError, match="must name a file of the same directory") as caught:
        read_checkpoint(shards)
    assert INDEX in str(caught.value)


def test_index_and_shards_must_agree(shards):
    changed(shards, a="2.safetensors", c="1.safetensors")
    with pytest.raises(RefusedInputError) as caught:
        read_checkpoint(shards)
    assert [error.value for error in caught.value.errors] == ["a", "c"]
    save_file({"a": torch.ones(2), "more": torch.ones(1)}, shards / "1.safetensors")
    changed(shards, a="1.safetensors", c="1.safetensors")
    with pytest.raises(RefusedInputError, match=r"'more': is in 1\.safetensors, but is not listed"):
        read_checkpoint(shards)
    save_file({"a": torch.ones(2), "b": torch.ones(1)}, shards / "1.safetensors")
    with pytest.raises(RefusedInputError, match=r"2.safetensors = 'b': is also stored in 1.safetensors"):
        read_checkpoint(shards)
