"""Checkpoint of a directory or the Hub for `ds_configs/serving`: its configuration and headers, never weights."""

from __future__ import annotations

from pathlib import Path

from ...ds_configs.serving.memory import StoredWeight
from ...ds_configs.serving.request import ServedModel
from ..huggingface_hub.hub import read_hub_tensors
from ..planning.models import load_model_spec
from ..safetensors.reading import StoredTensor, checkpoint_files, read_checkpoint

_SMALL = {"index": "small.safetensors.index.json", "single": "small.safetensors"}
"""Weight files of the small format (`trainers/formats/spqr_format.py`)."""


def read_served_model(model: str, *, revision: str | None = None) -> ServedModel:
    """Return a checkpoint as an engine will find it.

    Raises:
        UsageError: nothing of that name exists.
        RefusedInputError: its configuration or a safetensors header is corrupt or unsafe.
        ShardwrightError: the Hub cannot be reached or denies access.
    """
    loaded = load_model_spec(model, revision=revision)
    tensors = _tensors(model, loaded.spec.revision)
    weights = {
        name: StoredWeight(
            stored_bytes=tensor.bits // 8, is_matrix=len(tensor.shape) > 1, is_fp32=tensor.dtype == "F32"
        )
        for name, tensor in tensors.items()
    }
    return ServedModel(spec=loaded.spec, config=loaded.config, weights=weights)


def _tensors(model: str, revision: str | None) -> dict[str, StoredTensor]:
    path = Path(model).expanduser()
    if not path.exists():
        return read_hub_tensors(model, revision)
    if path.is_dir():
        for names in ({}, _SMALL):
            if checkpoint_files(path, **names):
                return read_checkpoint(path, **names)
    return {}
