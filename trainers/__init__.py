"""Trainer subclasses, callbacks and the pure loss functions they use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint_callback import CheckpointCallback as CheckpointCallback
    from .distillation.clip_trainer import CLIPDistillationTrainer as CLIPDistillationTrainer
    from .distillation.settings import DistillationConfig as DistillationConfig
    from .distillation.trainer import DistillationTrainer as DistillationTrainer
    from .formats.spqr import load_spqr as load_spqr
    from .guards import GuardCallback as GuardCallback
    from .parallel.expert import ExpertParallelCallback as ExpertParallelCallback
    from .parallel.long_sequences import LongSequenceCallback as LongSequenceCallback
    from .parallel.pipeline import PipelineTrainer as PipelineTrainer
    from .parallel.sequence import SequenceParallelCallback as SequenceParallelCallback
    from .parallel.tensor import TensorParallelCallback as TensorParallelCallback
    from .qat.callback import QATCallback as QATCallback
    from .qat.settings import QATConfig as QATConfig
    from .runs.plan_callback import PlanCallback as PlanCallback
    from .sparsity import MagnitudePruningCallback as MagnitudePruningCallback

_HOMES = {
    "CLIPDistillationTrainer": ".distillation.clip_trainer",
    "CheckpointCallback": ".checkpoint_callback",
    "DistillationConfig": ".distillation.settings",
    "DistillationTrainer": ".distillation.trainer",
    "ExpertParallelCallback": ".parallel.expert",
    "GuardCallback": ".guards",
    "LongSequenceCallback": ".parallel.long_sequences",
    "MagnitudePruningCallback": ".sparsity",
    "PipelineTrainer": ".parallel.pipeline",
    "PlanCallback": ".runs.plan_callback",
    "QATCallback": ".qat.callback",
    "QATConfig": ".qat.settings",
    "SequenceParallelCallback": ".parallel.sequence",
    "TensorParallelCallback": ".parallel.tensor",
    "load_spqr": ".formats.spqr",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
