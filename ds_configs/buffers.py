"""Communication buffers and gathered parameters on one accelerator, by phase.

DeepSpeed 0.19.8: `runtime/zero/stage_1_and_2.py:3256` (bucket allocation), `stage3.py:782` (persistent bucket),
`partitioned_param_coordinator.py:453, 653` (prefetch, reuse), `partition_parameters.py:1343` (coalesced gathers).
FSDP2: `accelerate/utils/fsdp_utils.py:857` (units) and `torch/distributed/fsdp/_fully_shard`.
"""

from __future__ import annotations

from .job import TrainingJob
from .model import ModelSpec
from .model_states import Phase, RankParameters, Terms, rank_parameters
from .strategy import Strategy, ZeroOptions


def buffer_terms(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters
) -> dict[Phase, Terms]:
    """Return the named bytes of buffers and gathered parameters in each phase."""
    if strategy.engine == "fsdp2":
        return _fsdp2_units(strategy, model, job, parameters)
    if strategy.zero_stage == 3:
        return _stage3_gathers(strategy, model, job, parameters)
    if strategy.zero_stage in (1, 2):
        return {"init": {}, "loss": {}, "backward": _stage1_and_2_buckets(strategy, job), "step": {}}
    return {"init": {}, "loss": {}, "backward": {}, "step": {}}


def default_zero_options(model: ModelSpec, job: TrainingJob, *, stage: int, lean: bool = False) -> ZeroOptions:
    """Return bucket and threshold sizes for a model; `lean` trades communication overlap for memory.

    Stage 3 follows the sizes that transformers derives from the hidden size h: bucket h², prefetch 0.9·h²,
    persistence 10·h (transformers/integrations/deepspeed.py:229). A bucket never exceeds what there is to reduce.
    Two layers of live parameters overlap gathers with computation; DeepSpeed's default of 10⁹ would fill 2 GB.
    """
    trainable = max(1000, rank_parameters(model, job).trainable)
    hidden = model.dimensions.hidden_size
    if stage < 3:
        bucket = min(20_000_000 if lean else 100_000_000, trainable)
        return ZeroOptions(reduce_bucket_size=bucket + bucket % 2, overlap_comm=not lean)
    square = max(1_000_000, min(hidden * hidden, 200_000_000))
    live = max(50_000_000, min(2 * model.layer_parameter_count, 1_000_000_000))
    return ZeroOptions(
        reduce_bucket_size=min(square, trainable),
        stage3_prefetch_bucket_size=min(int(0.9 * square) // (10 if lean else 1), model.parameter_count),
        stage3_param_persistence_threshold=10 * hidden,
        stage3_max_live_parameters=50_000_000 if lean else live,
        stage3_max_reuse_distance=0 if lean else live,
        sub_group_size=100_000_000 if lean else 1_000_000_000,
    )


def _stage1_and_2_buckets(strategy: Strategy, job: TrainingJob) -> Terms:
    width = job.compute_bytes
    if strategy.zero.gradient_accumulation_fp32 and strategy.offload_optimizer != "none":
        width = 4
    bucket = strategy.zero.reduce_bucket_size * width
    copies = 2 if strategy.zero.overlap_comm else 1
    return {"reduce_buckets": copies * bucket, "reduce_copy": bucket}


def _stage3_gathers(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters
) -> dict[Phase, Terms]:
    """Gathered parameters: the current module, all that prefetch has run ahead to, and persistent ones.

    Every module's turn prefetches at least one more tensor, modules without parameters included, so prefetch runs
    ahead until `stage3_max_live_parameters` are gathered, and oversteps by one tensor. What is reached again within
    `stage3_max_reuse_distance` stays too: twice its distance from the end of the forward pass.
    """
    zero, width = strategy.zero, job.compute_bytes
    total = model.parameter_count
    persistent = min(total, model.persistent_parameters(zero.stage3_param_persistence_threshold))
    gatherable = total - persistent
    current = min(model.largest_gather_unit(), gatherable)
    live = zero.stage3_max_live_parameters + model.largest_parameter if zero.stage3_prefetch_bucket_size else 0
    gathered = min(gatherable, max(current, live, zero.stage3_max_reuse_distance // 2 + current))
    coalesced = min(zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters, gatherable)
    # Frozen 4-bit weights are gathered packed; counting them in compute precision covers the dequantized copy.
    held = {"gathered_parameters": width * gathered, "prefetch_copies": width * coalesced}
    always = {"persistent_parameters": width * persistent, "reduce_bucket": width * zero.reduce_bucket_size}
    unit_gradient = width * (current if job.method == "full" else parameters.largest_trainable)
    backward = always | held | {"reduce_copy": width * zero.reduce_bucket_size, "module_gradients": unit_gradient}
    return {"init": {}, "loss": always | held, "backward": backward, "step": always}


def _fsdp2_units(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters
) -> dict[Phase, Terms]:
    """Unsharded units in compute precision.

    The tail unit (final norm and head; with tied embeddings also the embedding) stays gathered from forward to
    backward. A layer in use holds its parameters, the prefetched next layer and that one's all-gather buffer;
    its backward adds its gradients and their reduce-scatter input.
    """
    width = job.compute_bytes
    layer = width * model.layer_parameter_count
    outside = [p for p in model.parameters if not p.in_layer]
    tail = width * sum(p.total for p in outside if p.group != "embedding" or model.tied_embeddings)
    layer_gradients = 2 * layer if job.method == "full" else 0
    tail_gradients = 2 * tail if job.method == "full" else 0
    if job.method != "full":
        layer_gradients = 2 * width * parameters.trainable // max(1, model.dimensions.num_layers)
    forward = {"gathered_parameters": tail + 3 * layer}
    backward = dict(forward)
    backward["unit_gradients"] = max(tail_gradients - layer, layer_gradients)
    return {"init": {}, "loss": forward, "backward": backward, "step": {}}
