"""Models that no command may take as they are: each maker breaks a copy of a small sound one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def _tensors(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(directory / SINGLE)


def _save(tensors: Mapping[str, Any], directory: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), directory / SINGLE, metadata={"format": "pt"})


def _config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def missing_embedding(directory: Path) -> None:
    _save({name: one for name, one in _tensors(directory).items() if "embed_tokens" not in name}, directory)


def missing_head(directory: Path) -> None:
    _save({name: one for name, one in _tensors(directory).items() if name != "lm_head.weight"}, directory)


def missing_layer(directory: Path) -> None:
    _save({name: one for name, one in _tensors(directory).items() if ".layers.1." not in name}, directory)


def wrong_shape(directory: Path) -> None:
    tensors = _tensors(directory)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    _save(tensors, directory)


def nan_weight(directory: Path) -> None:
    tensors = _tensors(directory)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    _save(tensors, directory)


def infinite_weight(directory: Path) -> None:
    tensors = _tensors(directory)
    tensors["model.norm.weight"][0] = float("inf")
    _save(tensors, directory)


def integer_weights(directory: Path) -> None:
    import torch

    tensors = _tensors(directory)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    _save(tensors, directory)


def truncated(directory: Path) -> None:
    file = directory / SINGLE
    file.write_bytes(file.read_bytes()[:-100])


def empty_file(directory: Path) -> None:
    (directory / SINGLE).write_bytes(b"")


def huge_header(directory: Path) -> None:
    file = directory / SINGLE
    file.write_bytes((2**60).to_bytes(8, "little") + file.read_bytes()[8:])


def nan_in_header(directory: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}'
    (directory / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def overlapping_tensors(directory: Path) -> None:
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f'{{"a":{entry},"b":{entry}}}'.encode()
    (directory / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def _sharded(directory: Path, shard: str) -> Path:
    """Move the weights behind an index that names `shard`, and return where they are to lie."""
    names = dict.fromkeys(_tensors(directory), shard)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return directory / SINGLE


def index_leads_up(directory: Path) -> None:
    _sharded(directory, "../outside.safetensors").rename(directory.parent / "outside.safetensors")


def index_is_absolute(directory: Path) -> None:
    outside = directory.parent / "absolute.safetensors"
    _sharded(directory, str(outside.absolute())).rename(outside)


def index_without_shard(directory: Path) -> None:
    _sharded(directory, "model-00001-of-00001.safetensors").unlink()


def index_lacks_tensor(directory: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    _sharded(directory, shard).rename(directory / shard)
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = shard
    (directory / INDEX).write_text(json.dumps(index))


def index_is_garbage(directory: Path) -> None:
    _sharded(directory, SINGLE)
    (directory / INDEX).write_text('{"weight_map": ')


def pickle_only(directory: Path) -> None:
    (directory / SINGLE).rename(directory / "pytorch_model.bin")


def kernel_of_the_hub(directory: Path) -> None:
    _config(directory, attn_implementation="somebody/kernel")


def hidden_kernel(directory: Path) -> None:
    _config(directory, _attn_implementation_internal="somebody/kernel@main:attend")


def remote_code(directory: Path) -> None:
    """Only `plan` takes it, by its structure."""
    _config(directory, model_type="ours", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    (directory / "code.py").write_text(f"import pathlib\npathlib.Path({str(directory / 'ran')!r}).touch()\n")


def config_is_garbage(directory: Path) -> None:
    (directory / "config.json").write_bytes(b"\xff\xfe{")


def config_with_nan(directory: Path) -> None:
    _config(directory, rms_norm_eps=float("nan"))


def negative_layers(directory: Path) -> None:
    _config(directory, num_hidden_layers=-3)


def heads_do_not_divide(directory: Path) -> None:
    _config(directory, num_key_value_heads=3)


BROKEN: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        missing_embedding, missing_head, missing_layer, wrong_shape, nan_weight, infinite_weight, integer_weights,
        truncated, empty_file, huge_header, nan_in_header, overlapping_tensors, index_leads_up, index_is_absolute,
        index_without_shard, index_lacks_tensor, index_is_garbage, pickle_only, kernel_of_the_hub, hidden_kernel,
        remote_code, config_is_garbage, config_with_nan, negative_layers, heads_do_not_divide,
    )
}  # fmt: skip


def broken_copy(sound: Path, name: str, parent: Path) -> Path:
    """Return a directory below `parent` with a copy that is broken in one way."""
    import shutil

    directory = parent / name / "model"
    shutil.copytree(sound, directory, copy_function=shutil.copyfile)
    os.utime(directory)
    BROKEN[name](directory)
    return directory
