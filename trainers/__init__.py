"""Second floor: Trainer subclasses, callbacks and the pure loss functions they use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plan_callback import PlanCallback

__all__ = ["PlanCallback"]

_HOMES = {"PlanCallback": ".plan_callback"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
