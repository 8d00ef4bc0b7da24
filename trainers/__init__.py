"""Second floor: Trainer subclasses, callbacks and the pure loss functions they use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .distillation.clip_trainer import CLIPDistillationTrainer
    from .distillation.config import DistillationConfig
    from .distillation.trainer import DistillationTrainer
    from .expert_parallel.expert_parallel_callback import ExpertParallelCallback
    from .pipeline.trainer import PipelineTrainer
    from .plan_callback import PlanCallback
    from .qat.callback import QATCallback
    from .qat.comparison import compare_qat
    from .qat.config import QATConfig
    from .sequence_parallel.sequence_parallel_callback import SequenceParallelCallback
    from .sparsity.l1_sparsity_callback import L1SparsityCallback
    from .sparsity.magnitude_pruning_callback import MagnitudePruningCallback
    from .tensor_parallel.tensor_parallel_callback import TensorParallelCallback

__all__ = [
    "CLIPDistillationTrainer",
    "DistillationConfig",
    "DistillationTrainer",
    "ExpertParallelCallback",
    "L1SparsityCallback",
    "MagnitudePruningCallback",
    "PipelineTrainer",
    "PlanCallback",
    "QATCallback",
    "QATConfig",
    "SequenceParallelCallback",
    "TensorParallelCallback",
    "compare_qat",
]

_HOMES = {
    "CLIPDistillationTrainer": ".distillation.clip_trainer",
    "DistillationConfig": ".distillation.config",
    "DistillationTrainer": ".distillation.trainer",
    "ExpertParallelCallback": ".expert_parallel.expert_parallel_callback",
    "L1SparsityCallback": ".sparsity.l1_sparsity_callback",
    "MagnitudePruningCallback": ".sparsity.magnitude_pruning_callback",
    "PipelineTrainer": ".pipeline.trainer",
    "PlanCallback": ".plan_callback",
    "QATCallback": ".qat.callback",
    "QATConfig": ".qat.config",
    "SequenceParallelCallback": ".sequence_parallel.sequence_parallel_callback",
    "TensorParallelCallback": ".tensor_parallel.tensor_parallel_callback",
    "compare_qat": ".qat.comparison",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
