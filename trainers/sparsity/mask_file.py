"""Masks in a checkpoint: one bit for each weight, with the settings that made them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.errors import Fault, RefusedInputError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

FILE_NAME = "pruning_masks.safetensors"
"""In every checkpoint, beside the weights."""


def save_masks(path: Path, masks: Mapping[str, Tensor], settings: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    """Write packed masks by the name of the layer.

    Args:
        path: Of the file.
        masks: uint8 bits of the flattened matrices.
        settings: What made them, compared when a run goes on.
        shapes: Rows and columns of each matrix.
    """
    from safetensors.torch import save_file

    temporary = path.with_suffix(".part")
    metadata = {"format": "pt", "settings": json.dumps(settings), "shapes": json.dumps(shapes)}
    save_file(dict(masks), temporary, metadata=metadata)
    temporary.replace(path)


def load_masks(path: Path, settings: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the packed masks of a checkpoint.

    Raises:
        UsageError: they were made with other settings or for another model; all differences at once.
        RefusedInputError: the file is none of these.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            kept = {name: json.loads(metadata[name]) for name in ("settings", "shapes")}
            masks = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        fix = "resume from another checkpoint"
        raise RefusedInputError(Fault(where=str(path), rule=f"holds no masks: {error}", fix=fix)) from error
    wanted = {"settings": json.loads(json.dumps(settings)), "shapes": json.loads(json.dumps(shapes))}
    fix = "resume with the same, or start anew from the model"
    faults = [
        Fault(where=key, value=part.get(key), rule=f"is not what the checkpoint has ({kept[name].get(key)!r})", fix=fix)
        for name, part in wanted.items()
        for key in {**part, **kept[name]}
        if part.get(key) != kept[name].get(key)
    ]
    if faults:
        raise UsageError(faults[:8])
    broken = [name for name, (rows, columns) in shapes.items() if masks[name].numel() != (rows * columns + 7) // 8]
    if broken:
        raise RefusedInputError(Fault(where=str(path), value=broken[0], rule="has another number of bits than weights"))
    return masks
