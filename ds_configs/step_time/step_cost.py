"""What a layout loses of a training step to communication and idle stages, comparable between all layouts.

Every layout is charged for the same tokens: the job's global batch, or where that is open `STEP_TOKENS` for each
accelerator, in micro-batches of `MICRO_BATCH_TOKENS` for each rank of a sequence. Neither depends on memory, so that
an accelerator with more of it never changes the order of preference.

Collectives of data parallelism (gradient reductions, ZeRO's and FSDP's gathers) run beside the computation of their
micro-batch, and what exceeds it is lost. The computation waits for all others: the all-reduces of tensor parallelism,
the all-to-alls of sequence and expert parallelism, the keys and values of context parallelism, the transfers between
stages. A pipeline reduces its gradients after the last micro-batch, beside nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..memory.pipeline_stages import pipeline_stages
from ..memory.rank_parameters import rank_parameters
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from . import collectives
from .collectives import group_bytes_per_s, others

STEP_TOKENS = 16_384
"""Tokens that each accelerator processes in the step that is compared, where the global batch is open."""

MICRO_BATCH_TOKENS = 4096
"""Tokens of one micro-batch on each rank of a sequence, where the micro-batch is open."""

COMPUTE_EFFICIENCY = 0.5
"""Share of the datasheet's FLOP/s that matrix products reach: 0.4 to 0.57 in Megatron-LM (arXiv 2104.04473, table 1)
and the Ultra-Scale Playbook."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Seconds of one step, in which every accelerator processes `tokens_per_accelerator`."""

    tokens_per_accelerator: float
    """Tokens of the step over accelerators."""
    micro_batches: int
    """Micro-batches of one replica in the step."""
    compute_seconds: float
    """Matrix products and attention of an even share, without recomputation."""
    data_seconds: float = 0.0
    """Data parallelism: what exceeds the computation beside it."""
    tensor_seconds: float = 0.0
    """All-reduces of tensor parallelism."""
    sequence_seconds: float = 0.0
    """All-to-alls of sequence parallelism."""
    context_seconds: float = 0.0
    """Keys and values of context parallelism."""
    expert_seconds: float = 0.0
    """All-to-alls of expert parallelism."""
    transfer_seconds: float = 0.0
    """Hidden states and gradients between stages."""
    bubble_seconds: float = 0.0
    """Stages that wait for their first and after their last micro-batch, and for the slowest stage."""

    @property
    def parts(self) -> dict[str, float]:
        """What is lost, by name, without the computation."""
        names = [field.name for field in fields(self) if field.name.endswith("_seconds")]
        return {name.removesuffix("_seconds"): getattr(self, name) for name in names if name != "compute_seconds"}

    @property
    def lost_seconds(self) -> float:
        """All that is lost of the step."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """The micro-batches that one replica processes for the tokens that are compared."""

    tokens: int
    """Of one micro-batch."""
    micro_batches: int
    scale: float
    """Tokens that are compared over tokens that these micro-batches hold."""
    tokens_per_accelerator: float


def step_cost(strategy: Strategy, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> StepCost:
    """Return what a layout loses of a step; its own micro-batch and accumulation do not count (see above)."""
    step = _step(strategy, job)
    per_token = training_flops_per_token(model, job) / (hardware.flops_per_s * COMPUTE_EFFICIENCY)
    replica_ranks = strategy.world_size // strategy.data_parallel_size
    compute = step.tokens * per_token / replica_ranks
    sizes, width, layers = model.dimensions, job.compute_bytes, model.dimensions.num_layers
    tensor = sequence = context = expert = transfer = idle = 0.0
    if strategy.tp > 1:
        volume = collectives.tensor_parallel_bytes(
            tp=strategy.tp,
            tokens=step.tokens,
            hidden_size=sizes.hidden_size,
            layers=layers / strategy.pp,
            element_bytes=width,
            # A head tied to the embedding is whole on each rank, and so is every head in a pipeline.
            vocab_size=0 if model.tied_embeddings or strategy.pp > 1 else sizes.vocab_size,
        )
        tensor = volume / group_bytes_per_s(hardware, ranks=strategy.tp)
    if strategy.sp > 1 or strategy.cp > 1:
        sequence, context = _sequence_seconds(strategy, model, hardware, width, step.tokens)
    if strategy.ep > 1:
        volume = collectives.expert_parallel_bytes(
            ep=strategy.ep,
            tokens=step.tokens,
            experts_per_token=sizes.experts_per_token,
            hidden_size=sizes.hidden_size,
            layers=layers,
            element_bytes=width,
        )
        expert = volume / group_bytes_per_s(hardware, ranks=strategy.ep)
    if strategy.pp > 1:
        volume = collectives.pipeline_bytes(tokens=step.tokens, hidden_size=sizes.hidden_size, element_bytes=width)
        transfer = volume / _stage_boundary_bytes_per_s(hardware)
        slot = _slowest_stage_seconds(strategy, model, job, compute, tensor)
        idle = (strategy.pp - 1) * slot + step.micro_batches * (slot - compute - tensor)
    many, scale = step.micro_batches, step.scale
    return StepCost(
        tokens_per_accelerator=step.tokens_per_accelerator,
        micro_batches=many,
        compute_seconds=scale * many * compute,
        data_seconds=scale * _data_seconds(strategy, model, hardware, job, many, compute),
        tensor_seconds=scale * many * tensor,
        sequence_seconds=scale * many * sequence,
        context_seconds=scale * many * context,
        expert_seconds=scale * many * expert,
        transfer_seconds=scale * many * transfer,
        bubble_seconds=scale * idle,
    )


def training_flops_per_token(model: ModelSpec, job: TrainingJob) -> float:
    """Return `3 * (2 * active matrix elements + 2 * seen tokens * query size * layers)`; 2 for 3 with adapters.

    Causal attention sees half of the sequence on average, in two products (arXiv 2104.04473, section 5.1).
    """
    sizes = model.dimensions
    matrices = model.linear_parameters(include_head=True)
    matrices += model.embedding_parameters if model.tied_embeddings else 0
    if sizes.num_experts:
        experts = sum(parameter.total for parameter in model.parameters if parameter.kind == "experts")
        matrices += experts * sizes.experts_per_token // sizes.num_experts
    seen = min(job.seq_len_tokens, model.sliding_window or job.seq_len_tokens)
    forward = 2 * matrices + 2 * seen * sizes.query_size * sizes.num_layers
    return (3 if job.method == "full" else 2) * forward


def pipeline_micro_batches(strategy: Strategy, job: TrainingJob, micro_batch_size: int) -> int:
    """Return the micro-batches of a pipeline's step where the global batch is open: those of `STEP_TOKENS`."""
    tokens = STEP_TOKENS * strategy.world_size // strategy.data_parallel_size
    return max(strategy.pp, tokens // (micro_batch_size * job.seq_len_tokens))


def filling_micro_batch_sizes(per_rank: int, largest: int, stages: int) -> list[int]:
    """Return the sizes up to `largest` that divide the samples of a pipeline's rank and leave enough micro-batches.

    Enough are `4 * (stages - 1)`, which idle for a fifth of a step, `(p - 1) / (m + p - 1)`; where no size leaves
    them, the smallest is returned alone.

    >>> filling_micro_batch_sizes(96, 8, 4), filling_micro_batch_sizes(8, 8, 4)
    ([1, 2, 3, 4, 6, 8], [1])
    """
    sizes = [size for size in range(1, max(1, min(per_rank, largest)) + 1) if per_rank % size == 0]
    return [size for size in sizes if per_rank // size >= 4 * (stages - 1)] or sizes[:1]


def _step(strategy: Strategy, job: TrainingJob) -> _Step:
    replica_ranks = strategy.world_size // strategy.data_parallel_size
    if job.global_batch_size is None:
        replica_tokens = float(STEP_TOKENS * replica_ranks)
    else:
        replica_tokens = job.global_batch_size * job.seq_len_tokens / strategy.data_parallel_size
    wanted = job.micro_batch_size or max(1, MICRO_BATCH_TOKENS * strategy.sp * strategy.cp // job.seq_len_tokens)
    if job.global_batch_size is not None:
        per_rank = max(1, job.global_batch_size // strategy.data_parallel_size)
        wanted = min(wanted, per_rank)
        if strategy.pp > 1 and job.micro_batch_size is None:
            wanted = filling_micro_batch_sizes(per_rank, wanted, strategy.pp)[-1]
    tokens = wanted * job.seq_len_tokens
    micro_batches = max(1, round(replica_tokens / tokens))
    return _Step(
        tokens=tokens,
        micro_batches=micro_batches,
        scale=replica_tokens / (micro_batches * tokens),
        tokens_per_accelerator=replica_tokens / replica_ranks,
    )


def _sequence_seconds(
    strategy: Strategy, model: ModelSpec, hardware: HardwareSpec, width: int, tokens: int
) -> tuple[float, float]:
    sizes = model.dimensions
    bandwidth = group_bytes_per_s(hardware, ranks=strategy.sp * strategy.cp)
    sequence = collectives.sequence_parallel_bytes(
        sp=strategy.sp,
        tokens=tokens,
        query_size=sizes.query_size,
        key_value_size=sizes.key_value_size,
        key_value_heads=sizes.num_key_value_heads,
        layers=sizes.num_layers,
        element_bytes=width,
    )
    context = collectives.context_parallel_bytes(
        cp=strategy.cp,
        tokens=tokens,
        key_value_size=sizes.key_value_size,
        layers=sizes.num_layers,
        element_bytes=width,
    )
    return sequence / bandwidth, context / bandwidth


def _stage_boundary_bytes_per_s(hardware: HardwareSpec) -> float:
    """The slowest boundary sets the pace: on several nodes one always lies between two of them."""
    return hardware.link_bytes_per_s if hardware.nodes == 1 else hardware.network_bytes_per_s


def _slowest_stage_seconds(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, compute: float, tensor: float
) -> float:
    """Return what the slowest stage needs for a micro-batch; its ranks divide the layers, and each computes the head.

    `compute` and `tensor` are those of an even share of the whole model.
    """
    sizes = model.dimensions
    forward = training_flops_per_token(model, job) / (3 if job.method == "full" else 2)
    whole = compute * strategy.tp * strategy.pp
    head = whole * min(1.0, 2.0 * sizes.hidden_size * sizes.vocab_size / forward)
    layer = (whole - head) / strategy.tp / sizes.num_layers + tensor * strategy.pp / sizes.num_layers
    # A pipeline of more stages than layers is refused later, whatever it costs.
    stages = pipeline_stages(model, job, min(strategy.pp, sizes.num_layers), tensor_parallel_size=strategy.tp)
    return max(stage.num_layers * layer + (head if stage.has_head else 0.0) for stage in stages)


def _data_seconds(
    strategy: Strategy, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob, micro_batches: int, compute: float
) -> float:
    """Return what gathers and reductions exceed the computation of their micro-batch; the last bears the step's."""
    each, once = data_parallel_seconds(strategy, model, hardware, job)
    if strategy.pp > 1:
        return micro_batches * each + once
    return (micro_batches - 1) * max(0.0, each - compute) + max(0.0, each + once - compute)


def data_parallel_seconds(
    strategy: Strategy, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob
) -> tuple[float, float]:
    """Return the seconds of gathers and reductions of each micro-batch, and those once in a step.

    DDP and ZeRO 0 and 1 reduce and gather once in a step, ZeRO-2 reduces every micro-batch, ZeRO-3 and FSDP2 gather
    twice and reduce every micro-batch. Elements count in compute precision for every engine; only with sequence
    parallelism DeepSpeed reduces gradients in fp32 (deepspeed/runtime/engine.py:2182).
    """
    parameters = rank_parameters(model, job)
    trainable, frozen = parameters.trainable, parameters.frozen
    ranks = strategy.data_parallel_size * strategy.sp * strategy.cp
    cut = strategy.tp * strategy.pp
    each = once = 0.0
    experts = sum(p.total for p in model.parameters if p.kind == "experts") if strategy.ep > 1 else 0
    if experts and trainable:
        share = experts / strategy.ep
        a, b = _part_seconds(strategy, hardware, job, share, 0.0, max(1, ranks // strategy.ep), strategy.ep)
        each, once = each + a, once + b
        trainable -= experts
    a, b = _part_seconds(strategy, hardware, job, trainable / cut, frozen / cut, ranks, strategy.tp)
    return each + a, once + b


def _part_seconds(
    strategy: Strategy,
    hardware: HardwareSpec,
    job: TrainingJob,
    trainable: float,
    frozen: float,
    ranks: int,
    stride: int,
) -> tuple[float, float]:
    """Seconds of a part of the parameters that `ranks` share, for each micro-batch and once in a step."""
    width = job.compute_bytes
    reduced_width = 4 if strategy.sp > 1 else width
    zero = strategy.zero
    if ranks == 1:
        return 0.0, 0.0
    if strategy.engine == "fsdp2" or strategy.zero_stage == 3:
        shard = max(1, ranks // strategy.dp_replicate) if strategy.engine == "fsdp2" else ranks
        bandwidth = group_bytes_per_s(hardware, ranks=shard, stride=stride)
        again = hardware.link_bytes_per_s if zero.hpz_partition_size > 1 else bandwidth
        gathered = others(shard) * (trainable + frozen) * (1 if zero.quantized_weights else width)
        reduced = others(shard) * trainable * (0.5 if zero.quantized_gradients else reduced_width)
        each = gathered / bandwidth + gathered / again + reduced / bandwidth
        if strategy.engine == "fsdp2" and strategy.dp_replicate > 1:
            replicated = 2 * others(strategy.dp_replicate) * trainable / shard * width
            each += replicated / group_bytes_per_s(hardware, ranks=strategy.dp_replicate, stride=shard)
        return each, 0.0
    one_way = others(ranks) * trainable / group_bytes_per_s(hardware, ranks=ranks, stride=stride)
    reduction = one_way * reduced_width
    # Without ZeRO an all-reduce passes gradients both ways; its stages gather the updated weights instead.
    back = one_way * width if strategy.zero_stage else reduction
    return (reduction, back) if strategy.zero_stage == 2 else (0.0, reduction + back)
