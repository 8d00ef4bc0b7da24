"""Second floor: Trainer subclasses, callbacks and the pure loss functions they use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .distillation.clip_trainer import CLIPDistillationTrainer
    from .distillation.config import DistillationConfig
    from .distillation.trainer import DistillationTrainer
    from .plan_callback import PlanCallback
    from .qat.callback import QATCallback
    from .qat.comparison import compare_qat
    from .qat.config import QATConfig
    from .sparsity.l1_sparsity_callback import L1SparsityCallback
    from .sparsity.magnitude_pruning_callback import MagnitudePruningCallback

__all__ = [
    "CLIPDistillationTrainer",
    "DistillationConfig",
    "DistillationTrainer",
    "L1SparsityCallback",
    "MagnitudePruningCallback",
    "PlanCallback",
    "QATCallback",
    "QATConfig",
    "compare_qat",
]

_HOMES = {
    "CLIPDistillationTrainer": ".distillation.clip_trainer",
    "DistillationConfig": ".distillation.config",
    "DistillationTrainer": ".distillation.trainer",
    "L1SparsityCallback": ".sparsity.l1_sparsity_callback",
    "MagnitudePruningCallback": ".sparsity.magnitude_pruning_callback",
    "PlanCallback": ".plan_callback",
    "QATCallback": ".qat.callback",
    "QATConfig": ".qat.config",
    "compare_qat": ".qat.comparison",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
