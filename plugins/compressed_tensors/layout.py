"""Comparison of a quantized checkpoint's files with its scheme, from headers and `config.json` only.

No weight is read: the header of a safetensors file contains names, shapes and dtypes of all tensors, and the header
reader rejects a file whose length differs from its header.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...ds_configs.quantization.layers import (
    DEQUANTIZE,
    LinearLayer,
    expert_scheme,
    needs_dequantize,
    quantization_config,
)
from ...ds_configs.quantization.scheme import QuantizationScheme
from ...ds_configs.quantization.sizes import TensorShape, packed_tensors, tensor_bytes
from ...ds_configs.specs.errors import RefusedInputError
from .. import patches
from ..transformers.quantized_model import stored_tensors

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
"""Suffixes of tensor names that only quantized layers have."""


def layout_differences(
    directory: Path,
    scheme: QuantizationScheme | None,
    layers: Iterable[LinearLayer],
    *,
    expected_bytes: int | None = None,
) -> list[str]:
    """Return every difference between a checkpoint's files and the expected layout, one sentence each.

    Args:
        directory: The checkpoint.
        scheme: How the layers are stored; `None` for a dense checkpoint, in which nothing may be packed.
        layers: The layers that were quantized, by their names in the checkpoint.
        expected_bytes: Bytes of all tensors together, as computed beforehand; `None` leaves the total unchecked.
    """
    try:
        stored = stored_tensors(directory)
    except RefusedInputError as error:
        return [str(config_error) for config_error in error.errors]
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"config.json cannot be read ({error})"]
    chosen, errors = (() if scheme is None else tuple(layers)), []
    expected: dict[str, TensorShape] = {}
    if scheme is not None:
        texts: Sequence[Any] = [config, config.get("text_config") or {}]
        dtypes = (part.get(key) for part in texts for key in ("dtype", "torch_dtype"))
        dtype = next((value.removeprefix("torch.") for value in dtypes if isinstance(value, str)), "float32")
        for layer in chosen:
            parts = packed_tensors(expert_scheme(scheme) if layer.is_expert else scheme, layer, dtype)
            expected |= {f"{layer.name}.{part}": tensor for part, tensor in parts.items()}
        errors += _config_errors(config.get("quantization_config"), scheme, chosen)
    for name, tensor in expected.items():
        if name not in stored:
            errors.append(f"{name} is missing; expected {_described(tensor)}")
        elif stored[name] != tensor:
            errors.append(f"{name} is {_described(stored[name])}, not {_described(tensor)}")
    quantized = {layer.name for layer in chosen}
    for name in sorted(stored.keys() - expected.keys()):
        layer_name, _, part = name.partition(".weight.") if ".weight." in name else name.rpartition(".")
        if part in _PACKED_PARTS or ".weight." in name or (layer_name in quantized and part != "bias"):
            errors.append(f"{name} is unexpected: {_described(stored[name])}")
    total = tensor_bytes(stored.values())
    if expected_bytes is not None and total != expected_bytes:
        errors.append(f"tensors have {total} bytes, but {expected_bytes} were expected")
    return errors


def _config_errors(stated: Any, scheme: QuantizationScheme, layers: Sequence[LinearLayer]) -> list[str]:
    """Return where `quantization_config` has another format; wrong numbers in it change the reloaded logits."""
    where = "config.json: quantization_config"
    if not isinstance(stated, dict):
        return [f"{where} is missing"]
    if stated.get("quant_method") != scheme.storage:
        return [f"{where}.quant_method is {stated.get('quant_method')!r}, not {scheme.storage!r}"]
    if scheme.storage != "compressed-tensors":
        wanted_flag = "load_in_4bit" if scheme.weights.bits == 4 else "load_in_8bit"
        return [] if stated.get(wanted_flag) else [f"{where}.{wanted_flag} is not set"]
    wanted = quantization_config(scheme, layers)
    return [
        f"{where}.{key} is {stated.get(key)!r}, not {wanted[key]!r}"
        for key in ("format", "quantization_status")
        if stated.get(key) != wanted[key]
    ]


def _described(tensor: TensorShape) -> str:
    shape, dtype = tensor
    return f"{dtype} {list(shape)}"


def state_dequantize(directory: Path) -> None:
    """Add `dequantize` to the `config.json` of a checkpoint that Transformers 5.23 does not load without it."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    stated = config.get("quantization_config") or {}
    if stated.get("quant_method") == "compressed-tensors" and needs_dequantize(stated):
        stated[DEQUANTIZE] = True
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_packed_zero_points() -> None:
    """Make this process load packed zero points from any checkpoint, regardless of its `quantization_config`."""

    def with_packed_shape(original: Any) -> Any:
        def compress(state_dict: dict[str, Any], scheme: Any) -> dict[str, Any]:
            import torch

            compressed: dict[str, Any] = original(state_dict, scheme)
            zero_point, weights = compressed.get("weight_zero_point"), scheme.weights
            if zero_point is not None and state_dict["weight"].is_meta and weights.strategy in ("channel", "group"):
                words = math.ceil(zero_point.shape[0] * weights.num_bits / 32)
                shape = (words, *zero_point.shape[1:])
                compressed["weight_zero_point"] = torch.empty(shape, dtype=torch.int32, device=zero_point.device)
            return compressed

        return staticmethod(compress)

    patches.apply("packed-zero-points", with_packed_shape)
