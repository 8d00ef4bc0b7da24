"""Rules for `tensor_parallel` and `expert_parallel` in a DeepSpeed JSON (AutoTP and AutoEP, deepspeed 0.19.8)."""

from __future__ import annotations

from ..legality.candidate import nearest_divisors
from ..legality.tensor import LARGEST_ZERO_STAGE
from .report import Report

_TENSOR = "tensor_parallel.autotp_size"
_EXPERT = "expert_parallel.autoep_size"


def check_axes(report: Report, *, world_size: int | None) -> None:
    """Check the sizes of AutoTP and AutoEP, and what runs beside them."""
    tensor, expert = _size(report, _TENSOR), _size(report, _EXPERT)
    stage = report.integer("zero_optimization.stage") or 0
    enabled = report.true("expert_parallel.enabled")
    if expert > 1 and not enabled:
        report.warning(_EXPERT, "has no effect: AutoEP is not enabled", 'add "enabled": true')
    for path, size in ((_TENSOR, tensor), (_EXPERT, expert if enabled else 1)):
        if size > 1 and world_size is not None and world_size % size:
            rule = f"must divide the {world_size} ranks"
            report.error(path, rule, f"nearest legal values: {nearest_divisors(world_size, size)}")
    if tensor > 1 and stage > LARGEST_ZERO_STAGE:
        rule = f"runs with ZeRO stages 0 to {LARGEST_ZERO_STAGE}; the stage is {stage}"
        report.error(_TENSOR, rule, "use stage 2, or autotp_size 1")
    if tensor > 1 and expert > 1 and enabled:
        report.error(_EXPERT, "AutoTP refuses mixtures of experts", "set one of the two sizes to 1")
    if expert > 1 and enabled and stage == 3:
        _check_stage_three(report)


def _size(report: Report, path: str) -> int:
    return (report.integer(path) or 1) if report.has(path) else 1


def _check_stage_three(report: Report) -> None:
    clashes = {
        "zero_hpz_partition_size": (report.integer("zero_optimization.zero_hpz_partition_size") or 1) > 1,
        "zero_quantized_gradients": report.true("zero_optimization.zero_quantized_gradients"),
    }
    for key, present in clashes.items():
        if present:
            path = f"zero_optimization.{key}"
            report.error(path, "AutoEP refuses it at stage 3 (runtime/engine.py:2197)", "remove it, or use stage 2")
