"""Fused experts under quantization-aware training."""

from __future__ import annotations

from typing import Any


def is_fused_experts(module: Any) -> bool:
    return False


def expert_linear_layers(model: Any, name: str) -> tuple[Any, ...]:
    return ()


def fake_quantize_experts(module: Any, name: str, quantizers: dict[str, Any]) -> None:
    raise NotImplementedError
