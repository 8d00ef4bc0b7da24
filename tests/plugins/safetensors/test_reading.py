"""The reader of safetensors files: it accepts what safetensors accepts, and rejects what it rejects, and more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from shardwright.ds_configs.specs.errors import RefusedInputError
from shardwright.plugins.safetensors.reading import (
    INDEX,
    each_tensor,
    load_tensors,
    opened,
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
DTYPES = ("BF16", "F32", "I64", "F4", "BOOL", "F7", 3)


def write(file: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def entry(dtype: str, shape: list[int], first: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


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
            raw = file.read_bytes()[tensor.first_byte :][: tensor.bits // 8]
            whole = stored.get_tensor(name)
            assert raw == whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.dim() else True
    assert all(torch.equal(found.float(), TENSORS[name].float()) for name, found in load_tensors(file).items())


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_headers_are_accepted_only_if_safetensors_accepts_them(tmp_path_factory, data):
    """Names, types, shapes and offsets at random, most of them near a sound file."""
    entries, end = {}, 0
    for name in data.draw(st.lists(st.sampled_from("abc"), max_size=3, unique=True)):
        shape = data.draw(st.lists(st.integers(0, 3), max_size=2))
        first, size = end, 4
        for each in shape:
            size *= each
        end += size
        entries[name] = entry("F32", shape, first, end)
    for name in list(entries):
        match data.draw(st.sampled_from(["keep", "keep", "dtype", "shape", "offset", "drop", "meta"])):
            case "dtype":
                entries[name]["dtype"] = data.draw(st.sampled_from(DTYPES))
            case "shape":
                entries[name]["shape"] = data.draw(st.lists(st.integers(-1, 4) | st.booleans(), max_size=2))
            case "offset":
                entries[name]["data_offsets"] = data.draw(st.lists(st.integers(-1, 40), min_size=1, max_size=3))
            case "drop":
                del entries[name][data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))]
            case "meta":
                entries["__metadata__"] = data.draw(st.sampled_from([{"x": "y"}, {"x": 1}, [], None]))
    extra = data.draw(st.sampled_from([0, 0, 0, 1, -1]))
    file = write(tmp_path_factory.mktemp("x") / "x.safetensors", entries, bytes(max(0, end + extra)))
    try:
        found = read_header(file)
    except RefusedInputError as error:
        assert str(file) in str(error)
        return
    with safe_open(file, framework="pt") as stored:
        assert set(stored.keys()) == found.tensors.keys()
    with opened(file):
        pass


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 400), bits=st.integers(1, 255), cut=st.integers(0, 40))
def test_what_safetensors_rejects_is_rejected(tmp_path_factory, at, bits, cut):
    """One byte of a sound file changed, or its end cut off."""
    file = tmp_path_factory.mktemp("x") / "x.safetensors"
    save_file(TENSORS, file)
    content = bytearray(file.read_bytes())
    if at < len(content):
        content[at] ^= bits
    file.write_bytes(content[: len(content) - cut])
    try:
        safe_open(file, framework="pt")
    except SafetensorError:
        with pytest.raises(RefusedInputError, match="is not a complete safetensors file"):
            read_header(file)


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}' * 2, b"x", "Extra data"),
        (
            b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},'
            b' "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
            b"x",
            "'a' occurs twice",
        ),
        ({"a": entry("U8", [2], 0, 2)}, b"x", "the header describes"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"xxx", "'b' begins at byte"),
        ({"a": entry("U8", [3], 0, 2)}, b"xx", "does not fit bytes 0 to 2"),
    ],
)
def test_every_error_names_the_file_and_the_reason(tmp_path, header, data, says):
    file = write(tmp_path / "model.safetensors", header, data)
    for read in (read_header, load_tensors):
        with pytest.raises(RefusedInputError) as caught:
            read(file)
        assert str(file) in str(caught.value) and says in str(caught.value)


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
