"""Distillation: trainers, teacher caches and smaller students."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache.teacher_cache import CachedTeacherDataset, TeacherCache
    from .clip_trainer import ClipDistillationConfig, CLIPDistillationTrainer
    from .config import DistillationConfig, OnPolicy, Schedule, SelfTeacher
    from .feature_matching import AttentionTerm, HiddenStateTerm
    from .trainer import DistillationTrainer

__all__ = [
    "AttentionTerm",
    "CLIPDistillationTrainer",
    "CachedTeacherDataset",
    "ClipDistillationConfig",
    "DistillationConfig",
    "DistillationTrainer",
    "HiddenStateTerm",
    "OnPolicy",
    "Schedule",
    "SelfTeacher",
    "TeacherCache",
]

_HOMES = {
    "AttentionTerm": ".feature_matching",
    "CLIPDistillationTrainer": ".clip_trainer",
    "CachedTeacherDataset": ".cache.teacher_cache",
    "ClipDistillationConfig": ".clip_trainer",
    "DistillationConfig": ".config",
    "DistillationTrainer": ".trainer",
    "HiddenStateTerm": ".feature_matching",
    "OnPolicy": ".config",
    "Schedule": ".config",
    "SelfTeacher": ".config",
    "TeacherCache": ".cache.teacher_cache",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
