"""Strict checks of DeepSpeed JSON, Accelerate YAML and TRL configurations, without importing these libraries."""

from __future__ import annotations

from .accelerate import check_accelerate
from .deepspeed import check_deepspeed
from .effects import effect_errors
from .files import check_text
from .parsing import detect_kind
from .report import Finding

__all__ = [
    "Finding",
    "check_accelerate",
    "check_deepspeed",
    "check_text",
    "detect_kind",
    "effect_errors",
]
