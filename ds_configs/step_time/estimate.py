"""Seconds of one optimizer step, every term named: enter here, by `estimate_step_time`.

One micro-batch of a rank costs its layers and head (`micro_batch.py`), what parallel axes exchange inside the layers,
and what data parallelism gathers and reduces beyond the computation beside it (`data_parallel.py`). A pipeline waits
for its slowest stage: `sum of the stages + (m - 1) * slowest` (1F1B, arXiv 2104.04473, section 2.2). The optimizer, the
gathers of its updates, offload and the host's own work come once in a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..memory.pipeline_stages import pipeline_stages
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.stages import PipelineStage, contiguous_stages
from ..specs.strategy import Strategy
from .constants import GpuConstants, hardware_constants
from .offload import optimizer_seconds
from .software import EAGER_ATTENTION, TRANSFORMERS, Software
from .stage_time import (
    Setting,
    exposed,
    overlaps_reductions,
    setting_of,
    stage_terms,
    stage_traffic,
    stepped_parameters,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted time of one optimizer step."""

    seconds: float
    """Expected."""
    low_seconds: float
    """Lower end of the interval."""
    high_seconds: float
    """Upper end of the interval."""
    tokens_per_second: float
    """Tokens of the global batch over `seconds`, all ranks together."""
    terms: dict[str, float]
    """What makes up `seconds`, by name."""


def estimate_step_time(
    strategy: Strategy,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    software: Software | None = None,
    constants: GpuConstants | None = None,
) -> StepTime:
    """Return the seconds of one optimizer step of a layout, `micro_batch_size * gradient_accumulation_steps` a rank.

    Raises:
        UsageError: there are fewer layers than pipeline stages.
    """
    constants = constants or hardware_constants(hardware)
    software = software or (EAGER_ATTENTION if model.attention == "eager" else TRANSFORMERS)
    setting = setting_of(strategy, model, hardware, job, software, constants)
    stages = _stages(setting)
    # Stages of as many layers cost the same, wherever they lie.
    kinds = {_kind(stage): stage_terms(setting, stage) for stage in stages}
    costs = {kind: sum(terms.values()) for kind, terms in kinds.items()}
    slowest = max(costs, key=lambda kind: costs[kind])
    micro_batches = strategy.gradient_accumulation_steps
    terms = {name: micro_batches * value for name, value in kinds[slowest].items()}
    if strategy.pp > 1:
        idle = sum(costs[_kind(stage)] for stage in stages) - costs[slowest]
        terms["pipeline_bubble"] = idle / software.virtual_stages
    for name, value in _once(setting, stages[0]).items():
        terms[name] = terms.get(name, 0.0) + value
    terms = {name: value for name, value in terms.items() if value > 0}
    seconds = sum(terms.values())
    tokens = strategy.global_batch_size * job.seq_len_tokens
    return StepTime(
        seconds=seconds,
        low_seconds=seconds / (1 + constants.error),
        high_seconds=seconds * (1 + constants.error),
        tokens_per_second=tokens / seconds,
        terms=terms,
    )


def _kind(stage: PipelineStage) -> tuple[int, bool, bool]:
    return stage.num_layers, stage.has_embedding, stage.has_head


def _stages(setting: Setting) -> tuple[PipelineStage, ...]:
    strategy, model, job = setting.strategy, setting.model, setting.job
    if strategy.pp == 1:
        layers = model.dimensions.num_layers
        return (PipelineStage(index=0, first_layer=0, end_layer=layers, has_embedding=True, has_head=True),)
    if setting.software.even_stages:
        layers = model.dimensions.num_layers
        return contiguous_stages([(index + 1) * layers // strategy.pp for index in range(strategy.pp)])
    return pipeline_stages(model, job, strategy.pp, tensor_parallel_size=strategy.tp)


def _once(setting: Setting, stage: PipelineStage) -> dict[str, float]:
    """Return the terms that come once in a step, on the stage that holds most."""
    strategy, software = setting.strategy, setting.software
    traffic = stage_traffic(setting, stage)
    terms = optimizer_seconds(
        strategy,
        setting.hardware,
        setting.job,
        software,
        setting.constants,
        parameters=stepped_parameters(setting, stage),
    )
    reduction, updates, slowed, slowed_updates = traffic.reductions_once, traffic.updates_once, 0.0, 0.0
    # A pipeline reduces after its last micro-batch, beside nothing.
    if overlaps_reductions(setting) and strategy.pp == 1:
        reduction, slowed = exposed(setting, reduction, _computed(setting, stage) * 2 / 3)
    if software.overlaps_updates:
        updates, slowed_updates = exposed(setting, updates, _computed(setting, stage) / 3)
    terms["gradient_reduction"] = reduction
    terms["overlap_slowdown"] = slowed + slowed_updates
    terms["parameter_updates"] = updates
    terms["step_overhead"] = software.step_seconds
    return terms


def _computed(setting: Setting, stage: PipelineStage) -> float:
    """Return the seconds of a micro-batch beside which gradients are reduced and updates gathered."""
    terms = stage_terms(setting, stage)
    return sum(terms.get(name, 0.0) for name in _COMPUTED)


_COMPUTED = (
    "matrix_products",
    "attention",
    "memory_operations",
    "recomputation",
    "head_and_loss",
    "kernel_launches",
    "tensor_parallel",
)
