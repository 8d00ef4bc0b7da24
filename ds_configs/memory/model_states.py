"""Bytes of model states at each moment of a step: weights, gradients, optimizer states, temporaries of the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec, ParameterShape
from ..specs.optimizers import (
    LOW_RANK,
    OPTIMIZERS,
    QUANTIZED_BLOCK,
    OptimizerSpec,
    added_state_bytes,
    parsed_optim_args,
)
from ..specs.terms import Term
from .rank_parameters import PHASES, Moment, RankParameters, Terms, at_moments, growing_gradients, trained_parameters

TERMS = (
    Term(
        "weights",
        "parameters in the dtype that the engine keeps: 4 B under autocast and FSDP2, 2 B in 16-bit DeepSpeed, "
        "sharded over the ranks in stage 3 and FSDP2; frozen weights in compute precision or 4 bit",
        role="weights",
    ),
    Term(
        "secondary_weights",
        "ZeRO++ hpZ keeps a second shard within the node: 16-bit weights / hpz_partition_size",
        role="weights",
    ),
    Term(
        "master_weights",
        "fp32 copy that the DeepSpeed optimizer updates: 4 B per trainable element / ranks",
        role="optimizer",
    ),
    Term("gradients", "gradients in that phase, complete or sharded over the ranks", role="gradients"),
    Term(
        "fp32_gradients",
        "fp32 copy of 16-bit gradients during the step; in stage 3 one sub-group at a time",
        role="optimizer",
    ),
    Term(
        "gradient_buckets", "DDP's reduction buckets, as large as all gradients and in addition to them", role="buckets"
    ),
    Term(
        "optimizer_states",
        "Adam: 8 B per trainable element (fp32 moments), sharded over the ranks from stage 1 on",
        role="optimizer",
    ),
    Term(
        "flat_gradients",
        "stages 1 and 2 flatten their partition's 16-bit gradients while the originals exist; a 16-bit pipeline "
        "without ZeRO adds every micro-batch's gradients to persistent flat ones",
        role="optimizer",
    ),
    Term(
        "norm_copy",
        "stages 1 and 2 compute the norm of each gradient in fp64: 8 B of the largest tensor in a partition",
        role="optimizer",
    ),
    Term(
        "optimizer_transient",
        "temporaries of the step: foreach kernels hold one fp32 copy; in stage 3 the flattened 16-bit gradients of a "
        "sub-group",
        role="optimizer",
    ),
    Term(
        "offload_staging",
        "buffer of the largest tensor, through which gradients are copied to the host",
        role="buckets",
    ),
)


@lru_cache(maxsize=64)
def whole_tensors_of_partitions(model: ModelSpec, ranks: int, ep: int = 1) -> tuple[int, ...]:
    """Return, per rank, the elements of all matrices that overlap its ZeRO partition.

    DeepSpeed flattens matrices in the order of the model and splits the result into equal partitions
    (`runtime/zero/stage_1_and_2.py`). Vectors, which the Trainer exempts from weight decay, are flattened separately
    and not counted. With expert parallelism, experts form a separate group, split over the `ranks / ep` ranks that
    hold the same experts; neighbours among these have different partitions of the other parameters.
    """
    matrices = [parameter for parameter in model.parameters if len(parameter.shape) > 1]
    if ep == 1:
        return _overlapping(matrices, model.dimensions.num_layers, ranks)
    dense = _overlapping([p for p in matrices if p.kind != "experts"], model.dimensions.num_layers, ranks)
    experts = _overlapping(
        [p for p in matrices if p.kind == "experts"], model.dimensions.num_layers, max(1, ranks // ep)
    )
    return tuple(count + experts[min(rank // ep, len(experts) - 1)] for rank, count in enumerate(dense))


def _sizes_in_order(tensors: Sequence[ParameterShape], layers: int) -> list[int]:
    """Return the elements of each tensor, layer by layer."""
    first = next((index for index, tensor in enumerate(tensors) if tensor.in_layer), len(tensors))
    inside = [(tensor.numel, tensor.count) for tensor in tensors if tensor.in_layer]
    sizes = [tensor.numel for tensor in tensors[:first]]
    for index in range(layers):
        sizes += [numel for numel, count in inside if index < count]
    return sizes + [tensor.numel for tensor in tensors[first:] if not tensor.in_layer for _ in range(tensor.count)]


def _overlapping(matrices: Sequence[ParameterShape], layers: int, ranks: int) -> tuple[int, ...]:
    sizes = _sizes_in_order(matrices, layers)
    partition = max(1, -(-sum(sizes) // ranks))
    counts, start = [0] * ranks, 0
    for size in sizes:
        end = start + size
        for rank in range(start // partition, -(-end // partition)):
            counts[rank] += size
        start = end
    return tuple(counts)


@lru_cache(maxsize=256)
def _fullest_sub_group(model: ModelSpec, ranks: int, sub_group_size: int) -> int:
    """Return the elements of the fullest sub-group of matrices on a rank of ZeRO-3.

    A sub-group ends with the tensor that brings it to `sub_group_size` (stage3.py:1210, `_create_fp16_sub_groups`).
    """
    matrices = [parameter for parameter in model.parameters if len(parameter.shape) > 1]
    fullest = held = 0
    for size in _sizes_in_order(matrices, model.dimensions.num_layers):
        held += -(-size // ranks)
        fullest = max(fullest, held)
        if held >= sub_group_size:
            held = 0
    return fullest


_REDUCED_AT_ONCE = 500_000_000
"""Gradient elements that a pipeline flattens into one copy per reduction (`MEMORY_OPT_ALLREDUCE_SIZE`)."""


def optimizer_state_bytes(layout: Layout, model: ModelSpec, job: TrainingJob, trainable: int) -> int:
    """Return the bytes of optimizer states for all trainable elements, before sharding.

    ZeRO gives the optimizer flat partitions, which Adafactor cannot factor (transformers/optimization.py), and which
    torchao only quantizes if they have no incomplete block (torchao/optim/adam.py, `_new_buffer`). Without ZeRO, the
    Trainer keeps 32-bit states for embeddings under 8-bit optimizers (transformers/trainer.py:1286). FSDP2 shards rows
    of factors; every rank keeps all columns.
    """
    model, optimizer = model.trained_part, OPTIMIZERS[job.optimizer]
    flat = bool(layout.zero_stage)
    # States have the type of the tensors that the optimizer steps, which ZeRO keeps in fp32.
    scale = 1.0 if flat or optimizer.fp32_states else job.trained_weight_bytes / 4
    per_element = scale * (optimizer.state_bytes_per_parameter + added_state_bytes(job.optimizer, job.optim_args))
    if optimizer.factored:
        if flat or job.method != "full":
            return 4 * trainable
        copies = layout.shard_size if layout.engine == "fsdp2" else 1
        return sum(4 * p.count * _factor_elements(p.shape, copies) for p in model.parameters)
    if optimizer.low_rank:
        return round(scale * sum(p.count * _low_rank_bytes(p, optimizer, job) for p in model.parameters))
    if optimizer.package == "torchao" and flat:
        # Elements of matrices in a partition, with the padding of stages 1 and 2 (`nccl_start_alignment_factor` 2).
        matrices, ranks = [p for p in model.parameters if len(p.shape) > 1], layout.shard_size
        partition = 2 * -(-sum(p.total for p in matrices) // (2 * ranks))
        if layout.zero_stage == 3:
            partition = sum(-(-p.numel // ranks) * p.count for p in matrices)
        per_element = 8 if partition % QUANTIZED_BLOCK else per_element
    if optimizer.compensated and job.trained_weight_bytes == 2:
        per_element += 2
    states = per_element * trainable
    if optimizer.matrix_states and job.method == "full":
        states -= per_element / 2 * muon_elements(model)
    if optimizer.eight_bit and not flat and job.method == "full":
        embeddings = sum(p.total for p in model.parameters if p.kind == "embedding")
        moments = round(optimizer.state_bytes_per_parameter)
        states += embeddings * (4 * moments - optimizer.state_bytes_per_parameter)
    return round(states)


def is_stepped_by_muon(parameter: ParameterShape) -> bool:
    """Return whether Muon steps a parameter: a matrix that is neither an embedding nor the head."""
    return parameter.in_layer and len(parameter.shape) == 2 and parameter.kind != "embedding"


def muon_elements(model: ModelSpec) -> int:
    """Return the elements of the matrices that Muon steps."""
    return sum(parameter.total for parameter in model.parameters if is_stepped_by_muon(parameter))


def _factor_elements(shape: tuple[int, ...], copies: int) -> int:
    """Return the elements of fp32 rows and columns of a matrix, and of complete vectors."""
    numel = prod(shape)
    return numel // shape[-1] + copies * (numel // shape[-2]) if len(shape) > 1 else numel


def _low_rank_bytes(parameter: ParameterShape, optimizer: OptimizerSpec, job: TrainingJob) -> int:
    """Return the fp32 states of one tensor: its moments, for linear layers in `rank` columns, and their projection.

    GaLore and APOLLO project the smaller side (galore_torch/galore_projector.py, `std`).
    """
    shape = parameter.shape
    projected = len(shape) == 2 and parameter.kind == "linear"
    small, large = min(shape), max(shape)
    rank = min(small, int(parsed_optim_args(job.optim_args).get("rank", LOW_RANK)))
    moments = (large, rank) if projected else shape
    # GaLore keeps a view of the complete singular vectors, unless it converts the view to 16 bit.
    is_view = optimizer.package == "galore-torch" and job.trained_weight_bytes == 4
    elements = (small if is_view else rank) * small if projected else 0
    if optimizer.low_rank == "factored":
        return 4 * (elements + _factor_elements(moments, 1))
    return 4 * (elements + 2 * prod(moments))


def model_state_terms(
    layout: Layout, model: ModelSpec, job: TrainingJob, parameters: RankParameters
) -> dict[Moment, Terms]:
    """Return the named bytes of model states on one accelerator at each moment, without offload (`host.py`)."""
    model = model.trained_part
    states = optimizer_state_bytes(layout, model, job, parameters.trainable)
    optimizer, width = OPTIMIZERS[job.optimizer], job.trained_weight_bytes
    if layout.engine in ("single", "ddp"):
        # Autocast computes from fp32 weights. DDP keeps gradients and reduction buckets, because
        # `gradient_as_bucket_view` is False in Accelerate 1.15 (utils/dataclasses.py).
        trainable, frozen_bytes = parameters.trainable, parameters.frozen_bytes
        if job.method == "full":
            # Loaded as the trained weights are; FSDP2 keeps frozen ones as they are stored, in 16 bit.
            frozen_bytes = frozen_bytes * width // job.compute_bytes
        rest = {"weights": width * trainable + frozen_bytes, "optimizer_states": states}
        transient = _step_transient(job, parameters, trainable, ranks=1)
        # It is added to the gradient of the tied head, or to that of earlier micro-batches.
        tied, accumulates = model.tied_embeddings, layout.gradient_accumulation_steps > 1
        adds = job.method == "full" and (tied or accumulates)
        added: Terms = {"module_gradients": width * model.embedding_parameters} if adds else {}
        if optimizer.layerwise:
            # Autograd computes a gradient before it releases the previous one. The embedding's gradient is the last.
            largest = {"gradients": width * parameters.largest_trainable}
            moments = [moment for moment, phase in PHASES.items() if phase == "backward"]
            updating = dict.fromkeys(moments, largest | {"optimizer_transient": transient})
            return at_moments(rest, **updating | {"embedding_backward": largest | added})
        if layout.engine == "ddp":
            rest["gradient_buckets"] = width * trainable
        step = {"gradients": width * trainable, "optimizer_transient": transient}
        growing = growing_gradients(layout, parameters, width * trainable)
        growing["embedding_backward"] = growing.get("embedding_backward", {}) | added
        if tied and accumulates:
            # That of the head waits for it, beside the sum of earlier micro-batches.
            growing["backward"] |= added
        return at_moments(rest, **growing, step=step)
    if layout.engine == "fsdp2":
        # fp32 shards: Accelerate upcasts trainable parameters under mixed precision (utils/fsdp_utils.py:813).
        ranks = layout.shard_size
        shard = -(-parameters.trainable // ranks)
        weights = width * shard + parameters.frozen_shard_bytes(layout)
        rest = {"weights": weights, "optimizer_states": -(-states // ranks)}
        step = {"gradients": width * shard, "optimizer_transient": _step_transient(job, parameters, shard, ranks=ranks)}
        # Tied weights are in the unit of the whole model, which is reduced last.
        parameters = replace(parameters, trainable_tail=0) if model.tied_embeddings else parameters
        return at_moments(
            rest, init=loaded_unit(model, job), **growing_gradients(layout, parameters, width * shard), step=step
        )
    if layout.zero_stage == 0 and layout.pp > 1:
        return _pipeline_stage0(layout, job, parameters, states, _step_transient(job, parameters, parameters.trainable))
    if layout.zero_stage == 0:
        trainable, width = parameters.trainable, job.compute_bytes
        rest = {"weights": width * trainable + parameters.frozen_bytes, "optimizer_states": states}
        gradients = {"gradients": width * trainable}
        step = gradients | {"optimizer_transient": _step_transient(job, parameters, trainable)}
        if width == 2:
            rest["master_weights"] = 4 * trainable
            step["fp32_gradients"] = 4 * trainable
        return at_moments(rest, loss=gradients, backward=gradients, step=step)
    if layout.zero_stage == 3:
        return _stage3(layout, model, job, parameters, states)
    return _stage1_and_2(layout, model, job, parameters, states)


def _stage1_and_2(
    layout: Layout, model: ModelSpec, job: TrainingJob, parameters: RankParameters, states: int
) -> dict[Moment, Terms]:
    """States of ZeRO-1 and ZeRO-2.

    Stage 2 allocates the gradients of all tensors that overlap the partition when the first one arrives
    (stage_1_and_2.py:2192). The step computes the norm of each in fp64 (stage_1_and_2.py:2684), then flattens them. The
    flat copy becomes the fp32 one, or exists while that is made.
    """
    trainable, width = parameters.trainable, job.compute_bytes
    shard = parameters.shard(layout)
    # Elements of the tensors that overlap the fullest partition, and of those that overlap the last one.
    fullest = last = shard
    if job.method == "full" or any(parameter.whole for parameter in model.parameters):
        by_rank = whole_tensors_of_partitions(trained_parameters(model, job), layout.shard_size, layout.ep)
        fullest, last = max(shard, *by_rank), max(shard, by_rank[-1])
    rest = {"weights": width * trainable + parameters.frozen_bytes}
    full = width * trainable
    rest |= {"master_weights": 4 * shard, "optimizer_states": parameters.state_shard(states, layout)}
    group = parameters.largest_group_shard(layout)
    foreach = {"optimizer_transient": _step_transient(job, parameters, group)}
    flattening = {"fp32_gradients": 4 * group, "gradients": width * fullest}
    if width == 2:
        flattening["flat_gradients"] = 2 * group
    if OPTIMIZERS[job.optimizer].matrix_states:
        # Momentum of the matrices that overlap the partition, a copy that the step fills (stage_1_and_2.py:2831, 3000),
        # and their updates, in the type of the gradients. Muon's matrices and the others are a group each.
        kinds = (
            [p for p in model.parameters if len(p.shape) > 1 and is_stepped_by_muon(p) is by_muon]
            for by_muon in (True, False)
        )
        matrices, others = (max(_overlapping(k, model.dimensions.num_layers, layout.shard_size)) for k in kinds)
        adamw = 8 * -(-(trainable - muon_elements(model)) // layout.shard_size)
        rest["optimizer_states"] = adamw + 2 * width * matrices
        flattening["gradients"] = width * (2 * matrices + others)
    norm = {"gradients": width * fullest, "norm_copy": 8 * min(parameters.largest_trainable, shard)}
    update = {"fp32_gradients": 4 * group} | foreach
    step = max(flattening, update, norm, key=lambda terms: sum(terms.values()))
    if layout.zero_stage == 1:
        growing = _stage1_gradients(layout, parameters, full, width * fullest, width * last)
    else:
        growing = _partition_gradients(layout, parameters, width * fullest, width * last)
    return at_moments(rest, **growing, step=step)


def reduces_once(layout: Layout, parameters: RankParameters) -> bool:
    """Return whether a bucket holds all gradients, as views (stage_1_and_2.py:1459), and is reduced after the last."""
    in_hooks = layout.zero_stage == 2 or layout.zero.overlap_comm
    return in_hooks and layout.pp == 1 and parameters.trainable <= layout.zero.reduce_bucket_size


def _stage1_gradients(
    layout: Layout, parameters: RankParameters, full: int, whole_bytes: int, last_bytes: int
) -> dict[str, Terms]:
    """Stage 1 keeps complete gradients and copies those of its partition into a buffer as they are reduced.

    The buffer is allocated when the first gradient of the partition is reduced; those of the last rank come first. A
    copied gradient is freed.
    """
    gradients = growing_gradients(layout, parameters, full)
    if layout.pp > 1:
        # A pipeline reduces after all backward passes; `embedding_backward` is the last of these moments.
        reduced = full + whole_bytes - gradients.get("backward", {}).get("gradients", 0)
        return gradients | {"embedding_backward": {"gradients": reduced}}
    if layout.gradient_accumulation_steps > 1 and layout.shard_size == layout.ep:
        # With a single partition (of the experts, if there are more), gradients are freed as they are reduced, those of
        # the head before the layers' backward passes.
        tail = parameters.trainable_tail * full // max(1, parameters.trainable)
        return gradients | {"backward": {"gradients": full + whole_bytes - tail}, "after_head": {"gradients": tail}}
    if layout.gradient_accumulation_steps > 1:
        return gradients | {"backward": {"gradients": full + (0 if reduces_once(layout, parameters) else whole_bytes)}}
    if reduces_once(layout, parameters):
        return {}
    for moment in ("after_head", "last_layer_backward", "after_last_layer"):
        gradients[moment] = {"gradients": max(gradients[moment]["gradients"], last_bytes)}
    return gradients


def _partition_gradients(
    layout: Layout, parameters: RankParameters, whole_bytes: int, last_bytes: int
) -> dict[str, Terms]:
    """Gradients of a stage-2 partition from its first reduction on, which follows the head's backward pass.

    During accumulation a rank holds the sum and the buffer of the current micro-batch. That buffer is allocated when
    the first gradient of the partition arrives; those of the last rank come first.
    """
    gradients = {"gradients": whole_bytes}
    if reduces_once(layout, parameters):
        if layout.gradient_accumulation_steps > 1:
            return {"loss": gradients, "backward": gradients}
        # The buffer is allocated after the copy of the reduction is freed.
        return {}
    if layout.gradient_accumulation_steps > 1:
        early = {"gradients": max(0, 2 * last_bytes - whole_bytes)}
        return {
            "loss": gradients,
            "backward": gradients,
            **dict.fromkeys(("after_head", "last_layer_backward", "after_last_layer"), early),
            **dict.fromkeys(
                ("first_large_layer_backward", "first_layer_backward", "after_first_layer", "embedding_backward"),
                gradients,
            ),
        }
    reduced = {moment: gradients for moment, phase in PHASES.items() if phase == "backward"}
    return {moment: terms for moment, terms in reduced.items() if moment != "head_backward"}


def _stage3(
    layout: Layout, model: ModelSpec, job: TrainingJob, parameters: RankParameters, states: int
) -> dict[Moment, Terms]:
    width, shard, rest = job.compute_bytes, parameters.shard(layout), zero3_weights(layout, job, parameters)
    sub_group = min(shard, layout.zero.sub_group_size)
    if sub_group < shard and job.method == "full" and layout.ep == 1:
        sub_group = min(shard, _fullest_sub_group(model, layout.shard_size, layout.zero.sub_group_size))
    rest |= {
        "master_weights": 4 * shard,
        "gradients": width * shard,
        "optimizer_states": parameters.state_shard(states, layout),
    }
    if OPTIMIZERS[job.optimizer].matrix_states:
        # The momentum of a bucket's matrices, local and gathered, which stays allocated (stage3.py:1697).
        bucket = min(layout.zero.reduce_bucket_size, muon_elements(model))
        rest["optimizer_states"] += width * (bucket + -(-bucket // layout.shard_size))
    transient = _step_transient(job, parameters, sub_group)
    if width == 2:
        # The flattened 16-bit gradients of a sub-group exist while their fp32 copy is made.
        transient = max(transient, width * sub_group)
    step = {"fp32_gradients": 4 * sub_group, "optimizer_transient": transient}
    return at_moments(rest, init=loaded_unit(model, job), step=step)


def zero3_weights(layout: Layout, job: TrainingJob, parameters: RankParameters) -> Terms:
    """Return the bytes of ZeRO-3's shard of the weights, and of the second one inside a node (ZeRO++ hpZ)."""
    width, partition = job.compute_bytes, layout.zero.hpz_partition_size
    weights = {"weights": width * parameters.shard(layout) + parameters.frozen_shard_bytes(layout)}
    if partition > 1:
        weights["secondary_weights"] = (width * parameters.trainable + parameters.frozen_bytes) // partition
    return weights


def loaded_unit(model: ModelSpec, job: TrainingJob) -> Terms:
    """Return the largest unit that a rank holds while it copies 4-bit weights from host memory.

    FSDP2 copies a unit at a time, ZeRO-3 a parameter (`plugins/bitsandbytes.py`).
    """
    if job.method != "qlora":
        return {}
    return {"weights": job.compute_bytes * max(model.embedding_parameters, model.layer_parameter_count)}


def _step_transient(job: TrainingJob, parameters: RankParameters, elements: int, *, ranks: int = 0) -> int:
    """Return the bytes of temporaries of a step of `elements`.

    `ranks` share the tensors, whose largest decides if they are stepped one by one; 0: one flat tensor of all elements.
    """
    optimizer = OPTIMIZERS[job.optimizer]
    width = job.trained_weight_bytes if ranks else 4
    if optimizer.matrix_states and not ranks:
        # DeepSpeed orthogonalizes matrices one by one, before it flattens their gradients.
        return 0
    tensor = -(-parameters.largest_trainable // ranks) if ranks else elements
    if optimizer.factored:
        # The squared gradient and the update; 16-bit weights and gradients are also converted.
        return 4 * tensor * (2 if width == 4 else 4)
    matrix = (4 if optimizer.fp32_states else width) * optimizer.matrix_transient * tensor
    return width * optimizer.foreach_temporaries * elements + round(matrix)


def _pipeline_stage0(
    layout: Layout, job: TrainingJob, parameters: RankParameters, states: int, transient: int
) -> dict[Moment, Terms]:
    """Return the named bytes of a pipeline stage without ZeRO, as measured with DeepSpeed 0.19.8 on 2 and 4 ranks.

    In 16 bit the engine uses `BF16_Optimizer` (`runtime/engine.py:2320`). It shards master weights and optimizer states
    over the data-parallel ranks as ZeRO-1 does, and adds the gradients of each micro-batch to separate flat ones. The
    reduction after the last backward pass makes a copy.
    """
    width, trainable = job.compute_bytes, parameters.trainable
    full, copy = width * trainable, width * min(trainable, _REDUCED_AT_ONCE)
    gradients = growing_gradients(layout, parameters, full)
    reduced = full - gradients.get("backward", {}).get("gradients", 0)
    gradients["embedding_backward"] = {"gradients": reduced, "reduce_copy": copy}
    rest = {"weights": full + parameters.frozen_bytes}
    if width == 4:
        rest["optimizer_states"] = states
        # The norm over all stages squares one gradient after the other.
        step = {"gradients": full, "optimizer_transient": max(transient, 4 * parameters.largest_trainable)}
        return at_moments(rest, **gradients, step=step)
    shard = parameters.shard(layout)
    rest |= {
        "master_weights": 4 * shard,
        "optimizer_states": parameters.state_shard(states, layout),
        "flat_gradients": full,
    }
    step = {
        "gradients": full,
        "fp32_gradients": 4 * shard,
        "optimizer_transient": transient * shard // max(1, trainable),
    }
    return at_moments(rest, **gradients, step=step)
