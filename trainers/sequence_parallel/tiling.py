"""MLPs and the loss in tiles of the sequence, with DeepSpeed's autograd functions."""

from __future__ import annotations

from typing import Any

from ...ds_configs.errors import Fault


def tiling_faults(model: Any, arguments: Any, *, tiled_mlp: bool | int, tiled_loss: bool | int) -> list[Fault]:
    """Return what forbids to tile."""
    return []


def tile_mlps(model: Any, tiles: bool | int) -> None:
    """Compute the MLPs of a model in tiles."""


def tile_loss(trainer: Any, run: Any, tiles: bool | int) -> None:
    """Compute the loss of a Trainer in tiles."""
