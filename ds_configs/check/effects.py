"""Keys of a DeepSpeed configuration that end a run, redirect it, or change it without a message.

Seen in deepspeed 0.19.8, whose file and line each entry names, and Accelerate 1.15.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..specs.errors import ConfigError
from .parsing import parse
from .report import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """What a truthy key does to a training run."""

    path: str
    kind: Literal["error", "warning"]
    rule: str
    fix: str = "remove the key"
    holds: Callable[[Report], bool] = lambda _: True
    """Whether it does so with the other keys of the file."""
    in_trainer: bool = False
    """Whether it is so only under a Trainer, which has its own data loader and leaves accumulation to Accelerate."""


def _stage(report: Report) -> int:
    return report.integer("zero_optimization.stage") or 0


def _scatters(report: Report) -> bool:
    return _stage(report) > 1 and report.value("zero_optimization.reduce_scatter") is not False


def _is_set(report: Report, section: str) -> bool:
    return report.value(f"{section}.enabled") in (True, "auto")


_OWN_LOADER = "has no effect: it applies to the data loader of deepspeed.initialize, but the Trainer makes its own"
_WAITS = "waits for the device several times in every step, which slows the run"
_SCATTER = "is not supported with reduce_scatter, which is on by default"

EFFECTS = (
    # runtime/engine.py:3657, and :3025 for model_info.
    Effect(
        path="autotuning.enabled",
        kind="error",
        rule="ends the run early with exit code 0 (in the first step, or in step end_profile_step + 1), untrained",
        fix="remove the section; `shardwright tune` compares layouts",
    ),
    # runtime/engine.py:3488: Accelerate sets the boundary in each backward pass.
    Effect(
        path="managed_gradient_accumulation",
        kind="error",
        rule="false stops the first step: Accelerate sets the boundaries of accumulation, which DeepSpeed then rejects",
        in_trainer=True,
    ),
    # runtime/engine.py:2957.
    Effect(
        path="fp16.auto_cast",
        kind="error",
        rule="casts inputs to fp16, but fp16 is not enabled for the model",
        holds=lambda report: not _is_set(report, "fp16"),
    ),
    # runtime/zero/stage_1_and_2.py:350, stage3.py:395.
    Effect(path="prescale_gradients", kind="error", rule=_SCATTER, holds=_scatters),
    Effect(
        path="gradient_predivide_factor",
        kind="error",
        rule=_SCATTER,
        fix="write 1.0",
        holds=lambda report: _scatters(report) and report.number("gradient_predivide_factor") != 1,
    ),
    # runtime/engine.py:3806; Adam hides it, clipping and SGD do not.
    Effect(
        path="gradient_allreduce_op",
        kind="warning",
        rule="'sum' multiplies gradients by the number of ranks, before they are clipped",
        fix="write 'mean'",
        holds=lambda report: str(report.value("gradient_allreduce_op")).lower() == "sum",
    ),
    Effect(
        path="communication_data_type",
        kind="warning",
        rule="rounds gradients to fp16 before they are reduced, with infinity above 65,504",
        holds=lambda report: (
            report.value("communication_data_type") == "fp16" and report.value("fp16.enabled") is not True
        ),
    ),
    Effect(
        path="communication_data_type",
        kind="warning",
        rule="rounds gradients of a run in fp32 to bf16 before they are reduced",
        holds=lambda report: (
            report.value("communication_data_type") == "bf16"
            and not any(_is_set(report, section) for section in ("bf16", "bfloat16", "fp16"))
        ),
    ),
    # __init__.py: `DeepSpeedHybridEngine`; runtime/hybrid_engine.py, `eval` and `generate`.
    Effect(
        path="hybrid_engine.enabled",
        kind="warning",
        rule="evaluates and generates with other kernels than the model's, which replace its layers in eval()",
        fix="remove the section",
    ),
    # runtime/zero/partition_parameters.py:355.
    Effect(
        path="weight_quantization.quantized_initialization",
        kind="error",
        rule="quantizes the weights as ZeRO-3 loads them, so that they cannot be trained",
        fix="remove the section; for frozen 4-bit weights plan with --method qlora",
        holds=lambda report: _stage(report) == 3,
    ),
    Effect(
        path="weight_quantization.post_init_quant",
        kind="warning",
        rule="has no effect in training: only DeepSpeed's inference reads it",
        fix="remove the section",
    ),
    # runtime/data_pipeline: the engine's own loader applies these; random-LTD also needs converted layers.
    *(
        Effect(path=f"data_efficiency.data_sampling.{key}", kind="warning", rule=_OWN_LOADER, in_trainer=True)
        for key in ("enabled", "curriculum_learning.enabled", "dynamic_batching.enabled")
    ),
    Effect(path="dataloader_drop_last", kind="warning", rule=_OWN_LOADER, in_trainer=True),
    Effect(
        path="data_efficiency.data_routing.random_ltd.enabled",
        kind="warning",
        rule="drops no tokens: the layers of the model must be converted with convert_to_random_ltd first",
        in_trainer=True,
    ),
    # runtime/engine.py:4428.
    Effect(
        path="checkpoint.load_universal",
        kind="warning",
        rule="resumes only from checkpoints that DeepSpeed's ds_to_universal.py converted",
    ),
    Effect(
        path="zero_optimization.load_from_fp32_weights",
        kind="warning",
        rule="false resumes from weights that are rounded to 16 bit",
    ),
    # utils/timer.py, comm/comm.py:133; runtime/config.py: the profiler enables wall_clock_breakdown for all steps.
    Effect(path="wall_clock_breakdown", kind="warning", rule=_WAITS),
    Effect(path="memory_breakdown", kind="warning", rule="prints memory several times in every step"),
    Effect(path="flops_profiler.enabled", kind="warning", rule=f"{_WAITS}, not only profile_step"),
    Effect(path="comms_logger.enabled", kind="warning", rule="waits for the device after every collective"),
)
_BY_FALSE = ("managed_gradient_accumulation", "zero_optimization.load_from_fp32_weights")
"""Keys that are true by default; false is what has an effect."""

_PEAKS = {
    "WarmupLR": ("warmup_max_lr", None),
    "WarmupDecayLR": ("warmup_max_lr", 0.001),
    "OneCycle": ("cycle_max_lr", None),
    "LRRangeTest": ("lr_range_test_min_lr", 0.001),
}
"""Parameter and default of the peak rate that a scheduler gives to every group; without one, each keeps its own."""


def check_effects(report: Report, *, uses_transformers: bool) -> None:
    """Add a finding for each key that ends, redirects or silently changes a run."""
    for effect in EFFECTS:
        node = report.node(effect.path)
        value = None if node is None else node.plain()
        acts = value is False if effect.path in _BY_FALSE else bool(value)
        if acts and (uses_transformers or not effect.in_trainer) and effect.holds(report):
            (report.error if effect.kind == "error" else report.warning)(effect.path, effect.rule, effect.fix)
    _check_rates(report)


def _check_rates(report: Report) -> None:
    """Report a scheduler whose single peak replaces the two rates of Muon (runtime/lr_schedules.py, `update_lr`)."""
    scheduler = report.text("scheduler.type")
    if scheduler not in _PEAKS or str(report.value("optimizer.type")).lower() != "muon":
        return
    shared = report.value("optimizer.params.lr")
    rates = []
    for name in ("muon_lr", "adam_lr"):
        rates.append(report.value(f"optimizer.params.{name}") if report.has(f"optimizer.params.{name}") else shared)
    key, default = _PEAKS[scheduler]
    path = f"scheduler.params.{key}"
    node = report.node(path)
    peak = default if node is None else node.plain()
    if rates[0] == rates[1] or peak is None or isinstance(peak, list):
        return
    rule = f"replaces both rates of Muon, {rates[0]} and {rates[1]}: {scheduler} gives every group the same"
    fix = "use WarmupCosineLR, which scales each rate, or remove the scheduler"
    if key == "warmup_max_lr":
        fix = "write null, so that each group keeps its rate, or use WarmupCosineLR"
    report.error(path if node is not None else "scheduler.type", rule, fix)


def effect_errors(configuration: Mapping[str, Any], *, name: str = "DeepSpeed configuration") -> list[ConfigError]:
    """Return the errors of `check_effects` for a configuration that a run is about to use."""
    # Accelerate sets `steps_per_print` to infinity, which JSON does not have.
    finite = {key: value for key, value in configuration.items() if value != math.inf}
    report = parse(json.dumps(finite, default=str), f"{name}.json")
    check_effects(report, uses_transformers=True)
    errors = (finding.error for finding in report.findings if finding.kind == "error")
    # The line number is that of the text above.
    return [replace(error, where=error.where.replace(f"{name}.json:1 ", f"{name}: ")) for error in errors]
