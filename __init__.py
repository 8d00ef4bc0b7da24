"""Shardwright: plans DeepSpeed and Accelerate training, proves the plan, and runs it.

>>> import shardwright
>>> shardwright.plan("config.json", "8xA100-80GB").write("plan")  # doctest: +SKIP
>>> shardwright.rehearse("plan").passed  # doctest: +SKIP
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ds_configs.check.files import check
    from .ds_configs.plan.plan import Plan
    from .ds_configs.specs.job import TrainingJob
    from .plugins.planning import plan
    from .trainers.distillation.command import distill
    from .trainers.distillation.student import student
    from .trainers.evaluation.evaluate import evaluate_model as evaluate
    from .trainers.formats.merge import merge
    from .trainers.qat.command import qat
    from .trainers.quantization import quantize
    from .trainers.rehearsal.rehearse import rehearse
    from .trainers.training.rank import trainer_for
    from .trainers.training.task import train
    from .trainers.tuning import tune

__version__ = "0.2.0"
__all__ = [
    "Plan",
    "TrainingJob",
    "__version__",
    "check",
    "distill",
    "evaluate",
    "merge",
    "plan",
    "qat",
    "quantize",
    "rehearse",
    "student",
    "train",
    "trainer_for",
    "tune",
]

_HOMES = {
    "Plan": ".ds_configs.plan.plan",
    "TrainingJob": ".ds_configs.specs.job",
    "check": ".ds_configs.check.files",
    "distill": ".trainers.distillation.command",
    "evaluate": ".trainers.evaluation.evaluate:evaluate_model",
    "merge": ".trainers.formats.merge",
    "plan": ".plugins.planning",
    "qat": ".trainers.qat.command",
    "quantize": ".trainers.quantization",
    "rehearse": ".trainers.rehearsal.rehearse",
    "student": ".trainers.distillation.student",
    "train": ".trainers.training.task",
    "trainer_for": ".trainers.training.rank",
    "tune": ".trainers.tuning",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module, _, attribute = _HOMES[name].partition(":")
        return getattr(import_module(module, __name__), attribute or name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
