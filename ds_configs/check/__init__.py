"""Strict checks of DeepSpeed JSON, Accelerate YAML and TRL configurations, without importing these libraries."""

from .files import check_text

__all__ = ["check_text"]
