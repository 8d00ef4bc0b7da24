"""Moments of a training step, and what one rank holds under tensor, pipeline and expert parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, nextafter
from typing import Literal, cast

from ..specs.errors import ConfigError, UsageError
from ..specs.images import image_part
from ..specs.job import TrainingJob
from ..specs.layout import Layout, PipelineStage, contiguous_stages
from ..specs.model import CONV1D_FAMILIES, ModelSpec, ParameterShape, adapters, lora_parameter_count
from ..specs.optimizers import OPTIMIZERS
from .activations import ActivationEstimate, Mode, activations_of

Phase = Literal["init", "generate", "score", "loss", "backward", "step"]
"""Phases of a step; only tasks that generate have `generate` and `score`."""

Moment = Literal[
    "init",
    "generate",
    "score",
    "second_models_forward",
    "last_layer_forward",
    "forward_end",
    "loss_backward",
    "head_backward",
    "after_head",
    "last_layer_backward",
    "after_last_layer",
    "first_large_layer_backward",
    "first_layer_backward",
    "after_first_layer",
    "embedding_backward",
    "step",
]
"""Moments of a step in order: completions and their scores, of tasks that generate; the forward passes of second
models; that of the last layer; forward and backward pass of the loss; backward pass of the output head and reduction of
its gradients; the same for the last and the first layer, and the backward pass of the first large layer if smaller
layers come before it; the token embedding; the optimizer step."""

Terms = dict[str, int]

# Of every task; the other moments are phases of their own.
PHASES: Mapping[Moment, Phase] = {
    "init": "init",
    "second_models_forward": "loss",
    "last_layer_forward": "loss",
    "forward_end": "loss",
    "loss_backward": "loss",
    "head_backward": "backward",
    "after_head": "backward",
    "last_layer_backward": "backward",
    "after_last_layer": "backward",
    "first_large_layer_backward": "backward",
    "first_layer_backward": "backward",
    "after_first_layer": "backward",
    "embedding_backward": "backward",
    "step": "step",
}

_PHASES_OF_A_STEP = tuple(dict.fromkeys(PHASES.values()))
_NAMES = frozenset(PHASES) | frozenset(_PHASES_OF_A_STEP)


def summed(first: Terms, *others: Terms) -> Terms:
    """Return the sum of several parts, without terms of 0 bytes.

    >>> summed({"weights": 2, "loss": 0}, {"weights": 1})
    {'weights': 3}
    """
    # A search sums hundreds of thousands of parts, mostly without zeros.
    terms = {name: count for name, count in first.items() if count} if 0 in first.values() else first.copy()
    for part in others:
        for name, count in part.items():
            if count:
                terms[name] = terms.get(name, 0) + count
    return terms


def at_moments(always: Terms, **more: Terms) -> dict[Moment, Terms]:
    """Return the terms of each moment: `always`, plus the terms of its phase and of the moment itself.

    Moments with equal terms share one dictionary, because a search computes thousands of them.

    >>> at_moments({"weights": 2}, backward={"gradients": 1}, step={"gradients": 4})["head_backward"]
    {'weights': 2, 'gradients': 1}
    """
    assert _NAMES.issuperset(more), "every name is a phase or a moment"
    if not more:
        same: Terms = dict(always)
        return dict.fromkeys(PHASES, same)

    phases: dict[str, Terms] = {
        phase: summed(always, more[phase]) if phase in more else dict(always) for phase in _PHASES_OF_A_STEP
    }
    return {
        moment: summed(phases[phase], more[moment]) if moment in more and moment != phase else phases[phase]
        for moment, phase in PHASES.items()
    }


def fullest_by_phase(moments: Mapping[Moment, Terms]) -> dict[Phase, Terms]:
    """Return the terms of each phase at its fullest moment, the earlier of two equal ones."""
    phases: dict[Phase, Terms] = {}
    sizes: dict[Phase, int] = {}
    for moment, terms in moments.items():
        phase, size = PHASES[moment] if moment in PHASES else cast(Phase, moment), sum(terms.values())
        if phase not in phases or size > sizes[phase]:
            phases[phase], sizes[phase] = terms, size
    return phases


ROW_PARALLEL = ("o_proj", "down_proj", "c_proj", "out_proj", "dense", "fc2")
"""Modules that AutoTP splits along their input, with replicated biases (deepspeed/module_inject/auto_tp.py)."""


def tensor_parallel_share(model: ModelSpec, tp: int, *, divides_head: bool = True) -> ModelSpec:
    """Return the part of a model on the fullest of `tp` ranks, as AutoTP splits it (deepspeed 0.19.8, `auto_tp.py`).

    Attention is split by key/value heads with their query heads, the MLP by columns. An untied output head has `1 / tp`
    of the vocabulary and gathers the logits. Norms, the embedding and a tied head are replicated; in a pipeline, where
    `divides_head` is false, every output head is.
    """
    sizes = model.dimensions
    key_value_heads = -(-sizes.num_key_value_heads // tp)
    local = replace(
        sizes,
        num_key_value_heads=key_value_heads,
        num_attention_heads=key_value_heads * (sizes.num_attention_heads // max(1, sizes.num_key_value_heads)),
        intermediate_size=-(-sizes.intermediate_size // tp),
    )
    flipped = model.model_type in CONV1D_FAMILIES

    def split(parameter: ParameterShape) -> ParameterShape:
        if parameter.group == "head":
            vocabulary, *others = parameter.shape
            return replace(parameter, shape=(-(-vocabulary // tp), *others)) if divides_head else parameter
        if parameter.group not in ("attention", "mlp") or parameter.kind not in ("linear", "bias"):
            return parameter
        row = parameter.module.rpartition(".")[2] in ROW_PARALLEL
        if row and len(parameter.shape) == 1:
            return parameter
        shape = list(parameter.shape)
        axis = int(row) ^ int(flipped) if len(shape) > 1 else 0
        if parameter.group == "attention" and sizes.num_key_value_heads:
            # Heads are not split.
            shape[axis] = -(-shape[axis] * key_value_heads // sizes.num_key_value_heads)
        else:
            shape[axis] = -(-shape[axis] // tp)
        return replace(parameter, shape=tuple(shape))

    return replace(model, dimensions=local, parameters=tuple(split(parameter) for parameter in model.parameters))


_StageCost = Callable[[int, int, int], float]
"""Cost of a stage from its index, its first layer, and the layer after its last."""


def pipeline_stages(
    model: ModelSpec, job: TrainingJob, pp: int, *, tensor_parallel_size: int = 1
) -> tuple[PipelineStage, ...]:
    """Return the contiguous stages of a pipeline, for planning and for training.

    The time of a stage is that of its forward matrix products, `forward_flops_per_token`, plus the output head on the
    last stage. Stages minimize the slowest time first, because every stage waits for it, and then the largest memory:
    weights, gradients and optimizer states (embedding on the first stage, head on the last, tied ones on both), and
    the activations of `pp - stage` micro-batches, which 1F1B keeps in flight (arXiv 2104.04473, 2.2). With tensor
    parallelism, the costs are those of one rank, whose layers are split and whose embedding and head are not.
    Raises `UsageError` for fewer layers than stages.
    """
    # Stages do not depend on these fields, which would only split the cache.
    plain = replace(job, loss="auto", global_batch_size=None, strategy="auto", offload="auto")
    return _fastest_stages(model, plain, pp, tensor_parallel_size)


@lru_cache(maxsize=512)
def _fastest_stages(
    model: ModelSpec, job: TrainingJob, pp: int, tensor_parallel_size: int
) -> tuple[PipelineStage, ...]:
    layers = model.dimensions.num_layers
    if not 1 <= pp <= layers:
        rule = f"cannot exceed the {layers} layers"
        raise UsageError(ConfigError(where="pp", value=pp, rule=rule, fix=f"nearest legal value: {max(1, layers)}"))
    if tensor_parallel_size > 1:
        model = tensor_parallel_share(model, tensor_parallel_size, divides_head=False)
    per_element: float = job.compute_bytes
    if job.method == "full":
        master = 4 if job.compute_bytes == 2 else 0
        per_element += job.compute_bytes + master + OPTIMIZERS[job.optimizer].state_bytes_per_parameter
    inside = model.parameter_count - model.parameters_outside_layers
    layer = inside / max(1, model.dimensions.num_layers) * per_element
    embedding = sum(p.total for p in model.parameters if p.group == "embedding") * per_element
    head = model.tail_parameters * per_element
    traced = activations_of(model, job, job.micro_batch_size or 1, "fp32" if job.precision == "fp32" else "bf16")
    recomputes = job.gradient_checkpointing in ("on", "reentrant")
    activations = traced.checkpointed_bytes_per_layer if recomputes else traced.saved_bytes_per_layer
    layer_flops, head_flops = forward_flops_per_token(model, job)

    def memory(index: int, first: int, end: int) -> float:
        outside = (embedding if index == 0 else 0) + (head if index == pp - 1 else 0)
        return (end - first) * (layer + (pp - index) * activations) + outside

    def time(index: int, first: int, end: int) -> float:
        return (end - first) * layer_flops + (head_flops if index == pp - 1 else 0)

    fastest = _smallest_largest([time], layers, pp)
    leanest = _smallest_largest([memory, time], layers, pp, others=[fastest])
    ends = _ends([memory, time], [leanest, fastest], layers, pp)
    assert ends is not None, "stages with these costs exist"
    return contiguous_stages(ends)


def forward_flops_per_token(model: ModelSpec, job: TrainingJob) -> tuple[float, float]:
    """Return the forward FLOPs of one token in one layer and in the output head.

    `2 * weights` for each matrix product, counting only the experts that a token visits, and `2 * seq_len * query_size`
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


def _ends(costs: Sequence[_StageCost], limits: Sequence[float], layers: int, stages: int) -> list[int] | None:
    """Return the ends of stages that each take as many layers as the limits allow; `None` if layers remain."""
    bounded = tuple(zip(costs, limits, strict=True))
    ends, first = [], 0
    for index in range(stages):
        low, high = first, layers - (stages - index - 1)
        # A stage costs more with more layers, so its end can be bisected.
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
    """Return the smallest possible maximum of the first cost over the stages, with limits on the other costs.

    Bisects the possible maxima. Greedy stages show whether one is feasible, since more layers cost more.
    """
    cost = costs[0]

    def largest(limit: float) -> float | None:
        """Return the maximum of greedy stages within a limit; `None` if layers remain."""
        ends = _ends(costs, [limit, *others], layers, stages)
        if ends is None:
            return None
        return max(
            cost(index, first, end) for index, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
        )

    low, smallest = 0.0, largest(sum(cost(index, 0, layers) for index in range(stages)))
    assert smallest is not None, "the upper limit is always feasible"
    # Few maxima are possible, so that this ends after fewer steps than a bisection to the last bit.
    while (below := largest(nextafter(smallest, 0.0))) is not None:
        middle = largest((low + below) / 2)
        low, smallest = (low, middle) if middle is not None else ((low + below) / 2, below)
    return smallest


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """The part of a model on one rank, before ZeRO shards it over the data-parallel ranks."""

    model: ModelSpec
    stage: PipelineStage | None = None
    """Pipeline stage; `None` without a pipeline."""

    @property
    def has_head(self) -> bool:
        return self.stage is None or self.stage.has_head


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """A micro-batch on a rank: what its activations and its loss depend on."""

    layout: Layout
    share: RankShare
    job: TrainingJob
    traced: ActivationEstimate
    mode: Mode
    on_gpu: bool

    @property
    def model(self) -> ModelSpec:
        return self.share.model

    @property
    def element_bytes(self) -> int:
        """Bytes of a hidden state, which autocast keeps in fp32."""
        return 2 if self.mode == "bf16" else 4

    @property
    def ranks(self) -> int:
        """Ranks that share a sequence."""
        return self.layout.sp * self.layout.cp

    @property
    def tokens(self) -> int:
        """Tokens of complete sequences."""
        return self.layout.micro_batch_size * self.job.seq_len_tokens


def rank_shares(layout: Layout, model: ModelSpec, job: TrainingJob) -> tuple[RankShare, ...]:
    """Return the shares that can be the fullest; a single one without a pipeline.

    A middle stage with no more layers than an earlier middle stage is omitted, because it has fewer micro-batches in
    flight. Raises `UsageError` for fewer layers than stages.
    """
    return _stage_shares(model, job, layout.tp, layout.ep, layout.pp)


@lru_cache(maxsize=1024)
def _stage_shares(model: ModelSpec, job: TrainingJob, tp: int, ep: int, pp: int) -> tuple[RankShare, ...]:
    complete = model
    if tp > 1:
        model = tensor_parallel_share(model, tp, divides_head=pp == 1)
    if ep > 1:
        model = expert_parallel_share(model, ep)
    if pp == 1:
        return (RankShare(model=model),)
    shares, most_in_the_middle = [], 0
    for stage in pipeline_stages(complete, job, pp, tensor_parallel_size=tp):
        if not stage.has_embedding and not stage.has_head:
            if stage.num_layers <= most_in_the_middle:
                continue
            most_in_the_middle = stage.num_layers
        shares.append(RankShare(model=stage_share(model, stage), stage=stage))
    return tuple(shares)


def expert_parallel_share(model: ModelSpec, ep: int) -> ModelSpec:
    """Return the part of a model on a rank when AutoEP gives it `1 / ep` of the experts of each layer.

    AutoEP stores gate and up projections separately (deepspeed/module_inject/auto_ep_layer.py, `GroupedExperts`).
    Everything else is replicated, and routing still chooses among all experts.
    """
    parameters: list[ParameterShape] = []
    for parameter in model.parameters:
        if parameter.kind != "experts":
            parameters.append(parameter)
            continue
        shape = (-(-parameter.shape[0] // ep), *parameter.shape[1:])
        if not parameter.name.endswith("gate_up_proj"):
            parameters.append(replace(parameter, shape=shape))
            continue
        half = (shape[0], shape[1] // 2, *shape[2:])
        stem = parameter.name.removesuffix("gate_up_proj")
        parameters += [replace(parameter, name=f"{stem}{name}", shape=half) for name in ("gate_proj", "up_proj")]
    return replace(model, parameters=tuple(parameters))


def stage_share(model: ModelSpec, stage: PipelineStage) -> ModelSpec:
    """Return the part of a model on a pipeline stage: layers, embedding on the first, final norm and head on the last.

    A tied embedding is on both (deepspeed/runtime/pipe/module.py, `TiedLayerSpec`).
    """
    tied = model.tied_embeddings and stage.has_head
    parameters = []
    for parameter in model.parameters:
        if parameter.in_layer:
            count = min(parameter.count, stage.end_layer) - min(parameter.count, stage.first_layer)
            if count:
                parameters.append(replace(parameter, count=count))
        elif parameter.group == "embedding":
            is_shared = tied and parameter.shape[0] == model.dimensions.vocab_size
            if stage.has_embedding or is_shared:
                parameters.append(parameter)
        elif stage.has_head:
            parameters.append(parameter)
    return replace(
        model,
        dimensions=replace(model.dimensions, num_layers=stage.num_layers),
        parameters=tuple(parameters),
        tied_embeddings=tied,
    )


NF4_SCALE_BYTES = 1 / 64 + 4 / (64 * 256)
"""Bytes of scales per 4-bit weight: one per 64 weights, and one fp32 per 256 of these (double quantization, QLoRA
section 3). They are not parameters (`quant_state` of bitsandbytes 0.50.2), so no engine shards them."""

NF4_BYTES = 0.5 + NF4_SCALE_BYTES
"""Bytes of a 4-bit weight with its scales."""

NF4_TABLE_BYTES = 4 * (256 + 16 + 1)
"""Bytes of tables per tensor: the values of the codes of scales and weights, and the mean of the scales
(bitsandbytes 0.50.2, functional.py:669, 938)."""


def shards(layout: Layout, dense: float, experts: float) -> tuple[float, float]:
    """Return the elements that a rank keeps of those outside and inside experts.

    Experts are sharded over the ranks that hold the same ones.
    """
    return dense / layout.shard_size, experts * layout.ep / layout.shard_size


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParameters:
    """Trainable and frozen elements of one rank, before sharding."""

    trainable: int
    frozen_bytes: int
    largest_trainable: int
    """Elements of the largest single trainable tensor."""
    trainable_tail: int
    """Trainable elements of final norm and head, whose gradients are computed first."""
    trainable_outside_layers: int
    """Trainable elements of tail and embeddings; gradients of the latter are computed last, unless tied to the head."""
    layers: tuple[int, ...]
    """Other trainable elements, of every layer."""
    first_large_layer: int
    """Index of the first layer with most parameters."""
    scale_bytes: int = 0
    """Part of `frozen_bytes` that is replicated on every rank: scales of 4-bit weights."""
    trainable_experts: int = 0
    """Trainable elements of experts, held by `1 / ep` of the data-parallel ranks; 0 without expert parallelism."""

    def shard(self, layout: Layout) -> int:
        """Trainable elements whose states a rank keeps."""
        return sum(map(ceil, shards(layout, self.trainable - self.trainable_experts, self.trainable_experts)))

    def frozen_shard_bytes(self, layout: Layout) -> int:
        """Bytes of frozen elements that a rank keeps if the engine shards parameters."""
        return -(-(self.frozen_bytes - self.scale_bytes) // layout.shard_size) + self.scale_bytes

    def largest_group_shard(self, layout: Layout) -> int:
        """Trainable elements of the shard's largest parameter group; experts are a separate group."""
        return max(map(ceil, shards(layout, self.trainable - self.trainable_experts, self.trainable_experts)))

    def state_shard(self, states: int, layout: Layout) -> int:
        """Bytes that one rank keeps of `states`, the optimizer states of all trainable elements."""
        if not self.trainable_experts:
            return -(-states // layout.shard_size)
        return -(-states * self.shard(layout) // self.trainable)

    def gradients_so_far(self, moment: Moment) -> int:
        """Trainable elements whose gradients exist at a moment of the backward pass."""
        in_layers = self.trainable - self.trainable_outside_layers
        done = {
            "head_backward": 0,
            "after_head": 0,
            "last_layer_backward": 0,
            "after_last_layer": self.layers[-1],
            "first_large_layer_backward": in_layers - sum(self.layers[: self.first_large_layer + 1]),
            "first_layer_backward": in_layers - self.layers[0],
            "after_first_layer": in_layers,
        }
        return self.trainable_tail + done[moment] if moment in done else self.trainable


def rank_parameters(model: ModelSpec, job: TrainingJob, layout: Layout | None = None) -> RankParameters:
    """Return the trainable and frozen parameters of the complete model, or of a layout's fullest rank before ZeRO."""
    if layout is None:
        return share_parameters(model, job)
    shares = rank_shares(layout, model, job)
    return max((share_parameters(share.model, job, ep=layout.ep) for share in shares), key=lambda p: p.trainable)


@lru_cache(maxsize=4096)
def share_parameters(model: ModelSpec, job: TrainingJob, *, ep: int = 1) -> RankParameters:
    """Return the trainable and frozen parameters of a rank's share of a model."""
    total = model.parameter_count
    if job.method == "full":
        trained = model.trained_part
        # Gradients of a vision tower come after those of all layers of the text.
        of_images = [p for p in trained.parameters if model.reads_images and image_part(p.name)]
        in_tower = sum(p.total for p in of_images if p.in_layer)
        outside = sum(p.total for p in of_images) - in_tower
        sizes, beside = trained.layer_sizes, trained.parameters_outside_layers + in_tower
        in_layers = trained.parameter_count - beside
        if sum(sizes) > in_layers:
            # Each may have the parameters of several kinds.
            sizes = (in_layers // len(sizes),) * len(sizes)
        return RankParameters(
            trainable=trained.parameter_count,
            frozen_bytes=(total - trained.parameter_count) * job.compute_bytes,
            largest_trainable=trained.largest_parameter,
            trainable_tail=trained.tail_parameters - outside,
            trainable_outside_layers=beside,
            layers=sizes,
            first_large_layer=model.first_large_layer,
            trainable_experts=sum(p.total for p in model.parameters if p.kind == "experts") if ep > 1 else 0,
        )
    adapters = lora_parameter_count(model, rank=job.lora_rank, targets=job.lora_targets, variant=job.lora_variant)
    whole = [parameter for parameter in model.parameters if parameter.whole]
    beside = sum(parameter.total for parameter in whole)
    frozen_bytes, scale_bytes = (total - beside) * job.compute_bytes, 0
    if job.method == "qlora":
        packed = model.packed_parameters
        quantized = sum(parameter.total for parameter in packed)
        tables = NF4_TABLE_BYTES * sum(parameter.count for parameter in packed)
        scale_bytes = round(quantized * NF4_SCALE_BYTES) + tables
        frozen_bytes = round(quantized * NF4_BYTES) + tables + (total - quantized) * job.compute_bytes
    widest = max((max(p.shape) for p in model.parameters if p.kind == "linear"), default=0)
    return RankParameters(
        trainable=adapters + beside,
        frozen_bytes=frozen_bytes,
        scale_bytes=scale_bytes,
        largest_trainable=max(job.lora_rank * widest, *(parameter.numel for parameter in whole), 0),
        trainable_tail=0,
        # A tower's gradients are the last.
        trainable_outside_layers=beside,
        layers=(adapters // len(model.layers),) * len(model.layers),
        first_large_layer=model.first_large_layer,
    )


@lru_cache(maxsize=256)
def engine_parameters(model: ModelSpec, job: TrainingJob) -> ModelSpec:
    """Return a model with the parameters that ZeRO-3 and FSDP2 gather: with adapters, and 4-bit weights packed.

    Two or four weights fill one element of the storage, which has the compute dtype (`plugins/peft.py`).
    """
    if job.method == "full":
        return model
    packed = frozenset(model.packed_parameters) if job.method == "qlora" else frozenset()
    trained = [
        replace(p, shape=(-(-p.numel // (2 * job.compute_bytes)), 1)) if p in packed else p for p in model.parameters
    ]
    adapted: dict[str, list[ParameterShape]] = {}
    for adapter in adapters(model, rank=job.lora_rank, targets=job.lora_targets, variant=job.lora_variant):
        adapted.setdefault(adapter.module.rpartition(".")[0], []).append(adapter)
    merged: list[ParameterShape] = []
    for parameter in trained:
        # Matrices of a sequence of modules, such as a merger, have one name.
        merged += [parameter, *adapted.pop(parameter.name.removesuffix(".weight"), [])]
    return replace(model, parameters=tuple(merged))


def trained_parameters(model: ModelSpec, job: TrainingJob) -> ModelSpec:
    """Return a model with only the parameters that have gradients."""
    if job.method == "full":
        return model.trained_part
    of_lora = [p for p in engine_parameters(model, job).parameters if p.whole or ".lora_" in p.name]
    return replace(model, parameters=tuple(of_lora))


def growing_gradients(layout: Layout, parameters: RankParameters, whole_bytes: int) -> dict[str, dict[str, int]]:
    """Return the gradient bytes at the moments at which they grow to `whole_bytes`.

    With accumulation, all gradients exist from the second micro-batch on, including its forward pass.
    """
    if layout.gradient_accumulation_steps > 1:
        return {"loss": {"gradients": whole_bytes}, "backward": {"gradients": whole_bytes}}
    trainable = max(1, parameters.trainable)
    return {
        moment: {"gradients": whole_bytes * parameters.gradients_so_far(moment) // trainable}
        for moment, phase in PHASES.items()
        if phase == "backward"
    }
