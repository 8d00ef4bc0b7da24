"""Bytes of communication: buckets of gradients and gathered parameters at each moment, and the collectives of a step.

`step_time/communication.py` has the seconds of these collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil
from typing import Literal, NamedTuple

from ..specs.images import image_part
from ..specs.job import TrainingJob
from ..specs.layout import Engine, Layout, ZeroOptions
from ..specs.model import ModelSpec, ParameterShape, adapted_experts
from ..specs.terms import Term
from .activations import tiled_mlp_elements
from .model_states import reduces_once
from .rank_parameters import PHASES, Moment, RankParameters, Terms, at_moments, engine_parameters, rank_parameters

TERMS = (
    Term(
        "reduce_buckets",
        "reduce_bucket_size elements in gradient dtype, twice with overlap_comm (stages 1 and 2)",
        role="buckets",
    ),
    Term("reduce_bucket", "the persistent bucket of stage 3: reduce_bucket_size elements", role="buckets"),
    Term(
        "reduce_copy",
        "the flattened copy of a bucket during its reduction, in a pipeline without ZeRO of all gradients; with "
        "offload in stages 1 and 2 the clone of a gradient larger than the bucket, or the fp64 copy for its norm",
        role="buckets",
    ),
    Term(
        "gathered_parameters",
        "parameters gathered for use: the current unit and prefetched ones (ZeRO-3: simulation of DeepSpeed's fetch "
        "queue; FSDP2: the unit in use, the next one's buffer, and the last unit)",
        role="buckets",
    ),
    Term(
        "prefetch_copies",
        "a coalesced gather holds its flat buffer and a copy of each tensor; with ZeRO++ qwZ also the gathered int8 "
        "values",
        role="buckets",
    ),
    Term(
        "persistent_parameters",
        "tensors of at most stage3_param_persistence_threshold elements, on every rank",
        role="buckets",
    ),
    Term(
        "module_gradients",
        "complete gradients that are not reduced yet: of the module in use, and of tensors larger than the bucket",
        role="gradients",
    ),
    Term("unit_gradients", "FSDP2: unsharded gradients of a unit and their reduce-scatter input", role="gradients"),
)


def default_zero_options(model: ModelSpec, job: TrainingJob, *, stage: int, lean: bool = False) -> ZeroOptions:
    """Return bucket and threshold sizes for a model; `lean` trades communication overlap for memory.

    Stage 3 uses the sizes that transformers derives from the hidden size h: bucket h², prefetch 0.9·h²,
    persistence 10·h (transformers/integrations/deepspeed.py:229). A bucket is never larger than all gradients.
    Two layers of live parameters overlap gathers with computation; DeepSpeed's default of 10⁹ would take 2 GB.
    """
    trainable = max(1000, rank_parameters(model, job).trainable)
    hidden = model.dimensions.hidden_size
    if stage < 3:
        bucket = min(20_000_000 if lean else 100_000_000, trainable)
        return ZeroOptions(reduce_bucket_size=bucket + bucket % 2, overlap_comm=not lean)
    square = max(1_000_000, min(hidden * hidden, 200_000_000))
    # DeepSpeed counts stored elements, of which one holds several 4-bit weights.
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


def buffer_terms(layout: Layout, model: ModelSpec, job: TrainingJob, parameters: RankParameters) -> dict[Moment, Terms]:
    if layout.engine == "fsdp2":
        return _fsdp2_units(model, job, parameters, ranks=layout.shard_size)
    if layout.zero_stage == 3:
        return _stage3_gathers(layout, model, job, parameters)
    if layout.zero_stage in (1, 2):
        return _stage1_and_2_buckets(layout, model, job, parameters)
    return at_moments({})


def _stage1_and_2_buckets(
    layout: Layout, model: ModelSpec, job: TrainingJob, parameters: RankParameters
) -> dict[Moment, Terms]:
    """Reduction buckets of ZeRO-1 and ZeRO-2.

    Buckets are allocated when the first gradient arrives and released by the reduction, which copies its bucket.
    Stage 1 reduces only at the end of accumulation, so its buckets exist during the forward passes before. A bucket
    fills during a layer's backward pass. A bucket for all gradients is reduced after the backward pass. A gradient
    larger than the bucket waits until the next gradient is complete: the gradient of the head waits for the final
    norm. Offload clones such a gradient and computes the norm of each in fp64 (stage_1_and_2.py:1439, 1905). The
    gradient of a tied head waits in autograd until the embedding has its gradient.
    """
    width = job.compute_bytes
    size, offload = layout.zero.reduce_bucket_size, layout.offload_optimizer != "none"
    shard = parameters.shard(layout)
    buckets = {"reduce_buckets": (2 if layout.zero.overlap_comm else 1) * size * width}
    accumulating = layout.gradient_accumulation_steps > 1
    buckets_in_forward = buckets if layout.zero_stage == 1 and accumulating else {}
    once = reduces_once(layout, parameters)
    # The states of stage 1 include complete gradients, unless they are copied immediately.
    counted = layout.zero_stage == 1 and (accumulating or not (offload or once))
    if layout.pp > 1:
        # A pipeline reduces after all backward passes, in another bucket (stage_1_and_2.py:958).
        bucket = {"reduce_buckets": size * width}
        return at_moments({}, loss=bucket if accumulating else {}, backward=bucket, embedding_backward=bucket)
    # Elements of the largest gradient of head, layers and embedding.
    most = parameters.largest_trainable
    head = min(model.embedding_parameters if model.tied_embeddings else model.tail_parameters, most)
    layer = min(max((parameter.numel for parameter in model.parameters if parameter.in_layer), default=0), most)
    embedding = min(model.embedding_parameters, most)
    tied = head if model.tied_embeddings else 0

    def reduction(unit: int, waiting: int) -> Terms:
        copied = bucket_copy(unit)
        if unit > size:
            copied = max(width * unit, 8 * min(unit, shard)) if offload else 0
        unreduced = 0 if counted else tied + unit + (waiting if waiting > size else 0)
        return buckets | {"reduce_copy": copied, "module_gradients": width * unreduced}

    def bucket_copy(*units: int) -> int:
        norms = [8 * min(unit, shard) for unit in units if unit <= size] if offload else []
        return max([max(width, _reduction_bytes(layout, job)) * min(size, parameters.trainable), *norms])

    def in_layer(*units: int) -> Terms:
        return buckets | {"reduce_copy": bucket_copy(*units), "module_gradients": 0 if counted else width * tied}

    if once:

        def unreduced(unit: int) -> Terms:
            return buckets | {"module_gradients": 0 if counted else width * (tied + unit)}

        return at_moments(
            {},
            loss=buckets_in_forward,
            head_backward={"module_gradients": 0 if counted else width * head},
            after_head=unreduced(head - tied),
            last_layer_backward=unreduced(0),
            after_last_layer=unreduced(layer),
            first_large_layer_backward=unreduced(0),
            first_layer_backward=unreduced(0),
            after_first_layer=unreduced(layer),
            embedding_backward=buckets | {"reduce_copy": bucket_copy(head, layer, embedding)},
        )
    oversized_head = reduction(head, 0) if head > size and not tied else {}
    return at_moments(
        {},
        loss=buckets_in_forward,
        head_backward={"module_gradients": 0 if counted else width * head},
        after_head=oversized_head,
        last_layer_backward=in_layer(layer, 0 if tied else head),
        after_last_layer=reduction(layer, layer),
        first_large_layer_backward=in_layer(layer),
        first_layer_backward=in_layer(layer),
        after_first_layer=reduction(layer, layer),
        embedding_backward=reduction(embedding, layer),
    )


def _reduction_bytes(layout: Layout, job: TrainingJob) -> int:
    """Bytes of an element in a reduction, which is in fp32 with sequence parallelism (engine.py:2182)."""
    return 4 if layout.sp > 1 else job.compute_bytes


def _stage3_gathers(
    layout: Layout, model: ModelSpec, job: TrainingJob, parameters: RankParameters
) -> dict[Moment, Terms]:
    """Gathered and persistent parameters, the gradient bucket, and the copies of a reduction.

    Between the modules of a layer a coalesced gather holds its flat buffer and a copy of each tensor
    (partition_parameters.py:795), and a full bucket is reduced. A gradient larger than the bucket is reduced in place;
    the bucket itself is flattened into a copy. Frozen 4-bit weights are gathered packed; `plugins/bitsandbytes` ensures
    that they are released like others.
    """
    zero, width = layout.zero, job.compute_bytes
    stored = engine_parameters(model, job)
    # A single partition on the accelerator is used in place (`_no_gather_coalesced`, partition_parameters.py:904).
    copies = layout.shard_size > 1 or layout.offload_param != "none"
    persistent = stored.persistent_parameters(zero.stage3_param_persistence_threshold)
    reduced = _reduction_bytes(layout, job)
    always = {"persistent_parameters": copies * width * persistent, "reduce_bucket": reduced * zero.reduce_bucket_size}
    layers = model.dimensions.num_layers
    recomputed = layout.recomputed_layers(layers)
    held = gathered_elements(
        stored, zero, recomputed=("all" if recomputed == layers else "some" if recomputed else "none")
    )
    # A grouped product of experts uses a transposed view of the weights (transformers 5.17.0, integrations/moe.py:368;
    # deepspeed 0.19.8, moe/ep_experts.py:269), and so do Falcon's linear layers. Autograd saves the view, and with it
    # the gathered storage, until the layer's backward pass; recomputed layers save nothing before. A saved parameter
    # loses its storage with its `data`. Adapted experts are sums and count as activations. At the end of the forward
    # pass, all held elements except those of the tail belong to the last layer.
    views = viewed_elements(model, job)[recomputed:] or (0,)
    viewed = sum(views) - min(views[-1], max(0, held["forward_end"] - model.tail_parameters))
    more = {
        moment: {"gathered_parameters": copies * width * (count + (viewed if moment in _BEFORE_OTHER_LAYERS else 0))}
        for moment, count in held.items()
    }
    # The gradient of a tied head waits in autograd for that of the embedding.
    tied = model.embedding_parameters if model.tied_embeddings and job.method == "full" else 0
    in_layer = max(model.largest_layer_unit, tiled_mlp_elements(layout, model, job)) + tied
    units: dict[Moment, int] = {
        "head_backward": parameters.trainable_tail,
        "after_head": parameters.trainable_tail,
        "last_layer_backward": in_layer,
        "after_last_layer": in_layer,
        "first_large_layer_backward": in_layer,
        "first_layer_backward": in_layer,
        "after_first_layer": in_layer,
        "embedding_backward": model.embedding_parameters + tied,
    }
    copied = reduced * min(zero.reduce_bucket_size, parameters.trainable)
    # qwZ gathers int8, dequantizes into a flat tensor and copies out of that (partition_parameters.py:1515, 767).
    copy_bytes = width + (1 if zero.quantized_weights else 0)
    fetched = copies * copy_bytes * min(zero.stage3_prefetch_bucket_size, held["last_layer_backward"])
    for moment, unit in units.items():
        gradients = unit if job.method == "full" else min(unit, parameters.largest_trainable)
        more[moment]["module_gradients"] = width * gradients
        if moment != "head_backward":
            more[moment] |= {"reduce_copy": copied, "prefetch_copies": fetched}
    return at_moments(always, **more)


_EXPERTS_AS_STORED = frozenset({"gpt_oss", "llama4", "llama4_text"})
"""Model types whose experts are multiplied without a transposed view (transformers 5.17.0, `is_transposed`)."""


_TRANSPOSED_LINEARS = frozenset({"falcon"})
"""Model types whose linear layers are `input @ weight.T` (transformers 5.17.0, `FalconLinear`)."""


_ORDER = tuple(PHASES)


_BEFORE_OTHER_LAYERS = _ORDER[_ORDER.index("last_layer_forward") : _ORDER.index("after_last_layer") + 1]
"""Moments from the last layer's forward pass to the end of its backward pass."""


@lru_cache(maxsize=256)
def viewed_elements(model: ModelSpec, job: TrainingJob) -> tuple[int, ...]:
    """Return the elements of every layer of which autograd saves views; empty if there are none."""
    adapted = [] if job.method == "full" else adapted_experts(model, job.lora_targets)

    def is_viewed(parameter: ParameterShape) -> bool:
        if parameter.kind == "experts":
            return parameter not in adapted and model.model_type not in _EXPERTS_AS_STORED
        return model.model_type in _TRANSPOSED_LINEARS and len(parameter.shape) == 2

    views = model.of_layers(lambda layer: sum(p.numel for p in layer if is_viewed(p)))
    return views if any(views) else ()


def _fsdp2_units(model: ModelSpec, job: TrainingJob, parameters: RankParameters, *, ranks: int) -> dict[Moment, Terms]:
    """Unsharded units in compute precision, as `_fsdp_param_group.py` of torch 2.13 orders them.

    The tail unit (final norm and head, with the embedding if tied) stays gathered from the forward pass on. There, the
    buffer of the latest all-gather exists until the next one. The backward pass of a layer holds the layer, the
    all-gather of the next unit, its gradients, and the reduce-scatter input of the previous unit.
    """
    width, full = job.compute_bytes, job.method == "full"
    model = engine_parameters(model, job)
    # What is in no other unit, of a vision tower and its projector, stays gathered in that of the whole model.
    root = [p for p in model.parameters if model.reads_images and not p.in_layer and image_part(p.name)]
    trained = [p for p in root if not p.frozen and (full or p.whole)]
    kept, root_gradient = (width * sum(p.total for p in part) for part in (root, trained))
    # Its gradients are reduced last, until when their shards do not exist.
    root_gradient = max(0, root_gradient - job.trained_weight_bytes * root_gradient // (width * ranks))
    sizes, tail = [width * size for size in model.layer_sizes], width * model.tail_parameters - kept
    embedding = 0 if model.tied_embeddings else width * model.embedding_parameters
    gradients, tail_gradient, embedding_gradient = sizes, tail, embedding
    if not full:
        adapted = parameters.trainable - parameters.trainable_outside_layers
        gradients = [width * adapted // len(sizes)] * len(sizes)
        tail_gradient = embedding_gradient = 0
    of_tower = 0
    if job.images_per_sample:
        tower = (p.numel for p in model.parameters if p.in_layer and image_part(p.name) == "vision_tower")
        of_tower = width * sum(tower)
    tied_tail = tail if model.tied_embeddings else 0
    tied_gradient = tail_gradient if model.tied_embeddings else 0
    # The unit that runs before each layer is gathered during its backward pass, and the one after it is reduced.
    before_last, last = sizes[-2:] if len(sizes) > 1 else 2 * sizes
    earlier = [of_tower or embedding, *sizes[:-1]]
    reduced = [*gradients[1:], gradients[-1] if model.tied_embeddings else tail_gradient]
    large = model.first_large_layer

    def held(gathered: int, gradients: int) -> Terms:
        return {"gathered_parameters": kept + gathered, "unit_gradients": gradients}

    return at_moments(
        {},
        last_layer_forward=held(tied_tail + 2 * last, 0),
        forward_end=held(tail + (last if model.tied_embeddings else tail), 0),
        loss_backward=held(tail, 0),
        head_backward=held(tail + last, tail_gradient),
        after_head=held(tied_tail + last, 2 * tail_gradient),
        last_layer_backward=held(tied_tail + last + before_last, tied_gradient + reduced[-1]),
        after_last_layer=held(tied_tail + before_last, tied_gradient + 2 * gradients[-1]),
        first_large_layer_backward=held(tied_tail + sizes[large] + earlier[large], tied_gradient + reduced[large]),
        first_layer_backward=held(tied_tail + sizes[0] + earlier[0], tied_gradient + reduced[0]),
        after_first_layer=held(tied_tail + of_tower + embedding, tied_gradient + 2 * gradients[0]),
        embedding_backward=held(
            tied_tail + embedding, tied_gradient + embedding_gradient + gradients[0] + root_gradient
        ),
    )


class _Tensor(NamedTuple):
    # A parameter of one layer, distinguished by identity.
    numel: int
    persistent: bool


_Unit = tuple[_Tensor, ...]
"""Parameters that a module needs to run; empty for containers and activation functions."""


Recomputed = Literal["none", "some", "all"]
"""Recomputed layers: none, the first ones, or all."""


@lru_cache(maxsize=256)
def gathered_elements(model: ModelSpec, zero: ZeroOptions, *, recomputed: Recomputed) -> dict[Moment, int]:
    """Return the elements that ZeRO-3 has gathered at each moment, without persistent ones.

    Simulates DeepSpeed's fetch queue. A model with many layers is simulated with a few more layers than the queue can
    hold, since the others repeat.
    """
    turns = _turns(model, zero, recomputed=recomputed, most_layers=_layers_ahead(model, zero) + 4)
    held: dict[Moment, int] = {}
    for (_, phase), turn in zip(turns, _replay([unit for unit, _ in turns], zero), strict=True):
        if phase is not None:
            held[phase] = max(held.get(phase, 0), turn.held)
    # A single layer is both first and last; an encoder may have neither head nor token embedding.
    held.setdefault("first_layer_backward", held["last_layer_backward"])
    held.setdefault("first_large_layer_backward", held["first_layer_backward"])
    held.setdefault("head_backward", held["forward_end"])
    held.setdefault("embedding_backward", 0)
    same: tuple[tuple[Moment, Moment], ...] = (
        ("loss_backward", "forward_end"),
        ("after_head", "head_backward"),
        ("after_last_layer", "last_layer_backward"),
        ("after_first_layer", "first_layer_backward"),
    )
    return held | {later: held[earlier] for later, earlier in same}


def _turns(
    model: ModelSpec, zero: ZeroOptions, *, recomputed: Recomputed, most_layers: int
) -> list[tuple[_Unit, Moment | None]]:
    """Return the modules of one step in order, each with the moment that it counts for."""
    embeddings, layers, tail = _modules(model, zero, most_layers)
    turns: list[tuple[_Unit, Moment | None]] = [((), None), *((unit, None) for unit in embeddings)]
    turns += [(unit, None) for layer in layers[:-1] for unit in layer]
    turns += [(unit, "last_layer_forward") for unit in layers[-1]]
    turns += [(unit, None) for unit in tail]
    # The loss, which belongs to the model itself.
    turns.append(((), "forward_end"))
    turns += [(unit, "head_backward") for unit in reversed(tail)]
    for index, layer in reversed(list(enumerate(layers))):
        moment: Moment | None = None
        if index == 0:
            moment = "first_layer_backward"
        elif index == model.first_large_layer:
            moment = "first_large_layer_backward"
        if index == len(layers) - 1:
            moment = "last_layer_backward"
        # If some layers are recomputed, the first is, and the last is not.
        runs_again = recomputed == "all" or (recomputed == "some" and index < len(layers) - 1)
        turns += [(unit, moment) for unit in [(), *(layer if runs_again else []), *reversed(layer)]]
    turns += [(unit, "embedding_backward") for unit in reversed(embeddings)]
    return turns


@lru_cache(maxsize=64)
def forward_gathered_elements(engine: Engine, model: ModelSpec, zero: ZeroOptions) -> int:
    """Return the most elements that FSDP2 or ZeRO-3 gathers in a forward pass without gradients.

    FSDP2 keeps its root unit (embeddings, final norm, head) gathered, and a layer with the all-gather of the next one.
    Those of ZeRO-3 are without persistent ones.
    """
    if engine == "fsdp2":
        return model.parameters_outside_layers + 2 * model.layer_parameter_count
    embeddings, layers, tail = _modules(model, zero, _layers_ahead(model, zero) + 4)
    units = [(), *embeddings, *(unit for layer in layers for unit in layer), *tail]
    return max(turn.held for turn in _replay(units, zero))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """All-gathers of sharded parameters in one pass of a micro-batch through the model."""

    share: float
    """Gathered elements divided by those of the model; above 1 if recomputed layers are gathered twice."""
    calls: float
    tensors: float = 0.0
    """Gathered tensors, each time they are gathered."""
    modules: float = 0.0
    """Modules that run, each with its hooks."""


@lru_cache(maxsize=256)
def zero3_gathers(model: ModelSpec, zero: ZeroOptions, *, recomputes: bool) -> tuple[Gathered, Gathered]:
    """Return the all-gathers of ZeRO-3 in the forward and the backward pass, recomputation included.

    A tensor is never split: one call gathers the missing parameters of a module, or tensors ahead of it until they
    exceed the prefetch size (deepspeed 0.19.8, partitioned_param_coordinator.py, `_fetch_sub_module_impl`).
    """
    layers, elements = max(1, model.dimensions.num_layers), max(1, model.parameter_count)
    middle, large = _layers_ahead(model, zero) + 3, model.first_large_layer
    embeddings, units, tail = _modules(model, zero, layers)
    *smaller, repeated = units[: large + 1]
    # Layers of several kinds do not repeat each other, except for smaller ones before all others.
    shortened = [min(layers, 2 * (middle + large))] if len(set(model.layer_sizes[large:])) == 1 else []
    for count in (*shortened, layers):
        turns = _turns(model, zero, recomputed="all" if recomputes else "none", most_layers=count)
        replayed = _replay([unit for unit, _ in turns], zero)
        # The forward pass ends with the loss.
        end = next(index for index, (_, moment) in enumerate(turns) if moment == "forward_end") + 1
        # In either pass: its turns, the index of the first turn of a layer that repeats, and turns per layer.
        passes = (
            (replayed[:end], 1 + len(embeddings) + sum(map(len, smaller)), len(repeated)),
            (replayed[end:], len(tail), 1 + len(repeated) * (2 if recomputes else 1)),
        )
        inner = [[part[at + n * size :][:size] for n in (middle - 1, middle)] for part, at, size in passes]
        # Layers far from both ends of the stack that repeat each other stand for the others.
        if count == layers or all(one == other for one, other in inner):
            break

    def gathered(part: list[_Turn], one: list[_Turn]) -> Gathered:
        times = [(turn, 1) for turn in part] + [(turn, layers - count) for turn in one]
        return Gathered(
            share=sum(number * turn.gathered for turn, number in times) / elements,
            calls=sum(number * turn.calls for turn, number in times),
            tensors=sum(number * turn.tensors for turn, number in times),
            modules=sum(number for _, number in times),
        )

    ahead, back = (gathered(part, one) for (part, _, _), (one, _) in zip(passes, inner, strict=True))
    return ahead, back


@lru_cache(maxsize=256)
def reduced_buckets(model: ModelSpec, bucket_elements: int) -> int:
    """Return the reductions of all gradients by ZeRO-3, whose buckets contain complete tensors.

    A bucket is reduced before a gradient that exceeds it (deepspeed 0.19.8, stage3.py:1583).
    """
    inside = [parameter for parameter in reversed(model.parameters) if parameter.in_layer]
    sizes = [p.numel for p in model.parameters if not p.in_layer for _ in range(p.count)]
    for layer in range(model.dimensions.num_layers):
        sizes += [parameter.numel for parameter in inside if layer < parameter.count]
    calls, filled = 0, 0
    for size in sizes:
        if filled and filled + size > bucket_elements:
            calls, filled = calls + 1, 0
        filled += size
    return calls + 1


def _layers_ahead(model: ModelSpec, zero: ZeroOptions) -> int:
    """Return how many layers the fetch queue can hold."""
    window = max(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance, zero.stage3_prefetch_bucket_size)
    return ceil(window / max(1, model.layer_parameter_count))


def _modules(
    model: ModelSpec, zero: ZeroOptions, most_layers: int
) -> tuple[list[_Unit], list[list[_Unit]], list[_Unit]]:
    """Return the units of the embeddings, of every layer with its containers, and of final norm and head.

    If there are more layers than `most_layers`, those in the middle are omitted. Each layer has separate tensors.
    """

    def unit(shapes: Sequence[ParameterShape]) -> _Unit:
        return tuple(_Tensor(shape.numel, shape.numel <= zero.stage3_param_persistence_threshold) for shape in shapes)

    def grouped(parameters: Iterable[ParameterShape]) -> list[tuple[str, list[ParameterShape]]]:
        modules: dict[str, list[ParameterShape]] = {}
        for parameter in parameters:
            modules.setdefault(model.gather_module(parameter), []).append(parameter)
        return list(modules.items())

    def layer_units(parameters: Sequence[ParameterShape]) -> list[_Unit]:
        units: list[_Unit] = [()]
        parents: set[str] = set()
        for name, shapes in grouped(parameters):
            parent = name.rpartition(".")[0]
            if parent not in parents:
                units.append(())
                parents.add(parent)
            units.append(unit(shapes))
        return units

    first, last = max(most_layers // 2, model.first_large_layer + 1), most_layers - most_layers // 2
    layers = model.layers
    if len(layers) > first + last:
        layers = (*layers[:first], *layers[-last:])
    embeddings: list[_Unit] = []
    tail: list[_Unit] = []
    for _, shapes in grouped(p for p in model.parameters if not p.in_layer):
        (embeddings if shapes[0].group == "embedding" else tail).append(unit(shapes))
    if model.tied_embeddings and embeddings:
        tail.append(embeddings[0])
    return embeddings, [layer_units(layer) for layer in layers], tail


class _Turn(NamedTuple):
    held: int
    """Gathered elements while the unit runs."""
    gathered: int
    """Elements that are gathered for it and ahead of it."""
    calls: int
    """All-gathers of these elements."""
    tensors: int
    """Tensors of these elements."""


def _replay(units: Sequence[_Unit], zero: ZeroOptions) -> list[_Turn]:
    """Return what DeepSpeed gathers and holds while each unit runs."""
    # The fetch queue: each use of a tensor in order, with the step of the use.
    queue = [tensor for unit in units for tensor in unit]
    used_at = [step for step, unit in enumerate(units) for _ in unit]
    numbers: dict[int, int] = {}
    keys = [numbers.setdefault(id(tensor), len(numbers)) for tensor in queue]
    next_use, later = [len(units)] * len(queue), [len(units)] * len(numbers)
    for position in range(len(queue) - 1, -1, -1):
        next_use[position], later[keys[position]] = later[keys[position]], used_at[position]
    before = [0, *accumulate(sum(tensor.numel for tensor in unit) for unit in units)]
    available, fetched_for = [False] * len(numbers), [-1] * len(numbers)
    count = head = begin = 0
    turns = []
    for step, unit in enumerate(units):
        end = begin + len(unit)
        fetched = tensors = 0
        for position in range(begin, end):
            key, tensor = keys[position], queue[position]
            if not tensor.persistent and not available[key]:
                available[key] = True
                fetched += tensor.numel
                tensors += 1
        count += fetched
        # Uses in earlier steps have left the queue, so that what is missing of this unit is at its head.
        for position in range(head, end):
            fetched_for[keys[position]] = step
        head = max(head, end)
        prefetch_limit = min(zero.stage3_max_live_parameters - count, zero.stage3_prefetch_bucket_size)
        prefetched = 0
        while prefetched < prefetch_limit and head < len(queue):
            key, tensor = keys[head], queue[head]
            fetched_for[key] = used_at[head]
            if not tensor.persistent and not available[key]:
                available[key] = True
                prefetched += tensor.numel
                tensors += 1
            head += 1
        count += prefetched
        turns.append(_Turn(count, fetched + prefetched, (fetched > 0) + (prefetched > 0), tensors))
        for position in range(begin, end):
            key = keys[position]
            if not available[key] or fetched_for[key] > step + 1:
                continue
            again = next_use[position]
            # Elements of the units between this one and the next use.
            if again == len(units) or before[again] - before[step + 1] >= zero.stage3_max_reuse_distance:
                available[key] = False
                count -= queue[position].numel
        begin = end
    return turns
