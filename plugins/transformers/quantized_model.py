"""`QuantizedModel`, the result of every quantization method whichever library did the work, and its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProgress:
    """One step of a method that goes through a model layer by layer."""

    index: int
    """Which step, from 0."""
    count: int
    """Steps in all."""
    stage: str
    """What is happening: `calibrating`, `quantizing`, `propagating`, `restored` from a journal, or `done`."""
    names: tuple[str, ...] = ()
    """Modules that the step covers, where known."""


ReportProgress = Callable[[LayerProgress], None]


class QuantizedModel(Protocol):
    """A model in memory that computes what its checkpoint will compute."""

    @property
    def model(self) -> Any:
        """The Transformers model; its forward pass rounds as the reloaded checkpoint does."""

    @property
    def quantized_layers(self) -> tuple[str, ...]:
        """Checkpoint names of the matrices that were quantized, such as `model.layers.0.self_attn.q_proj`."""

    def save(self, directory: Path) -> None:
        """Write config and weights that `from_pretrained` loads; may be called once, after the last forward pass."""
