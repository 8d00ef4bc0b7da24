"""Communication buffers and gathered parameters on one accelerator, moment by moment.

DeepSpeed 0.19.8: `runtime/zero/stage_1_and_2.py:3256` (bucket allocation), `stage3.py:782` (persistent bucket),
`partitioned_param_coordinator.py:453, 653` (prefetch, reuse), `partition_parameters.py:1343` (coalesced gathers).
FSDP2: `accelerate/utils/fsdp_utils.py:857` (units) and `torch/distributed/fsdp/_fully_shard`.
"""

from __future__ import annotations

from ..specs.job import TrainingJob
from ..specs.model import ModelSpec, ParameterShape, adapted_experts
from ..specs.strategy import Strategy, ZeroOptions
from .moments import PHASES, Moment, Terms, at_moments
from .rank_parameters import RankParameters, engine_parameters, rank_parameters
from .zero3_gathers import Recomputed, gathered_elements


def buffer_terms(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters
) -> dict[Moment, Terms]:
    """Return the named bytes of buffers and gathered parameters at each moment."""
    if strategy.engine == "fsdp2":
        return _fsdp2_units(strategy, model, job, parameters)
    if strategy.zero_stage == 3:
        return _stage3_gathers(strategy, model, job, parameters)
    if strategy.zero_stage in (1, 2):
        return _stage1_and_2_buckets(strategy, model, job, parameters)
    return at_moments({})


def default_zero_options(
    model: ModelSpec, job: TrainingJob, *, stage: int, lean: bool = False, strategy: Strategy | None = None
) -> ZeroOptions:
    """Return bucket and threshold sizes for a model; `lean` trades communication overlap for memory.

    Stage 3 follows the sizes that transformers derives from the hidden size h: bucket h², prefetch 0.9·h²,
    persistence 10·h (transformers/integrations/deepspeed.py:229). A bucket never exceeds what there is to reduce.
    Two layers of live parameters overlap gathers with computation; DeepSpeed's default of 10⁹ would fill 2 GB.
    A `strategy` says what of the model a rank holds; without one that is everything.
    """
    trainable = max(1000, rank_parameters(model, job, strategy).trainable)
    hidden = model.dimensions.hidden_size
    if stage < 3:
        bucket = min(20_000_000 if lean else 100_000_000, trainable)
        return ZeroOptions(reduce_bucket_size=bucket + bucket % 2, overlap_comm=not lean)
    square = max(1_000_000, min(hidden * hidden, 200_000_000))
    # DeepSpeed counts elements of what is stored, which 4-bit weights share.
    layer = (engine_parameters(model, job) if job.method == "qlora" else model).layer_parameter_count
    live = max(50_000_000, min(2 * layer, 1_000_000_000))
    return ZeroOptions(
        reduce_bucket_size=min(square, trainable),
        stage3_prefetch_bucket_size=min(int(0.9 * square) // (10 if lean else 1), model.parameter_count),
        stage3_param_persistence_threshold=10 * hidden,
        stage3_max_live_parameters=50_000_000 if lean else live,
        stage3_max_reuse_distance=0 if lean else live,
        sub_group_size=100_000_000 if lean else 1_000_000_000,
    )


def _stage1_and_2_buckets(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters
) -> dict[Moment, Terms]:
    """Buckets are allocated when the first gradient arrives and released by the reduction, which copies its bucket.

    Stage 1 reduces only at the end of accumulation, so that its buckets live through the forward passes before. A
    bucket fills somewhere inside a layer's backward. A gradient that exceeds it waits beside it for the next one, the
    head's for that of the final norm; offload clones such a gradient and takes the norm of each in fp64
    (stage_1_and_2.py:1439, 1905). A tied head's gradient waits in autograd for the embedding's.
    """
    width = job.compute_bytes
    if strategy.zero.gradient_accumulation_fp32 and strategy.offload_optimizer != "none":
        width = 4
    size, offload = strategy.zero.reduce_bucket_size, strategy.offload_optimizer != "none"
    shard = parameters.shard(strategy)
    buckets = {"reduce_buckets": (2 if strategy.zero.overlap_comm else 1) * size * width}
    accumulating = strategy.gradient_accumulation_steps > 1
    kept = buckets if strategy.zero_stage == 1 and accumulating else {}
    # Stage 1 counts whole gradients anyway, except where they leave for the host at once.
    counted = strategy.zero_stage == 1 and not (offload and not accumulating)
    if strategy.pp > 1:
        # A pipeline reduces after all backward passes, and allocates another bucket for it (stage_1_and_2.py:958).
        bucket = {"reduce_buckets": size * width}
        return at_moments({}, loss=bucket if accumulating else {}, backward=bucket, embedding_backward=bucket)
    head, layer, embedding = _reduced_units(model, parameters)
    tied = head if model.tied_embeddings else 0

    def reduction(unit: int, waiting: int) -> Terms:
        copied = bucket_copy(unit)
        if unit > size:
            copied = max(width * unit, 8 * min(unit, shard)) if offload else 0
        unreduced = 0 if counted else tied + unit + (waiting if waiting > size else 0)
        return buckets | {"reduce_copy": copied, "module_gradients": width * unreduced}

    def bucket_copy(*units: int) -> int:
        norms = [8 * min(unit, shard) for unit in units if unit <= size] if offload else []
        return max([max(width, _reduction_bytes(strategy, job)) * size, *norms])

    def in_layer(*units: int) -> Terms:
        return buckets | {"reduce_copy": bucket_copy(*units), "module_gradients": 0 if counted else width * tied}

    oversized_head = reduction(head, 0) if head > size and not tied else {}
    return at_moments(
        {},
        loss=kept,
        head_backward={"module_gradients": 0 if counted else width * head},
        after_head=oversized_head,
        last_layer_backward=in_layer(layer, 0 if tied else head),
        after_last_layer=reduction(layer, layer),
        first_layer_backward=in_layer(layer),
        after_first_layer=reduction(layer, layer),
        embedding_backward=reduction(embedding, layer),
    )


def _reduction_bytes(strategy: Strategy, job: TrainingJob) -> int:
    """Bytes of an element on its way through a reduction; with sequence parallelism fp32 (engine.py:2182)."""
    return 4 if strategy.sp > 1 else job.compute_bytes


def _reduced_units(model: ModelSpec, parameters: RankParameters) -> tuple[int, int, int]:
    """Elements of the largest gradient of head, layers and embedding."""
    most = parameters.largest_trainable
    head = model.embedding_parameters if model.tied_embeddings else model.tail_parameters
    return min(head, most), min(model.largest_layer_parameter, most), min(model.embedding_parameters, most)


def _stage3_gathers(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters
) -> dict[Moment, Terms]:
    """Gathered parameters (`zero3_gathers.py`), persistent ones, the gradient bucket and what a reduction copies.

    Between the modules of a layer a coalesced gather holds its flat buffer beside each tensor's copy
    (partition_parameters.py:795), and a full bucket is reduced.

    A gradient that exceeds the bucket is reduced from where it is; the bucket itself is flattened into a copy.
    Frozen 4-bit weights are gathered packed; `plugins/bitsandbytes` sees to it that they are released as others are.
    """
    zero, width = strategy.zero, job.compute_bytes
    seen = engine_parameters(model, job)
    persistent = seen.persistent_parameters(zero.stage3_param_persistence_threshold)
    reduced = _reduction_bytes(strategy, job)
    always = {"persistent_parameters": width * persistent, "reduce_bucket": reduced * zero.reduce_bucket_size}
    held = gathered_elements(seen, zero, recomputed=_recomputed_share(strategy, model))
    kept = _kept_by_views(strategy, model, job, held=held["forward_end"])
    more = {
        moment: {"gathered_parameters": width * (count + (kept if moment in _BEFORE_OTHER_LAYERS else 0))}
        for moment, count in held.items()
    }
    # A tied head's gradient waits in autograd for the embedding's.
    tied = model.embedding_parameters if model.tied_embeddings and job.method == "full" else 0
    in_layer = model.largest_layer_unit + tied
    units: dict[Moment, int] = {
        "head_backward": parameters.trainable_tail,
        "after_head": parameters.trainable_tail,
        "last_layer_backward": in_layer,
        "after_last_layer": in_layer,
        "first_layer_backward": in_layer,
        "after_first_layer": in_layer,
        "embedding_backward": model.embedding_parameters + tied,
    }
    copied = reduced * min(zero.reduce_bucket_size, parameters.trainable)
    # qwZ gathers int8, dequantizes into a flat tensor and copies out of that (partition_parameters.py:1515, 767).
    copy_bytes = width + (1 if zero.quantized_weights else 0)
    fetched = copy_bytes * min(zero.stage3_prefetch_bucket_size, held["last_layer_backward"])
    for moment, unit in units.items():
        gradients = unit if job.method == "full" else min(unit, parameters.largest_trainable)
        more[moment]["module_gradients"] = width * gradients
        if moment != "head_backward":
            more[moment] |= {"reduce_copy": copied, "prefetch_copies": fetched}
    return at_moments(always, **more)


_EXPERTS_AS_STORED = frozenset({"gpt_oss", "llama4", "llama4_text"})
"""Model types whose experts are multiplied as they are stored (transformers 5.17.0, `is_transposed`)."""
_TRANSPOSED_LINEARS = frozenset({"falcon"})
"""Model types whose linear layers are `input @ weight.T` (transformers 5.17.0, `FalconLinear`)."""
_ORDER = tuple(PHASES)
_BEFORE_OTHER_LAYERS = _ORDER[_ORDER.index("last_layer_forward") : _ORDER.index("after_last_layer") + 1]
"""Moments from the end of the layers' forward pass to that of the last one's backward pass."""


def _kept_by_views(strategy: Strategy, model: ModelSpec, job: TrainingJob, *, held: int) -> int:
    """Return the gathered elements that autograd keeps after ZeRO-3 has released them, beside those `held` anyway.

    A grouped product of experts takes a transposed view of the weights (transformers 5.17.0, integrations/moe.py:368;
    deepspeed 0.19.8, moe/ep_experts.py:269), and so do Falcon's linear layers. Autograd saves the view, and with it the
    gathered storage, until the layer's backward pass; layers that run their forward pass again save nothing before. A
    parameter that is saved itself loses its storage with its `data`. Adapted experts are sums, which count among the
    activations. Of what is held at the end of the forward pass, all but the tail is the last layer's.
    """
    layers = max(1, model.dimensions.num_layers)
    saved = layers - strategy.recomputed_layers(layers)
    viewed = sum(parameter.total for parameter in model.parameters if _is_viewed(parameter, model, job)) // layers
    return max(0, saved * viewed - min(viewed, max(0, held - model.tail_parameters)))


def _is_viewed(parameter: ParameterShape, model: ModelSpec, job: TrainingJob) -> bool:
    if parameter.kind == "experts":
        adapted = job.method != "full" and bool(adapted_experts(model, job.lora_targets))
        return not adapted and model.model_type not in _EXPERTS_AS_STORED
    return model.model_type in _TRANSPOSED_LINEARS and parameter.in_layer and len(parameter.shape) == 2


def _recomputed_share(strategy: Strategy, model: ModelSpec) -> Recomputed:
    layers = model.dimensions.num_layers
    recomputed = strategy.recomputed_layers(layers)
    return "all" if recomputed == layers else "some" if recomputed else "none"


def _fsdp2_units(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters
) -> dict[Moment, Terms]:
    """Unsharded units in compute precision, as `_fsdp_param_group.py` of torch 2.13 orders them.

    The tail unit (final norm and head, with the embedding when tied) stays gathered from the forward pass on, where the
    latest all-gather's buffer lives until the next. A layer's backward holds the layer, the all-gather of the unit that
    comes next, its gradients, and the reduce-scatter input of the unit before.
    """
    width, full = job.compute_bytes, job.method == "full"
    model = engine_parameters(model, job)
    layer, tail = width * model.layer_parameter_count, width * model.tail_parameters
    embedding = 0 if model.tied_embeddings else width * model.embedding_parameters
    layer_gradient, tail_gradient, embedding_gradient = layer, tail, embedding
    if not full:
        layer_gradient = width * parameters.trainable // parameters.layers
        tail_gradient = embedding_gradient = 0
    kept = tail if model.tied_embeddings else 0
    kept_gradient = tail_gradient if model.tied_embeddings else 0
    latest = layer if model.tied_embeddings else tail

    def held(gathered: int, gradients: int) -> Terms:
        return {"gathered_parameters": gathered, "unit_gradients": gradients}

    before = layer_gradient if model.tied_embeddings else tail_gradient
    return at_moments(
        {},
        last_layer_forward=held(kept + 2 * layer, 0),
        forward_end=held(tail + latest, 0),
        loss_backward=held(tail, 0),
        head_backward=held(tail + layer, tail_gradient),
        after_head=held(kept + layer, 2 * tail_gradient),
        last_layer_backward=held(kept + 2 * layer, kept_gradient + before),
        after_last_layer=held(kept + layer, kept_gradient + 2 * layer_gradient),
        first_layer_backward=held(kept + layer + embedding, kept_gradient + layer_gradient),
        after_first_layer=held(kept + embedding, kept_gradient + 2 * layer_gradient),
        embedding_backward=held(kept + embedding, kept_gradient + embedding_gradient + layer_gradient),
    )
