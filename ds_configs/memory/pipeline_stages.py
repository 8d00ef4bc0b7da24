"""Pipeline stages of a model: the cut minimizes the time of the slowest stage, then the memory of the largest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from ..specs.errors import Fault, UsageError
from ..specs.job import OPTIMIZERS, TrainingJob
from ..specs.model import ModelSpec
from ..specs.stages import PipelineStage, contiguous_stages
from .activation_source import cached_activations
from .activations import Mode, UnknownFamilyError
from .tensor_share import tensor_parallel_share

_StageCost = Callable[[int, int, int], float]
"""What a stage costs: its index, its first layer, one beyond its last."""

# Halving the interval 60 times leaves less than the rounding of a float64 cost, whatever its unit.
_BISECTIONS = 60


def pipeline_stages(
    model: ModelSpec, job: TrainingJob, pp: int, *, tensor_parallel_size: int = 1
) -> tuple[PipelineStage, ...]:
    """Return the contiguous stages of a pipeline of a whole model; what prices a plan and what runs it both ask here.

    The time of a stage is that of its forward matrix products, `forward_flops_per_token`, to which the last stage adds
    the output head; every stage waits for the slowest, which comes first. Stages of one slowest time differ in memory:
    weights, gradients and optimizer states of what they hold (the first the embedding, the last the head, a tied one
    on both), and the activations of `pp - stage` micro-batches, which 1F1B keeps in flight (arXiv 2104.04473, 2.2);
    without stored coefficients activations are left out. With tensor parallelism a stage costs what one of its ranks
    holds: its layers are divided, and embedding and head are not.

    Raises:
        UsageError: there are fewer layers than stages.
    """
    # What the stages do not depend on is no part of the key.
    plain = replace(job, loss="auto", global_batch_size=None, strategy="auto", offload="auto", objective="throughput")
    return _fastest_stages(model, plain, pp, tensor_parallel_size)


@lru_cache(maxsize=512)
def _fastest_stages(
    model: ModelSpec, job: TrainingJob, pp: int, tensor_parallel_size: int
) -> tuple[PipelineStage, ...]:
    layers = model.dimensions.num_layers
    if not 1 <= pp <= layers:
        rule = f"cannot exceed the {layers} layers"
        raise UsageError(Fault(where="pp", value=pp, rule=rule, fix=f"nearest legal value: {max(1, layers)}"))
    if tensor_parallel_size > 1:
        model = tensor_parallel_share(model, tensor_parallel_size, divides_head=False)
    time, memory = _time_cost(model, job, pp), _memory_cost(model, job, pp)
    fastest = _smallest_largest([time], layers, pp)
    leanest = _smallest_largest([memory, time], layers, pp, others=[fastest])
    ends = _ends([memory, time], [leanest, fastest], layers, pp)
    assert ends is not None, "the limits were taken from such stages"
    return contiguous_stages(ends)


def forward_flops_per_token(model: ModelSpec, job: TrainingJob) -> tuple[float, float]:
    """Return the forward operations for one token in one layer and in the output head.

    `2 * weights` for each matrix product, of routed experts those that a token visits, and `2 * seq_len * query_size`
    for causal attention (arXiv 2104.04473, appendix).
    """
    sizes = model.dimensions
    visited = sizes.experts_per_token / sizes.num_experts if sizes.num_experts else 0.0
    layer = sum(
        parameter.total * (visited if parameter.kind == "experts" else 1.0)
        for parameter in model.parameters
        if parameter.in_layer and len(parameter.shape) > 1
    ) / max(1, sizes.num_layers)
    attention = 2 * job.seq_len_tokens * sizes.query_size
    return 2 * layer + attention, 2.0 * model.embedding_parameters


def _time_cost(model: ModelSpec, job: TrainingJob, pp: int) -> _StageCost:
    layer, head = forward_flops_per_token(model, job)
    return lambda index, first, end: (end - first) * layer + (head if index == pp - 1 else 0)


def _memory_cost(model: ModelSpec, job: TrainingJob, pp: int) -> _StageCost:
    per_element: float = job.compute_bytes
    if job.method == "full":
        master = 4 if job.compute_bytes == 2 else 0
        per_element += job.compute_bytes + master + OPTIMIZERS[job.optimizer].state_bytes_per_parameter
    inside = model.parameter_count - model.parameters_outside_layers
    layer = inside / max(1, model.dimensions.num_layers) * per_element
    embedding = sum(p.total for p in model.parameters if p.group == "embedding") * per_element
    head = model.tail_parameters * per_element
    activations = _layer_activation_bytes(model, job)

    def cost(index: int, first: int, end: int) -> float:
        outside = (embedding if index == 0 else 0) + (head if index == pp - 1 else 0)
        return (end - first) * (layer + (pp - index) * activations) + outside

    return cost


def _layer_activation_bytes(model: ModelSpec, job: TrainingJob) -> int:
    mode: Mode = "fp32" if job.precision == "fp32" else "bf16"
    try:
        traced = cached_activations(model, job)(job.micro_batch_size or 1, mode)
    except UnknownFamilyError:
        return 0
    return traced.checkpointed_bytes_per_layer if job.gradient_checkpointing == "on" else traced.saved_bytes_per_layer


def _ends(costs: Sequence[_StageCost], limits: Sequence[float], layers: int, stages: int) -> list[int] | None:
    """Return where the stages end when each takes as many layers as the limits allow; `None` when some are left."""

    bounded = tuple(zip(costs, limits, strict=True))
    ends, first = [], 0
    for index in range(stages):
        low, high = first, layers - (stages - index - 1)
        # A stage costs more with more layers: its end lies between what fits and what does not.
        while low < high:
            middle = (low + high + 1) // 2
            for cost, limit in bounded:
                if cost(index, first, middle) > limit:
                    high = middle - 1
                    break
            else:
                low = middle
        if low == first:
            return None
        ends.append(low)
        first = low
    return ends if first == layers else None


def _smallest_largest(costs: Sequence[_StageCost], layers: int, stages: int, *, others: Sequence[float] = ()) -> float:
    """Return the largest first cost of a stage where that is smallest, with limits on the other costs.

    Bisection over the limit: stages that take as many layers as they may are enough to tell whether one can be kept,
    since a stage costs more with more layers.
    """
    cost = costs[0]
    low, high = 0.0, sum(cost(index, 0, layers) for index in range(stages))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _ends(costs, [middle, *others], layers, stages) is None:
            low = middle
        else:
            high = middle
    ends = _ends(costs, [high, *others], layers, stages)
    assert ends is not None, "the upper limit can always be kept"
    return max(cost(index, first, end) for index, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)))
