"""Distillation: trainers, teacher caches and smaller students."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .clip_trainer import ClipDistillationConfig, CLIPDistillationTrainer
    from .feature_matching import AttentionTerm, HiddenStateTerm
    from .settings import DistillationConfig, SelfTeacher
    from .teacher_cache import CachedTeacherDataset, TeacherCache
    from .trainer import DistillationTrainer

_MODULES = {
    ".clip_trainer": ("CLIPDistillationTrainer", "ClipDistillationConfig"),
    ".teacher_cache": ("CachedTeacherDataset", "TeacherCache"),
    ".settings": ("DistillationConfig", "SelfTeacher"),
    ".feature_matching": ("AttentionTerm", "HiddenStateTerm"),
    ".trainer": ("DistillationTrainer",),
}
__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
