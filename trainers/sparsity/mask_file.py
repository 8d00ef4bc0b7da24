"""Masks in a checkpoint: one bit for each weight, with the settings that made them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, RefusedInputError, UsageError
from ...plugins.safetensors.reading import opened, read_header
from ...plugins.safetensors.writing import save_tensors

if TYPE_CHECKING:
    from torch import Tensor

FILE_NAME = "pruning_masks.safetensors"
"""In every checkpoint, beside the weights; several callbacks share it."""
_METADATA = "masks"
_SHOWN = 8


def save_masks(path: Path, masks: Mapping[str, Tensor], settings: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    """Write packed masks by the name of the layer, beside those of other layers that the file holds.

    Args:
        path: Of the file.
        masks: uint8 bits of the flattened matrices.
        settings: What made them, compared when a run goes on.
        shapes: Rows and columns of each matrix.
    """
    kept, others = _read(path) if path.is_file() else ({}, {})
    described = kept | {name: {"shape": list(shapes[name]), **settings} for name in masks}
    save_tensors(others | dict(masks), path, {_METADATA: json.dumps(described)})


def load_masks(path: Path, settings: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the packed masks of a checkpoint for the layers in `shapes`.

    Raises:
        UsageError: they were made with other settings or for another model; all differences at once.
        RefusedInputError: the file is none of these.
    """
    described, masks = _read(path)
    fix = "resume with the same, or start anew from the model"
    faults = [
        Fault(where=name, rule="has no mask in the checkpoint", fix=fix) for name in shapes if name not in described
    ]
    differences = {
        (key, json.dumps(value), json.dumps(described[name].get(key)))
        for name, shape in shapes.items()
        if name in described
        for key, value in {"shape": list(shape), **settings}.items()
        if described[name].get(key) != value
    }
    faults += [
        Fault(where=key, value=json.loads(wanted), rule=f"is not what the checkpoint has ({found})", fix=fix)
        for key, wanted, found in sorted(differences)
    ]
    if faults:
        raise UsageError(faults[:_SHOWN])
    broken = [name for name, (rows, columns) in shapes.items() if masks[name].numel() != (rows * columns + 7) // 8]
    if broken:
        raise RefusedInputError(Fault(where=str(path), value=broken[0], rule="has another number of bits than weights"))
    return {name: masks[name] for name in shapes}


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    header = read_header(path)
    try:
        described = json.loads(header.metadata[_METADATA])
        if not isinstance(described, dict) or not all(isinstance(each, dict) for each in described.values()):
            raise ValueError("its description is no object of objects")
    except (KeyError, ValueError) as error:
        fix = "resume from another checkpoint"
        raise RefusedInputError(Fault(where=str(path), rule=f"holds no masks: {error}", fix=fix)) from error
    with opened(path) as file:
        return described, {name: file.get_tensor(name) for name in described}
