"""Bytes of weights, gradients and optimizer states on one rank, for every engine and stage.

The DeepSpeed rows were measured on DeepSpeed 0.19.8 at 2 and 4 ranks and follow
`runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`, `runtime/bf16_optimizer.py` and `runtime/fp16/*.py`.
With T trainable elements, N sharding ranks and 8-byte Adam states they read, without accumulation and in bytes of T:

| case | at rest | during backward | in the step |
|---|---|---|---|
| DDP, autocast | 16 (4 of them reduction buckets) | 20 | 20 |
| stage 0, 16 bit | 14 | 16 | 20 |
| stage 1, 16 bit | 2 + 12/N | 4 + 12/N | 2 + 20/N |
| stage 2, 16 bit | 2 + 12/N | 2 + 14/N | 2 + 20/N |
| stage 3, 16 bit | 16/N | 16/N | 22/N |
| stages 1 and 2, fp32 | 4 + 12/N | 8 + 12/N and 4 + 16/N | 4 + 20/N |
| stage 3, fp32 | 20/N | 20/N | 24/N |
| FSDP2 | 12/N | 16/N | 16/N |
"""

from __future__ import annotations

from ..specs.job import OPTIMIZERS, TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from .moments import PHASES, Moment, Terms, at_moments
from .partitions import whole_tensors_of_partitions
from .rank_parameters import RankParameters, growing_gradients

_REDUCED_AT_ONCE = 500_000_000
"""Elements of gradients that a pipeline flattens into one copy to reduce them (`MEMORY_OPT_ALLREDUCE_SIZE`)."""


def optimizer_state_bytes(strategy: Strategy, model: ModelSpec, job: TrainingJob, trainable: int) -> int:
    """Return the bytes of optimizer states for all trainable elements, before sharding.

    ZeRO hands the optimizer flat partitions, which Adafactor cannot factor (transformers/optimization.py). On whole
    parameters the Trainer keeps 32-bit states for embeddings beside 8-bit ones (transformers/trainer.py:1286).
    """
    optimizer = OPTIMIZERS[job.optimizer]
    flat = bool(strategy.zero_stage)
    if optimizer.factored:
        return 4 * trainable if flat or job.method != "full" else _factored_bytes(model)
    states = optimizer.state_bytes_per_parameter * trainable
    if optimizer.eight_bit and not flat and job.method == "full":
        embeddings = sum(p.total for p in model.parameters if p.kind == "embedding")
        moments = round(optimizer.state_bytes_per_parameter)
        states += embeddings * (4 * moments - optimizer.state_bytes_per_parameter)
    return round(states)


def _factored_bytes(model: ModelSpec) -> int:
    """fp32 rows and columns of each matrix, and whole vectors."""
    return sum(
        4 * p.count * (p.numel // p.shape[-1] + p.numel // p.shape[-2] if len(p.shape) > 1 else p.numel)
        for p in model.parameters
    )


def model_state_terms(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters
) -> dict[Moment, Terms]:
    """Return the named bytes of model states on one accelerator at each moment."""
    states = optimizer_state_bytes(strategy, model, job, parameters.trainable)
    if strategy.engine in ("single", "ddp"):
        return _replicated(strategy, job, parameters, states)
    if strategy.engine == "fsdp2":
        return _fsdp2(strategy, model, job, parameters, states)
    if strategy.zero_stage == 0 and strategy.pp > 1:
        return _pipeline_stage0(strategy, job, parameters, states, _foreach_transient(job, parameters.trainable))
    if strategy.zero_stage == 0:
        return _stage0(job, parameters, states)
    if strategy.zero_stage == 3:
        return _stage3(strategy, model, job, parameters, states)
    shard = parameters.shard(strategy)
    whole = (shard, shard)
    if job.method == "full":
        by_rank = whole_tensors_of_partitions(model, strategy.shard_size, strategy.ep)
        whole = (max(shard, *by_rank), max(shard, by_rank[-1]))
    return _stage1_and_2(strategy, job, parameters, states, whole)


def _replicated(strategy: Strategy, job: TrainingJob, parameters: RankParameters, states: int) -> dict[Moment, Terms]:
    """fp32 weights under autocast; DDP keeps gradients and, apart from them, its reduction buckets.

    `gradient_as_bucket_view` is False in Accelerate 1.15 (utils/dataclasses.py), so both exist.
    """
    trainable = parameters.trainable
    rest = {"weights": 4 * trainable + parameters.frozen_bytes, "optimizer_states": states}
    if strategy.engine == "ddp":
        rest["gradient_buckets"] = 4 * trainable
    step = {"gradients": 4 * trainable, "optimizer_transient": _foreach_transient(job, trainable)}
    return at_moments(rest, **growing_gradients(strategy, parameters, 4 * trainable), step=step)


def _stage0(job: TrainingJob, parameters: RankParameters, states: int) -> dict[Moment, Terms]:
    trainable, width = parameters.trainable, job.compute_bytes
    rest = {"weights": width * trainable + parameters.frozen_bytes, "optimizer_states": states}
    gradients = {"gradients": width * trainable}
    step = gradients | {"optimizer_transient": _foreach_transient(job, trainable)}
    if width == 2:
        rest["master_weights"] = 4 * trainable
        step["fp32_gradients"] = 4 * trainable
    return at_moments(rest, loss=gradients, backward=gradients, step=step)


def _stage1_and_2(
    strategy: Strategy, job: TrainingJob, parameters: RankParameters, states: int, whole_tensors: tuple[int, int]
) -> dict[Moment, Terms]:
    """`whole_tensors` counts those that lie in the fullest and in the last rank's partition, in part or entirely.

    Stage 2 allocates their gradients at once when the first arrives (stage_1_and_2.py:2192). The step first takes the
    norm of each in fp64 (stage_1_and_2.py:2684), then flattens them; the flat copy becomes the fp32 one or still lives
    while that is made.
    """
    trainable, width = parameters.trainable, job.compute_bytes
    whole, last = whole_tensors
    shard = parameters.shard(strategy)
    fp32_accumulation = strategy.zero.gradient_accumulation_fp32 and width == 2
    rest = {"weights": width * trainable + parameters.frozen_bytes}
    full = width * trainable
    if strategy.offload_optimizer != "none":
        # One buffer of the largest tensor lives from initialisation on (stage_1_and_2.py:659).
        rest["offload_staging"] = width * parameters.largest_trainable
        if fp32_accumulation:
            rest["gradients"] = 4 * shard
        if strategy.zero_stage == 1 and strategy.gradient_accumulation_steps > 1:
            # They have left for the host when the step begins.
            return at_moments(rest, **growing_gradients(strategy, parameters, full))
        return at_moments(rest)
    rest |= {"master_weights": 4 * shard, "optimizer_states": parameters.state_shard(states, strategy)}
    group = parameters.largest_group_shard(strategy)
    foreach = {"optimizer_transient": _foreach_transient(job, group)}
    if fp32_accumulation and strategy.zero_stage == 1:
        rest["gradients"] = 4 * trainable
        return at_moments(rest, backward={"gradients": full}, step=foreach)
    if fp32_accumulation:
        # The partition's buffer is flat already.
        gradients = {"gradients": 4 * shard}
        return at_moments(rest, **_partition_gradients(strategy, 4 * shard, 0), step=gradients | foreach)
    flattening = {"fp32_gradients": 4 * group, "gradients": width * whole}
    if width == 2:
        flattening["flat_gradients"] = 2 * group
    norm = {"gradients": width * whole, "norm_copy": 8 * min(parameters.largest_trainable, shard)}
    update = {"fp32_gradients": 4 * group} | foreach
    step = max(flattening, update, norm, key=lambda terms: sum(terms.values()))
    if strategy.zero_stage == 1:
        return at_moments(
            rest, **_whole_and_partition_gradients(strategy, parameters, full, whole_tensors, width), step=step
        )
    return at_moments(rest, **_partition_gradients(strategy, width * whole, width * last), step=step)


def _whole_and_partition_gradients(
    strategy: Strategy, parameters: RankParameters, full: int, whole_tensors: tuple[int, int], width: int
) -> dict[str, Terms]:
    """Stage 1 keeps whole gradients and copies those of its partition into a buffer as they are reduced.

    The buffer is allocated at once, when the first gradient of the partition is reduced; the last rank's come first. A
    gradient that has been copied is freed.
    """
    whole, last = whole_tensors
    found = growing_gradients(strategy, parameters, full)
    if strategy.pp > 1:
        # A pipeline reduces after all backward passes, which `embedding_backward` stands for.
        reduced = full + width * whole - found.get("backward", {}).get("gradients", 0)
        return found | {"embedding_backward": {"gradients": reduced}}
    if strategy.gradient_accumulation_steps > 1 and strategy.shard_size == strategy.ep:
        # A single partition (of the experts, where there are more) takes gradients over and frees them as they come:
        # those of the head, before the layers' turn.
        tail = width * parameters.trainable_tail
        return found | {"backward": {"gradients": full + width * whole - tail}, "after_head": {"gradients": tail}}
    if strategy.gradient_accumulation_steps > 1:
        return found | {"backward": {"gradients": full + width * whole}}
    for moment in ("after_head", "last_layer_backward", "after_last_layer"):
        found[moment] = {"gradients": max(found[moment]["gradients"], width * last)}
    return found


def _partition_gradients(strategy: Strategy, whole_bytes: int, last_bytes: int) -> dict[str, Terms]:
    """Gradients of a stage-2 partition, from its first reduction on, which follows the head's backward.

    While micro-batches accumulate, a rank holds their sum beside the buffer of the current one, which it allocates when
    the first gradient of its partition arrives; the last rank's come first.
    """
    gradients = {"gradients": whole_bytes}
    if strategy.gradient_accumulation_steps > 1:
        early = {"gradients": max(0, 2 * last_bytes - whole_bytes)}
        late = {"gradients": whole_bytes if last_bytes else 0}
        return {
            "loss": gradients,
            "backward": gradients,
            **dict.fromkeys(("after_head", "last_layer_backward", "after_last_layer"), early),
            **dict.fromkeys(("first_layer_backward", "after_first_layer", "embedding_backward"), late),
        }
    reduced = {moment: gradients for moment, phase in PHASES.items() if phase == "backward"}
    return {moment: terms for moment, terms in reduced.items() if moment != "head_backward"}


def _stage3(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters, states: int
) -> dict[Moment, Terms]:
    trainable, width = parameters.trainable, job.compute_bytes
    shard = parameters.shard(strategy)
    weights = width * shard + parameters.frozen_shard_bytes(strategy)
    rest = {"weights": weights if strategy.offload_param == "none" else parameters.scale_bytes}
    if strategy.zero.hpz_partition_size > 1:
        secondary = (width * trainable + parameters.frozen_bytes) // strategy.zero.hpz_partition_size
        rest["secondary_weights"] = secondary
    init = _loaded_unit(model, job)
    if strategy.offload_optimizer != "none":
        return at_moments(rest, init=init)
    sub_group = min(shard, strategy.zero.sub_group_size)
    accumulation = 4 if strategy.zero.gradient_accumulation_fp32 else width
    rest |= {
        "master_weights": 4 * shard,
        "gradients": accumulation * shard,
        "optimizer_states": parameters.state_shard(states, strategy),
    }
    transient = _foreach_transient(job, sub_group)
    if width == 2 and not strategy.zero.gradient_accumulation_fp32:
        # The flattened 16-bit gradients of a sub-group still live while their fp32 copy is made.
        transient = max(transient, width * sub_group)
    step = {"fp32_gradients": 4 * sub_group, "optimizer_transient": transient}
    return at_moments(rest, init=init, step=step)


def _fsdp2(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters, states: int
) -> dict[Moment, Terms]:
    """fp32 shards: Accelerate upcasts trainable parameters under mixed precision (utils/fsdp_utils.py:813)."""
    ranks = strategy.shard_size
    shard = -(-parameters.trainable // ranks)
    init = _loaded_unit(model, job)
    if strategy.offload_param != "none":
        return at_moments({"weights": parameters.scale_bytes}, init=init)
    rest = {
        "weights": 4 * shard + parameters.frozen_shard_bytes(strategy),
        "optimizer_states": -(-states // ranks),
    }
    step = {"gradients": 4 * shard, "optimizer_transient": _foreach_transient(job, shard)}
    return at_moments(rest, init=init, **growing_gradients(strategy, parameters, 4 * shard), step=step)


def _loaded_unit(model: ModelSpec, job: TrainingJob) -> Terms:
    """Return what a rank holds whole while 4-bit weights come from host memory: at most an embedding, or a layer.

    FSDP2 moves a unit at a time, ZeRO-3 a parameter (`plugins/bitsandbytes/sharded_loading.py`).
    """
    if job.method != "qlora":
        return {}
    return {"weights": job.compute_bytes * max(model.embedding_parameters, model.layer_parameter_count)}


def _foreach_transient(job: TrainingJob, elements: int) -> int:
    optimizer = OPTIMIZERS[job.optimizer]
    if optimizer.factored:
        return 8 * elements
    return 4 * elements if optimizer.step_transient == "foreach" else 0


def _pipeline_stage0(
    strategy: Strategy, job: TrainingJob, parameters: RankParameters, states: int, transient: int
) -> dict[Moment, Terms]:
    """Return the named bytes of a pipeline stage without ZeRO, as DeepSpeed 0.19.8 keeps them on 2 and 4 ranks.

    In 16 bit the engine takes `BF16_Optimizer` (`runtime/engine.py:2320`), which divides master weights and optimizer
    states over the data-parallel ranks as ZeRO-1 does and adds each micro-batch's gradients to flat ones of their own.
    The reduction after the last backward pass makes a copy.

    Args:
        strategy: The layout.
        job: What is trained.
        parameters: What the stage holds.
        states: Bytes of optimizer states for all of it.
        transient: Bytes that the optimizer's update needs besides, for all of it.
    """
    width, trainable = job.compute_bytes, parameters.trainable
    full, copy = width * trainable, width * min(trainable, _REDUCED_AT_ONCE)
    found = growing_gradients(strategy, parameters, full)
    whole = full - found.get("backward", {}).get("gradients", 0)
    found["embedding_backward"] = {"gradients": whole, "reduce_copy": copy}
    rest = {"weights": full + parameters.frozen_bytes}
    if width == 4:
        rest["optimizer_states"] = states
        # The norm over all stages squares one gradient at a time.
        step = {"gradients": full, "optimizer_transient": max(transient, 4 * parameters.largest_trainable)}
        return at_moments(rest, **found, step=step)
    shard = parameters.shard(strategy)
    rest |= {
        "master_weights": 4 * shard,
        "optimizer_states": parameters.state_shard(states, strategy),
        "flat_gradients": full,
    }
    step = {
        "gradients": full,
        "fp32_gradients": 4 * shard,
        "optimizer_transient": transient * shard // max(1, trainable),
    }
    return at_moments(rest, **found, step=step)
