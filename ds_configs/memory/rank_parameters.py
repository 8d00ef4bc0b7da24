"""Elements that one rank trains and keeps frozen, and how its gradients grow during the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..specs.job import TrainingJob
from ..specs.model import ModelSpec, ParameterShape, adapters, lora_parameter_count
from ..specs.strategy import Strategy
from .moments import PHASES, Moment
from .shares import rank_shares

NF4_SCALE_BYTES = 1 / 64 + 4 / (64 * 256)
"""Bytes of scales of a 4-bit weight: one for each 64, and one fp32 for each 256 of these (double quantization, QLoRA
section 3). They are no parameters (`quant_state` of bitsandbytes 0.50.2), and no engine divides them."""

NF4_BYTES = 0.5 + NF4_SCALE_BYTES
"""Bytes of a 4-bit weight: half a byte and its scales."""

NF4_TABLE_BYTES = 4 * (256 + 16 + 1)
"""Bytes of tables beside the scales of each tensor: the values that codes of scales and of weights stand for, and the
scales' mean (bitsandbytes 0.50.2, functional.py:669, 938)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParameters:
    """Elements that one rank trains and keeps frozen before sharding."""

    trainable: int
    """Elements with gradients and optimizer states."""
    frozen: int
    """Elements without."""
    frozen_bytes: int
    """Bytes of the frozen elements as stored."""
    largest_trainable: int
    """Elements of the largest single trainable tensor."""
    trainable_tail: int
    """Trainable elements of final norm and head, whose gradients come first."""
    trainable_outside_layers: int
    """Trainable elements of the tail and the embeddings, whose gradients come last unless tied to the head."""
    layers: int
    """Layers that share the other trainable elements."""
    scale_bytes: int = 0
    """Bytes of `frozen_bytes` that every rank keeps whole: scales of 4-bit weights."""
    trainable_experts: int = 0
    """Trainable elements of experts that `1 / ep` of the data-parallel ranks hold; 0 without expert parallelism."""

    def shard(self, strategy: Strategy) -> int:
        """Trainable elements whose states a rank keeps: experts are divided over the ranks that hold the same ones."""
        ranks = strategy.shard_size
        dense = self.trainable - self.trainable_experts
        return -(-dense // ranks) + -(-self.trainable_experts * strategy.ep // ranks)

    def frozen_shard_bytes(self, strategy: Strategy) -> int:
        """Bytes of frozen elements that a rank keeps where the engine divides parameters."""
        return -(-(self.frozen_bytes - self.scale_bytes) // strategy.shard_size) + self.scale_bytes

    def largest_group_shard(self, strategy: Strategy) -> int:
        """Trainable elements of the shard that the optimizer steps at once: experts are a group of their own."""
        experts = -(-self.trainable_experts * strategy.ep // strategy.shard_size)
        return max(experts, self.shard(strategy) - experts)

    def state_shard(self, states: int, strategy: Strategy) -> int:
        """Bytes that one rank keeps of `states`, those of all trainable elements of `trainable`."""
        if not self.trainable_experts:
            return -(-states // strategy.shard_size)
        return -(-states * self.shard(strategy) // self.trainable)

    def gradients_so_far(self, moment: Moment) -> int:
        """Elements whose gradients exist at a moment of the backward pass, of those that are trained."""
        in_layers = self.trainable - self.trainable_outside_layers
        done = {
            "head_backward": self.trainable_tail,
            "after_head": self.trainable_tail,
            "last_layer_backward": self.trainable_tail,
            "after_last_layer": self.trainable_tail + in_layers // self.layers,
            "first_layer_backward": self.trainable_tail + in_layers - in_layers // self.layers,
            "after_first_layer": self.trainable_tail + in_layers,
        }
        return done.get(moment, self.trainable)


def rank_parameters(model: ModelSpec, job: TrainingJob, strategy: Strategy | None = None) -> RankParameters:
    """Return what a rank trains and what it keeps frozen under the job's method.

    Without a strategy that is everything; with one, what the fullest rank holds before ZeRO divides it.
    """
    if strategy is None:
        return share_parameters(model, job)
    shares = rank_shares(strategy, model, job)
    return max((share_parameters(share.model, job, ep=strategy.ep) for share in shares), key=lambda p: p.trainable)


@lru_cache(maxsize=4096)
def share_parameters(model: ModelSpec, job: TrainingJob, *, ep: int = 1) -> RankParameters:
    """Return what a rank trains and keeps frozen that holds all of `model`, its experts under expert parallelism."""
    total, layers = model.parameter_count, max(1, model.dimensions.num_layers)
    if job.method == "full":
        return RankParameters(
            trainable=total,
            frozen=0,
            frozen_bytes=0,
            largest_trainable=model.largest_parameter,
            trainable_tail=model.tail_parameters,
            trainable_outside_layers=model.parameters_outside_layers,
            layers=layers,
            trainable_experts=sum(p.total for p in model.parameters if p.kind == "experts") if ep > 1 else 0,
        )
    adapters = lora_parameter_count(model, rank=job.lora_rank, targets=job.lora_targets)
    frozen_bytes, scale_bytes = total * job.compute_bytes, 0
    if job.method == "qlora":
        quantized = model.linear_parameters(include_head=False)
        tables = NF4_TABLE_BYTES * sum(parameter.count for parameter in model.parameters if is_packed(parameter, job))
        scale_bytes = round(quantized * NF4_SCALE_BYTES) + tables
        frozen_bytes = round(quantized * NF4_BYTES) + tables + (total - quantized) * job.compute_bytes
    widest = max((max(p.shape) for p in model.parameters if p.kind == "linear"), default=0)
    return RankParameters(
        trainable=adapters,
        frozen=total,
        frozen_bytes=frozen_bytes,
        scale_bytes=scale_bytes,
        largest_trainable=job.lora_rank * widest,
        trainable_tail=0,
        trainable_outside_layers=0,
        layers=layers,
    )


def is_packed(parameter: ParameterShape, job: TrainingJob) -> bool:
    """Return whether a job keeps a parameter in 4 bit."""
    return job.method == "qlora" and parameter.kind == "linear" and parameter.group != "head"


@lru_cache(maxsize=256)
def engine_parameters(model: ModelSpec, job: TrainingJob) -> ModelSpec:
    """Return a model with the parameters that ZeRO-3 and FSDP2 gather: adapters too, and 4-bit weights packed.

    Two or four of these fill a byte or two of the storage, whose dtype is that of products (`plugins/peft/lora.py`).
    """
    if job.method == "full":
        return model
    found = []
    for parameter in model.parameters:
        packed = (-(-parameter.numel // (2 * job.compute_bytes)), 1)
        found.append(replace(parameter, shape=packed) if is_packed(parameter, job) else parameter)
    adapted: dict[str, list[ParameterShape]] = {}
    for adapter in adapters(model, rank=job.lora_rank, targets=job.lora_targets):
        adapted.setdefault(adapter.module.rpartition(".")[0], []).append(adapter)
    beside = [[each, *adapted.get(each.name.removesuffix(".weight"), [])] for each in found]
    return replace(model, parameters=tuple(each for group in beside for each in group))


def growing_gradients(strategy: Strategy, parameters: RankParameters, whole_bytes: int) -> dict[str, dict[str, int]]:
    """Return the gradient bytes of the moments at which they grow to `whole_bytes`.

    With accumulation they are whole from the second micro-batch on, in its forward pass too.
    """
    if strategy.gradient_accumulation_steps > 1:
        return {"loss": {"gradients": whole_bytes}, "backward": {"gradients": whole_bytes}}
    trainable = max(1, parameters.trainable)
    return {
        moment: {"gradients": whole_bytes * parameters.gradients_so_far(moment) // trainable}
        for moment, phase in PHASES.items()
        if phase == "backward"
    }
