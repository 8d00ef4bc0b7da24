"""Projectors beside the student: their own learning rate, and their own file in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...plugins.safetensors.reading import load_tensors
from ...plugins.safetensors.writing import save_tensors

FILE_NAME = "distillation_projectors.safetensors"


def split_projectors(optimizer: Any, projectors: Any, learning_rate: float) -> None:
    """Move the projectors' parameters into a group with its own learning rate."""
    own = {id(parameter) for parameter in projectors.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
    optimizer.add_param_group({"params": list(projectors.parameters()), "lr": learning_rate, "weight_decay": 0.0})


def save_projectors(state_dict: dict[str, Any], prefix: str, directory: str) -> None:
    """Write the projectors into a checkpoint; a finished model's directory holds the student alone."""
    target = Path(directory)
    if not target.name.startswith("checkpoint-"):
        return
    marker = prefix + "."
    own = {name.split(marker, 1)[1]: value for name, value in state_dict.items() if marker in name}
    if own:
        save_tensors(own, target / FILE_NAME)


def load_projectors(projectors: Any, directory: str) -> None:
    """Read the projectors of a checkpoint."""
    file = Path(directory) / FILE_NAME
    if file.is_file():
        projectors.load_state_dict(load_tensors(file))
