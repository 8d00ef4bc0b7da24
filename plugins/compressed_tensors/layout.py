"""Whether the files of a quantized checkpoint hold what its scheme promises, from headers and `config.json` alone.

No weight is read: names, shapes and types of every tensor stand in the header of its safetensors file, and the header
reader refuses a file whose length is not what its header says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...ds_configs.quantization.layers import LinearLayer
from ...ds_configs.quantization.mixtures import layer_scheme, mixture_quantization_config
from ...ds_configs.quantization.scheme import QuantizationScheme
from ...ds_configs.quantization.sizes import TensorShape, packed_tensors, tensor_bytes
from ...ds_configs.specs.errors import RefusedInputError
from ..transformers.quantization_source import stored_tensors

_PACKED_PARTS = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_global_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "SCB",
    "weight_format",
)
"""Last parts of names that only quantized layers have."""
_ARGUMENTS = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "block_structure")
"""What a loader computes with, of the arguments that `config.json` states."""
_DEFAULTS: Mapping[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
"""What compressed-tensors 0.19.0 takes where an argument is not stated (`quantization/quant_args.py`)."""


def layout_differences(
    directory: Path,
    scheme: QuantizationScheme | None,
    layers: Iterable[LinearLayer],
    *,
    expected_bytes: int | None = None,
) -> list[str]:
    """Return every way in which a checkpoint's files differ from what was to be written, one sentence each.

    Args:
        directory: The checkpoint.
        scheme: How the layers are stored; `None` for a dense checkpoint, in which nothing may be packed.
        layers: The layers that were quantized, by their names in the checkpoint.
        expected_bytes: Bytes of all tensors together, as computed beforehand; `None` leaves the total unchecked.
    """
    try:
        stored = stored_tensors(directory)
    except RefusedInputError as error:
        return [str(fault) for fault in error.faults]
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"config.json cannot be read ({error})"]
    chosen = tuple(layers)
    faults: list[str] = []
    if scheme is not None and scheme.storage != "spqr":
        dtype = _dtype(config)
        for layer in chosen:
            faults += _layer_faults(layer, layer_scheme(scheme, layer), stored, dtype)
        faults += _config_faults(config.get("quantization_config"), scheme, chosen)
    faults += _stray_faults(stored, {layer.name for layer in chosen} if scheme is not None else set())
    total = tensor_bytes(stored.values())
    if expected_bytes is not None and total != expected_bytes:
        faults.append(f"tensors take {total} bytes, computed were {expected_bytes}")
    return faults


def _layer_faults(
    layer: LinearLayer, scheme: QuantizationScheme, stored: Mapping[str, TensorShape], dtype: str
) -> Iterator[str]:
    expected = packed_tensors(scheme, layer, dtype)
    prefix = f"{layer.name}."
    found = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    if "weight" in found and not set(expected) & set(found) - {"weight"}:
        yield f"{layer.name} is dense: it has {_described(found['weight'])} and nothing of {scheme.name}"
        return
    for part, wanted in expected.items():
        if part not in found:
            yield f"{prefix}{part} is missing, {_described(wanted)} was to be written"
        elif found[part] != wanted:
            yield f"{prefix}{part} is {_described(found[part])}, not {_described(wanted)}"
    for part in sorted(set(found) - set(expected) - {"bias"}):
        yield f"{prefix}{part} is left over, {_described(found[part])}"


def _stray_faults(stored: Mapping[str, TensorShape], quantized: set[str]) -> list[str]:
    """Return parts of quantized layers that are none of those which were quantized."""
    strays: dict[str, list[str]] = {}
    for name in stored:
        layer, _, part = name.partition(".weight.") if ".weight." in name else name.rpartition(".")
        if layer not in quantized and (part in _PACKED_PARTS or ".weight." in name):
            strays.setdefault(layer, []).append(part)
    return [
        f"{layer} has {', '.join(sorted(parts))}, and was not to be quantized"
        for layer, parts in sorted(strays.items())
    ]


def _config_faults(stated: Any, scheme: QuantizationScheme, layers: Sequence[LinearLayer]) -> list[str]:
    """Return where `quantization_config` would make a loader compute other numbers than the scheme's."""
    where = "config.json: quantization_config"
    if not isinstance(stated, dict):
        return [f"{where} is missing"]
    if stated.get("quant_method") != scheme.storage:
        return [f"{where}.quant_method is {stated.get('quant_method')!r}, not {scheme.storage!r}"]
    if scheme.storage != "compressed-tensors":
        wanted_flag = "load_in_4bit" if scheme.weights.bits == 4 else "load_in_8bit"
        return [] if stated.get(wanted_flag) else [f"{where}.{wanted_flag} is not set"]
    wanted = mixture_quantization_config(scheme, layers)
    faults = [
        f"{where}.{key} is {stated.get(key)!r}, not {wanted[key]!r}"
        for key in ("format", "quantization_status")
        if stated.get(key) != wanted[key]
    ]
    groups = stated.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return [*faults, f"{where}.config_groups is missing"]
    if len(wanted["config_groups"]) > 1 and groups.keys() != wanted["config_groups"].keys():
        return [*faults, f"{where}.config_groups are {sorted(groups)}, not {sorted(wanted['config_groups'])}"]
    for name, group in groups.items():
        for numbers in ("weights", "input_activations"):
            place = f"{where}.config_groups.{name}.{numbers}"
            wanted_group = wanted["config_groups"].get(name, wanted["config_groups"]["group_0"])
            faults += _argument_faults(place, group.get(numbers), wanted_group[numbers])
    return faults


def _argument_faults(place: str, stated: Any, wanted: Any) -> list[str]:
    if stated is None or wanted is None:
        return [] if stated is wanted else [f"{place} is {stated!r}, not {wanted!r}"]
    return [
        f"{place}.{key} is {stated.get(key)!r}, not {wanted[key]!r}"
        for key in _ARGUMENTS
        if stated.get(key, _DEFAULTS.get(key)) != wanted[key]
    ]


def _dtype(config: Mapping[str, Any]) -> str:
    text: Sequence[Any] = [config, config.get("text_config") or {}]
    for part in text:
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str):
                return str(part[key]).removeprefix("torch.")
    return "float32"


def _described(tensor: TensorShape) -> str:
    shape, dtype = tensor
    return f"{dtype} {list(shape)}"
