"""Kernels of the tested release of liger-kernel, by model type."""

from __future__ import annotations

from collections.abc import Mapping

from ..specs.model import stored_facts

LIGER_FILE = "liger_kernels.json"
FUSED_LOSS = "fused_linear_cross_entropy"
TEXT_MODEL = "text_model"
"""The kernels of a nested text model, which its family enables; configurations of the Trainer do not reach them."""

Kernels = Mapping[str, Mapping[str, bool]]
"""The kernels of each model type, with Liger's defaults."""


def liger_kernels() -> Kernels:
    """Return the kernels of each model type; liger-kernel silently ignores other types."""
    kernels: Kernels = stored_facts(LIGER_FILE, "0")["kernels"]
    return kernels


def has_liger_loss(model_type: str, *, alone: bool) -> bool:
    """Return whether Liger computes head and loss of a model type together, as it does unless it is disabled.

    `alone` is without its other kernels.
    """
    kernels = liger_kernels().get(model_type, {})
    return kernels.get(FUSED_LOSS, False) and not (alone and TEXT_MODEL in kernels)
