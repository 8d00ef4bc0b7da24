"""`estimate_memory`: the peak of an accelerator and of a host under a layout, with measured corrections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any, Literal

from ..specs.errors import ConfigError, UsageError
from ..specs.hardware import HardwareSpec, gpu_catalog
from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec, adapted_experts
from ..specs.units import pinned_block_bytes as pinned_block_bytes
from .activations import (
    SMALLEST_MASK_TOKENS,
    ActivationEstimate,
    ActivationSource,
    Attention,
    SelectiveBytes,
    activation_mode,
    cached_activations,
    has_fused_loss,
    loss_tiles,
    mlp_tiles,
    norm_backward_bytes,
    outside_without_norm,
    tiled_mlp_elements,
    with_attention,
    with_tiled_mlp,
)
from .loss import distillation_loss_terms
from .model_states import buffer_terms, model_state_terms, optimizer_state_bytes, viewed_elements
from .rank_parameters import (
    PHASES,
    Moment,
    Phase,
    RankParameters,
    RankShare,
    Terms,
    at_moments,
    engine_parameters,
    fullest_by_phase,
    growing_gradients,
    rank_parameters,
    rank_shares,
    share_parameters,
)
from .second_models import second_model_host_terms, second_model_loading_bytes, second_model_terms

_ONLY_ON_THE_LAST = ("loss", "head_gradient")
_CASTING_NORMS = ("gemma2", "gemma3_text", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose norms save a copy of their input in fp32 instead of the input."""


def share_moment_terms(
    strategy: Layout,
    share: RankShare,
    job: TrainingJob,
    activations: ActivationSource | None = None,
    *,
    unmasked: Attention = "auto",
    gpu: bool = True,
) -> dict[Moment, Terms]:
    """Return the named tensor bytes of a rank's share at each moment of a training step.

    `activations` may be a trace of the complete model, which is too large under tensor parallelism.

    Raises:
        UnknownFamilyError: no coefficients are stored, and there is no `activations`.
    """
    model, mode = share.model, activation_mode(strategy, job)
    # Tiles of the loss are part of the eager one, of which a trace contains the loss that it ran.
    tiles_loss = job.loss == "chunked" and activations is None and not has_fused_loss(model, strategy, job, gpu=gpu)
    source = activations or cached_activations(
        model, replace(job, loss="eager") if tiles_loss else job, unmasked=unmasked
    )
    traced = source(strategy.micro_batch_size, mode)
    if tiles_loss:
        traced = _with_tiled_loss(strategy, model, job, traced)
    if strategy.tiled_mlp:
        traced = with_tiled_mlp(traced, 1 / mlp_tiles(model, ceil(job.seq_len_tokens / (strategy.sp * strategy.cp))))
    tokens = strategy.micro_batch_size * job.seq_len_tokens
    traced = with_attention(traced, model.dimensions, tokens, layout=strategy, element=job.compute_bytes, on_gpu=gpu)
    if strategy.cp > 1 and job.seq_len_tokens // strategy.cp < SMALLEST_MASK_TOKENS:
        # A rank has two parts of a sequence, which Transformers takes for packed documents and makes a boolean mask.
        mask = tokens * job.seq_len_tokens // strategy.cp
        traced = replace(traced, outside_layer_bytes=traced.outside_layer_bytes + mask)
    if not share.has_head:
        traced = outside_without_norm(traced, model, job, strategy.micro_batch_size, mode)
    moments = _micro_batch_terms(strategy, model, job, traced)
    if share.stage is not None:
        layers = model.dimensions.num_layers
        layer_bytes = _kept_bytes(strategy, model, job, traced)(layers)
        moments = _stage_terms(moments, share, strategy, job, traced, layer_bytes)
    parts = (
        moments,
        _weight_copies(strategy, model, job, traced.autocast_weight_copy_bytes_per_parameter),
        second_model_terms(strategy, job),
    )
    combined: dict[Moment, Terms] = {}
    for moment, same in _states_and_buffers(strategy, model, job).items():
        combined[moment] = terms = dict(same)
        for part in parts:
            for name, count in part[moment].items():
                if count:
                    terms[name] = terms.get(name, 0) + count
    if not gpu and model.tied_embeddings and job.method == "full" and strategy.engine in ("single", "ddp"):
        # torch adds the gradients of head and embedding in place on CUDA (metered on an H100), but not on the CPU.
        combined["embedding_backward"]["module_gradients"] += job.trained_weight_bytes * model.embedding_parameters
    if strategy.zero_stage == 3 and tiled_mlp_elements(strategy, model, job):
        layers = model.dimensions.num_layers
        recomputed = strategy.recomputed_layers(layers)
        for moment, again in (("last_layer_backward", recomputed == layers), ("first_layer_backward", recomputed > 0)):
            combined[moment] = _in_tiles_or_between_modules(combined[moment], strategy, model, job, traced, again=again)
    return combined


def _in_tiles_or_between_modules(
    terms: Terms, strategy: Layout, model: ModelSpec, job: TrainingJob, traced: ActivationEstimate, *, again: bool
) -> Terms:
    """Return the terms of a layer's backward pass under ZeRO-3, in the tiles of its MLP or in the norm before it.

    A tiled MLP is one module, inside of which ZeRO-3 copies and reduces nothing. Its hook on the norm's input
    (`PostBackwardFunctionModule`) keeps the gradient of the residual apart until the norm's backward pass ends, as the
    norm's cast does in 16 bit.
    """
    mlp = traced.mlp
    if mlp is None:
        return terms
    transient = traced.recompute_backward_transient_bytes if again else traced.backward_transient_bytes
    parts = mlp.recompute_backward_transient if again else mlp.backward_transient
    inside = (transient - mlp.tiled(parts, 0, backward=True)) // (strategy.sp * strategy.cp)
    # The gradient of a tied head waits for that of the embedding.
    waits = model.tied_embeddings and job.method == "full"
    waiting = job.compute_bytes * model.embedding_parameters if waits else 0
    between = {name: terms.get(name, 0) for name in ("module_gradients", "reduce_copy", "prefetch_copies")}
    residual = checkpoint_bytes(strategy, traced) if activation_mode(strategy, job) == "fp32" else 0
    if inside + terms.get("tile_gradients", 0) < residual + sum(between.values()) - waiting:
        changed = {"tile_gradients": 0, "backward_transient": terms["backward_transient"] - inside + residual}
    else:
        changed = dict.fromkeys(between, 0) | {"module_gradients": waiting}
    return {name: count for name, count in (terms | changed).items() if count}


def _with_tiled_loss(
    strategy: Layout, model: ModelSpec, job: TrainingJob, traced: ActivationEstimate
) -> ActivationEstimate:
    """Return the bytes of a loss in tiles: those of one tile's eager loss, and the gradient of the hidden states.

    The forward pass keeps nothing; the backward pass computes each tile again and writes into the gradient
    (`SequenceTiledCompute` in deepspeed/runtime/sequence_parallel/ulysses_sp.py, 0.19.8).
    """
    ranks = strategy.sp * strategy.cp
    tokens = strategy.micro_batch_size * job.seq_len_tokens // ranks
    tiles = loss_tiles(model, tokens)
    width = 4 if activation_mode(strategy, job) != "bf16" else 2
    # `_loss_terms` divides by the ranks that share a sequence.
    hidden_gradient = width * ranks * tokens * model.dimensions.hidden_size
    forward = ceil(traced.loss_forward_peak_bytes / tiles)
    backward = hidden_gradient + max(forward, ceil(traced.loss_backward_peak_bytes / tiles))
    norm = norm_backward_bytes(width) * ranks * tokens * model.dimensions.hidden_size
    return replace(
        traced,
        loss_forward_peak_bytes=forward,
        loss_kept_bytes=0,
        loss_backward_peak_bytes=max(backward, norm),
        loss_tiles=tiles,
        source=f"{traced.source}; loss in {tiles} tiles",
    )


def checkpoint_bytes(strategy: Layout, traced: ActivationEstimate) -> int:
    """Return the bytes of the input of one recomputed layer on a rank."""
    return traced.checkpointed_bytes_per_layer // (strategy.sp * strategy.cp)


def offloaded_checkpoints(strategy: Layout, layers: int) -> int:
    """Return how many of a rank's layer inputs wait in host memory."""
    return min(strategy.offloaded_checkpoints, strategy.recomputed_layers(layers))


STAGING_BUFFERS = 2
"""Layer inputs on the accelerator while others are in host memory: one in use, and one that a side stream copies."""


def _states_and_buffers(strategy: Layout, model: ModelSpec, job: TrainingJob) -> dict[Moment, Terms]:
    """Model buffers, states and communication buffers, which are the same for many candidates of a search.

    Of the batch, they depend only on whether gradients accumulate, and of recomputation only the gathers of ZeRO-3.
    """
    same: dict[str, Any] = {
        "micro_batch_size": 1,
        "gradient_accumulation_steps": min(2, strategy.gradient_accumulation_steps),
    }
    layers = model.dimensions.num_layers
    if strategy.zero_stage != 3:
        same |= {"gradient_checkpointing": False, "checkpointed_layers": None}
    elif not viewed_elements(model, job) and 0 < strategy.recomputed_layers(layers) < layers:
        same["checkpointed_layers"] = 1
    return _cached_states_and_buffers(strategy.changed(**same), model, job)


@lru_cache(maxsize=2048)
def _cached_states_and_buffers(strategy: Layout, model: ModelSpec, job: TrainingJob) -> dict[Moment, Terms]:
    parameters = share_parameters(model, job, ep=strategy.ep)
    buffers = buffer_terms(strategy, model, job, parameters)
    combined: dict[Moment, Terms] = {}
    for moment, terms in model_state_terms(strategy, model, job, parameters).items():
        combined[moment] = {"model_buffers": model.buffer_bytes} | terms
        for name, count in buffers[moment].items():
            combined[moment][name] = combined[moment].get(name, 0) + count
        combined[moment] = {name: count for name, count in combined[moment].items() if count}
    return combined


def _micro_batch_terms(
    strategy: Layout, model: ModelSpec, job: TrainingJob, traced: ActivationEstimate
) -> dict[Moment, Terms]:
    # The activations of all layers exist until the last layer's backward pass; the first layer's is the last to run.
    layers, ranks = model.dimensions.num_layers, strategy.sp * strategy.cp
    recomputed = strategy.recomputed_layers(layers)
    sequence_tokens = strategy.micro_batch_size * job.seq_len_tokens
    tile_gradients = _tile_gradients(strategy, model, job)
    kept_bytes = _kept_bytes(strategy, model, job, traced)
    offloaded, checkpoint = offloaded_checkpoints(strategy, layers), checkpoint_bytes(strategy, traced)

    def saved(count: int) -> Terms:
        terms: Terms = {"activations": (kept_bytes(count) + traced.outside_layer_bytes) // ranks}
        # The first layer has none before it, whose input would be copied meanwhile.
        staging = min(STAGING_BUFFERS, offloaded, count) * checkpoint
        return terms | {"checkpoint_staging": staging} if staging else terms

    def waiting() -> Terms:
        # The input of the last layer is on the host at its end, and comes back for its backward pass.
        return {name: count for name, count in saved(layers).items() if name != "checkpoint_staging"}

    # In 16 bits, norms of these families save a copy of their input in fp32, so that the input itself is freed.
    casts = activation_mode(strategy, job) == "bf16" and not job.use_liger_kernel
    frees_input = casts and model.model_type in _CASTING_NORMS

    def backward(count: int, *, again: bool) -> Terms:
        _, transient = _layer_bytes(strategy, model, job, traced, recomputed=again)
        terms = saved(count) | {"backward_transient": transient // ranks, **_dequantized(model, job)}
        if frees_input and "checkpoint_staging" in terms:
            terms["checkpoint_staging"] -= checkpoint
        return terms | {"tile_gradients": tile_gradients} if tile_gradients else terms

    # In the forward pass, a layer's input is on the accelerator until the layer ends.
    forward = saved(layers) | ({"checkpoint_staging": checkpoint} if offloaded else {})
    if recomputed == layers or strategy.cp > 1:
        # Most is kept at the last layer, which is recomputed only if all layers are.
        own = _kept_products(traced).forward_transient_bytes if strategy.keeps_products else 0
        forward |= {"forward_transient": (own or traced.forward_transient_bytes) // ranks}
    loss = _loss_terms(strategy, model, job, traced)
    step: Terms = {}
    if strategy.engine == "deepspeed" and strategy.gradient_checkpointing and job.method != "full":
        # The loss exists during DeepSpeed's step, and with it the embedding's output and its gradient, which
        # checkpointing requires (transformers 5.17.0, `enable_input_require_grads`).
        step["activations"] = 2 * job.compute_bytes * sequence_tokens * model.dimensions.hidden_size // ranks
    around = waiting() | _dequantized(model, job)
    return {
        "init": {},
        "second_models_forward": {},
        "last_layer_forward": forward,
        "forward_end": around | loss["forward_end"],
        "loss_backward": around | loss["loss_backward"],
        "head_backward": waiting() | loss["head_backward"],
        "after_head": waiting(),
        "last_layer_backward": backward(layers, again=recomputed == layers),
        "after_last_layer": saved(layers - 1),
        "first_layer_backward": backward(1, again=recomputed > 0),
        "after_first_layer": saved(0),
        "embedding_backward": {},
        "step": step,
    }


def _tile_gradients(strategy: Layout, model: ModelSpec, job: TrainingJob) -> int:
    """Return the bytes of a tiled MLP's gradients: the sum over tiles, which the engine gets, and a tile's own.

    A tile's inner tensors are at their peak when only the gradient of the last matrix exists. Experts have many more
    weights than inner tensors in a tile, so that their fullest moment has all gradients.
    """
    in_layer = tiled_mlp_elements(strategy, model, job) if job.method == "full" else 0
    matrices = [p for p in model.parameters if p.group == "mlp" and p.in_layer]
    if not in_layer:
        return 0
    is_mixture = any(p.kind == "experts" for p in matrices)
    own = in_layer if is_mixture else max(p.numel for p in matrices)
    width = 2 if activation_mode(strategy, job) == "bf16" else 4
    return width * (in_layer + own)


def _kept_bytes(
    strategy: Layout, model: ModelSpec, job: TrainingJob, traced: ActivationEstimate
) -> Callable[[int], int]:
    """Return the bytes that the first layers keep until their backward passes, as a function of their number.

    The first layers are the recomputed ones.
    """
    most_recomputed = strategy.recomputed_layers(model.dimensions.num_layers)
    saved, _ = _layer_bytes(strategy, model, job, traced, recomputed=False)
    checkpointed = _layer_bytes(strategy, model, job, traced, recomputed=True)[0] if most_recomputed else 0
    offloaded = offloaded_checkpoints(strategy, model.dimensions.num_layers)

    def kept(layers: int) -> int:
        recomputed = min(layers, most_recomputed)
        return max(0, recomputed - offloaded) * checkpointed + (layers - recomputed) * saved

    return kept


def _layer_bytes(
    strategy: Layout, model: ModelSpec, job: TrainingJob, traced: ActivationEstimate, *, recomputed: bool
) -> tuple[int, int]:
    """Return the bytes that a layer keeps until its backward pass, and the temporary bytes of that pass."""
    tokens = strategy.micro_batch_size * job.seq_len_tokens
    more = model.residual_dropout_masks * tokens * model.dimensions.hidden_size
    if recomputed and strategy.keeps_products:
        selective = _kept_products(traced)
        return selective.kept_bytes_per_layer, selective.backward_transient_bytes + more
    if recomputed:
        return traced.checkpointed_bytes_per_layer, traced.recompute_backward_transient_bytes + more
    return traced.saved_bytes_per_layer + more, traced.backward_transient_bytes


def _kept_products(traced: ActivationEstimate) -> SelectiveBytes:
    if traced.selective is None:
        rule = "is not supported for this model, because the bytes of kept products were not traced"
        fix = "use --gradient-checkpointing auto"
        raise UsageError(ConfigError(where="gradient_checkpointing", value="selective", rule=rule, fix=fix))
    return traced.selective


def _weight_copies(strategy: Layout, model: ModelSpec, job: TrainingJob, copy_bytes: int) -> dict[Moment, Terms]:
    """Copies of weights that the forward pass makes and the backward pass needs.

    Autocast copies fp32 matrices; with adapters only theirs, because frozen weights are in 16 bit. PEFT computes the
    weight of an adapted expert as base + update and keeps the sum. With checkpointing, sums are freed after their
    layer's forward pass and autocast copies after the complete forward pass; the backward pass makes both again.
    """
    adapted = [] if job.method == "full" else adapted_experts(model, job.lora_targets)
    if not copy_bytes and not adapted:
        return at_moments({})
    if job.method == "full":
        matrices = model.linear_parameters(include_head=True)
        matrices += model.embedding_parameters if model.tied_embeddings else 0
    else:
        matrices = share_parameters(model, job, ep=strategy.ep).trainable
    experts = [job.compute_bytes * parameter.numel for parameter in adapted if parameter.kind == "experts"]
    layers = max(1, model.dimensions.num_layers)
    all_layers = {"autocast_weight_copies": copy_bytes * matrices, "adapted_expert_copies": layers * sum(experts)}
    one_layer = {name: count // layers for name, count in all_layers.items()}
    # PEFT makes the sums of a layer one after the other, each with a temporary update.
    fullest = max((sum(experts[: index + 1]) + count for index, count in enumerate(experts)), default=0)
    making = {"adapted_expert_update": fullest - sum(experts)}
    recomputed = strategy.recomputed_layers(layers)
    if not recomputed:
        return at_moments(
            {},
            last_layer_forward={**all_layers, **making},
            **dict.fromkeys(("forward_end", "loss_backward", "head_backward", "after_head"), all_layers),
            **dict.fromkeys(("last_layer_backward", "after_last_layer"), all_layers),
            **dict.fromkeys(("first_layer_backward", "after_first_layer"), one_layer),
        )
    again = one_layer | making
    # Layers that are not recomputed keep their copies for the backward pass.
    held = {name: count * (layers - recomputed) // layers for name, count in all_layers.items()}
    autocast = held | {"autocast_weight_copies": all_layers["autocast_weight_copies"]}
    # Autograd needs that of the head.
    head = model.embedding_parameters if model.tied_embeddings else model.tail_parameters
    of_head = copy_bytes * head if job.method == "full" else 0
    of_loss = held | {"autocast_weight_copies": held["autocast_weight_copies"] + of_head}
    return at_moments(
        {},
        last_layer_forward={**again, **autocast} if recomputed == layers else {**making, **autocast},
        forward_end=autocast,
        **dict.fromkeys(("loss_backward", "head_backward"), of_loss),
        after_head=held,
        last_layer_backward=again if recomputed == layers else held,
        after_last_layer={name: max(0, count - one_layer[name]) for name, count in held.items()},
        first_layer_backward=again,
    )


def _dequantized(model: ModelSpec, job: TrainingJob) -> Terms:
    if job.method != "qlora":
        return {}
    widest = max((p.numel for p in model.parameters if p.kind == "linear" and p.in_layer), default=0)
    return {"dequantized_weight": job.compute_bytes * widest}


@lru_cache(maxsize=256)
def _loss_terms(
    strategy: Layout, model: ModelSpec, job: TrainingJob, traced: ActivationEstimate
) -> dict[Moment, Terms]:
    """Head and loss. A chunked loss and a distillation loss compute the head's gradient in the forward pass."""
    if job.teacher is not None:
        return distillation_loss_terms(strategy, model, job)
    ranks, tiles, more = strategy.sp * strategy.cp, traced.loss_tiles, Terms()
    tokens = strategy.micro_batch_size * job.seq_len_tokens // ranks
    all_logits = job.compute_bytes * tokens * model.dimensions.vocab_size
    backward = traced.loss_backward_peak_bytes // ranks
    if job.loss == "chunked" and job.method == "full":
        width = 2 if activation_mode(strategy, job) == "bf16" else 4
        # The gradient of a single tile appears after its logits, that of later ones beside the sum of those before.
        head = width * model.embedding_parameters
        more["head_gradient"] = 0 if tiles == 1 else head
        if tiles > 1:
            hidden = width * tokens * model.dimensions.hidden_size
            backward = max(backward, hidden + head + all_logits // tiles)
    gathered: Terms = {}
    if tiles and strategy.engine == "fsdp2":
        # The tiles run after the gradient has reached the unit of the head, which prefetches that of the last layer.
        gathered["gathered_parameters"] = job.compute_bytes * engine_parameters(model, job).layer_parameter_count
    return {
        "forward_end": ({} if tiles else more) | {"loss": traced.loss_forward_peak_bytes // ranks},
        "loss_backward": more | gathered | {"loss": backward},
        "head_backward": {"loss": all_logits if job.loss != "chunked" else 0},
    }


def _stage_terms(
    moments: Mapping[Moment, Terms],
    share: RankShare,
    strategy: Layout,
    job: TrainingJob,
    traced: ActivationEstimate,
    layer_bytes: int,
) -> dict[Moment, Terms]:
    """Return the activation terms of a pipeline stage.

    Follows `runtime/pipe/engine.py` of DeepSpeed 0.19.8. A stage keeps a received tensor until its gradient is sent,
    clones it for the forward pass, keeps a sent tensor until its backward pass, and has one persistent receive buffer.
    """
    stage = share.stage
    assert stage is not None, "only a pipeline has stages"
    border = job.compute_bytes * strategy.micro_batch_size * job.seq_len_tokens * share.model.dimensions.hidden_size
    borders = (0 if stage.has_embedding else border) + (0 if stage.has_head else border)
    others = share.micro_batches_in_flight - 1
    of_others = others * (layer_bytes + traced.outside_layer_bytes + borders)
    by_moment: dict[Moment, Terms] = {}
    for moment, terms in moments.items():
        here = {name: count for name, count in terms.items() if stage.has_head or name not in _ONLY_ON_THE_LAST}
        here["stage_borders"] = border
        if PHASES[moment] in ("loss", "backward"):
            here["stage_borders"] += borders
            here["activations_in_flight"] = of_others
        by_moment[moment] = here
    return by_moment


SMALLEST_RATIO, LARGEST_RATIO = 0.5, 2.0
"""Outside of these, the run differed from the plan, or the prediction has an error that no factor corrects."""

Factors = tuple[float, float, float]
"""Low, middle and high of a factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """Measurements of a training run on accelerators, with the prediction of its plan."""

    identifier: str
    """SHA-256 of the measurement, in hexadecimal."""
    gpu: str
    architecture: str
    model: str
    layout: str
    """The strategy's label, such as `zero2`."""
    ranks: int
    predicted_allocated_bytes: int
    """Tensor bytes at the plan's peak."""
    allocated_peak_bytes: int
    """Largest tensor bytes of any rank."""
    reserved_peak_bytes: int
    """Largest bytes that the caching allocator of any rank held."""
    outside_allocator_bytes: int | None = None
    """Device memory in use outside the allocator at the end (context, communicators, other processes), if known."""
    step_seconds: float | None = None
    """Median step of the slowest rank without the first steps; `None` if there were no others."""

    @property
    def ratio(self) -> float:
        """Reserved peak divided by predicted tensor bytes."""
        return self.reserved_peak_bytes / self.predicted_allocated_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Measured runs that adjust the memory interval of plans."""

    runs: tuple[MeasuredRun, ...]

    def ratios(self, *, gpu: str, architecture: str) -> tuple[float, ...]:
        return tuple(run.ratio for run in self.runs if (run.gpu, run.architecture) == (gpu, architecture))


def moved_factors(published: Factors, ratios: Sequence[float]) -> Factors:
    """Return the published interval moved towards `n` observed ratios `r`; the published one counts as one run.

    `low = min(min r, (low + n·min r) / (n + 1))`, `high = max(max r, (high + n·max r) / (n + 1))`,
    `middle = (middle + n·mean r) / (n + 1)`. Without ratios nothing changes; every ratio stays inside; a further ratio
    within those seen never widens the interval.

    >>> moved_factors((1.0, 1.5, 2.0), [1.5])
    (1.25, 1.5, 1.75)
    """
    low, middle, high = published
    if not ratios:
        return published
    count = len(ratios)
    smallest, largest, mean = min(ratios), max(ratios), sum(ratios) / count
    return (
        min(smallest, (low + count * smallest) / (count + 1)),
        (middle + count * mean) / (count + 1),
        max(largest, (high + count * largest) / (count + 1)),
    )


def check_ratio(run: MeasuredRun) -> None:
    """Check that the measured peak of a run is plausible for its plan.

    Raises:
        UsageError: the reserved peak is far from the prediction.
    """
    if not SMALLEST_RATIO <= run.ratio <= LARGEST_RATIO:
        raise UsageError(
            ConfigError(
                where="reserved peak over predicted allocated bytes",
                value=round(run.ratio, 3),
                rule=f"must be from {SMALLEST_RATIO} to {LARGEST_RATIO} for calibration",
                fix="compare the run with its plan: model, sequence length, batch and accelerator",
            )
        )


PROCESS_BYTES = 3 * 10**9
"""Resident memory of one rank's Python process with torch, DeepSpeed and its data workers (an assumption)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes that one node needs outside its accelerators."""

    peak_bytes_per_node: int
    """Largest host memory of one node during loading and training."""
    capacity_bytes_per_node: int
    terms: Terms
    nvme_bytes_per_node: int


def estimate_host_memory(
    strategy: Layout,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    parameters: RankParameters,
    activations: ActivationSource | None = None,
) -> HostMemory:
    """Return host and NVMe bytes of one node, for loading or training, whichever needs more."""
    ranks = hardware.gpus_per_node
    # ZenFlow and SuperOffload step in a process of their own for each rank.
    per_rank = 1 if strategy.offload_variant == "none" else 2
    processes: Terms = {"processes": per_rank * ranks * PROCESS_BYTES}
    loading = loading_terms(strategy, model, hardware, job, parameters)
    training = processes | {
        name: ranks * count for name, count in offload_terms(strategy, model, job, parameters).items()
    }
    for second in job.second_models:
        training |= second_model_host_terms(second, strategy, job, ranks)
    if count := offloaded_checkpoints(strategy, model.dimensions.num_layers):
        traced = (activations or cached_activations(model, job))(
            strategy.micro_batch_size, activation_mode(strategy, job)
        )
        size = checkpoint_bytes(strategy, traced)
        training["offloaded_checkpoints"] = ranks * count * size
        rounding = ranks * count * (pinned_block_bytes(size) - size)
        training["pinned_rounding"] = training.get("pinned_rounding", 0) + rounding
    terms = max(loading, training, key=lambda candidate: sum(candidate.values()))
    # Swap files of one rank: master weights, states and gradients, and with parameter offload the weights.
    shard, nvme_bytes = parameters.shard(strategy), 0
    if strategy.offload_optimizer == "nvme":
        states = optimizer_state_bytes(strategy, model, job, parameters.trainable)
        nvme_bytes += 4 * shard + parameters.state_shard(states, strategy) + 4 * shard
    if strategy.offload_param == "nvme":
        nvme_bytes += job.compute_bytes * shard + parameters.frozen_shard_bytes(strategy) - parameters.scale_bytes
    return HostMemory(
        peak_bytes_per_node=sum(terms.values()),
        capacity_bytes_per_node=hardware.host_bytes_per_node,
        terms={name: count for name, count in terms.items() if count},
        nvme_bytes_per_node=ranks * nvme_bytes,
    )


def loading_terms(
    strategy: Layout, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob, parameters: RankParameters
) -> Terms:
    """Return host bytes of one node while a checkpoint is loaded, which no batch or recomputation changes."""
    ranks, width = hardware.gpus_per_node, job.compute_bytes
    if job.method == "qlora":
        # Transformers reads and quantizes one tensor of the checkpoint after the other on the accelerator
        # (core_model_loading.py:1623). Every rank quantizes what an engine shards in host memory
        # (plugins/bitsandbytes.py, `on_host`).
        shards = strategy.engine == "fsdp2" or strategy.zero_stage == 3
        loaded = ranks * (width * model.largest_stored_tensor + (parameters.frozen_bytes if shards else 0))
    elif strategy.zero_stage == 3:
        # ZeRO-3 copies from memory-mapped files module by module (transformers/modeling_utils.py:4397), except for
        # experts that are fused during loading, which the first rank materializes (first_rank_loading.py).
        loaded = width * model.parameter_count if model.weight_conversion else 0
    elif strategy.pp > 1:
        # A rank reads its stage layer by layer and keeps its tensor-parallel part of each.
        largest = max(share.model.parameter_count for share in rank_shares(strategy, model, job))
        loaded = ranks * width * (largest + (model.layer_parameter_count if strategy.tp > 1 else 0))
    elif strategy.engine == "fsdp2" and job.precision == "fp8":
        # torchao's layers are made before FSDP2 shards them, so that every rank reads all weights.
        loaded = ranks * 4 * model.parameter_count
    elif strategy.engine == "fsdp2":
        # Only the first rank holds the weights. It converts a tensor to fp32 when it distributes it
        # (plugins/transformers/first_rank_loading.py).
        converted = 4 * model.largest_parameter if job.method == "full" and width < 4 else 0
        loaded = width * model.parameter_count + converted
    else:
        fp32_weights = job.method == "full" and strategy.engine != "deepspeed"
        loaded = ranks * (4 if fp32_weights else width) * model.parameter_count
    loaded += sum(second_model_loading_bytes(second, strategy, job, ranks) for second in job.second_models)
    return {"processes": ranks * PROCESS_BYTES, "checkpoint_loading": loaded}


def stock_loading_bytes(strategy: Layout, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> int:
    """Return the host memory of one node while FSDP2 or ZeRO-3 loads without Shardwright's patches.

    Every rank holds the complete model, which Accelerate 1.15.0 converts to fp32 before FSDP2 shards it
    (accelerate/utils/fsdp_utils.py:813). Under ZeRO-3 every rank fuses experts before Transformers 5.24.0.
    """
    fuses = strategy.zero_stage == 3 and model.weight_conversion
    if job.method == "qlora" or not (fuses or strategy.engine == "fsdp2"):
        return 0
    width = 4 if job.method == "full" and strategy.engine == "fsdp2" else job.compute_bytes
    return hardware.gpus_per_node * (PROCESS_BYTES + width * model.parameter_count)


def offload_terms(strategy: Layout, model: ModelSpec, job: TrainingJob, parameters: RankParameters) -> Terms:
    """Return host bytes of one rank under offload (DeepSpeed: measured 18/N to 22/N bytes per trainable element)."""
    if strategy.offload_optimizer == "none":
        return {}
    width = job.compute_bytes
    shard = parameters.shard(strategy)
    states = parameters.state_shard(optimizer_state_bytes(strategy, model, job, parameters.trainable), strategy)
    frozen = parameters.frozen_shard_bytes(strategy) - parameters.scale_bytes
    if strategy.engine == "fsdp2":
        return {
            "offloaded_parameters": 4 * shard + frozen,
            "offloaded_gradients": 4 * shard,
            "offloaded_optimizer_states": states,
        }
    if strategy.zero_stage == 3:
        zero = strategy.zero
        accumulation = 4 if zero.gradient_accumulation_fp32 else width
        pinned = [accumulation * shard]
        terms: Terms = {"offloaded_gradients": accumulation * shard}
        if strategy.offload_optimizer == "cpu":
            # fp32 gradients are pinned per sub-group (stage3.py:1338).
            sub_group = min(shard, zero.sub_group_size)
            pinned += [4 * sub_group] * (shard // sub_group) + [4 * (shard % sub_group)]
            terms["offloaded_gradients"] += 4 * shard
            terms |= {"offloaded_master_weights": 4 * shard, "offloaded_optimizer_states": states}
        else:
            swap = zero.optimizer_buffer_count * 4 * min(shard, zero.sub_group_size)
            pinned.append(swap)
            terms["nvme_optimizer_buffers"] = swap
        if strategy.offload_param == "cpu":
            pinned.append(width * shard)
            terms["offloaded_parameters"] = width * shard + frozen
        elif strategy.offload_param == "nvme":
            swap = zero.parameter_buffer_count * zero.parameter_buffer_elements * width
            pinned.append(swap)
            terms["nvme_parameter_buffers"] = swap
        if strategy.offload_variant == "superoffload":
            # The optimizer's process copies the gradients of a sub-group (superoffload_utils.py:39).
            pinned.append(4 * min(shard, zero.sub_group_size))
            terms["offloaded_gradients"] += pinned[-1]
        terms["pinned_rounding"] = sum(pinned_block_bytes(block) - block for block in pinned)
        return terms
    if strategy.offload_variant == "zenflow":
        # The optimizer's process has a stale copy of the weights and, like the gradients, two of each moment.
        pinned = [4 * shard, 4 * shard, width * shard]
        return {
            "offloaded_master_weights": 8 * shard,
            "offloaded_optimizer_states": 2 * states,
            "offloaded_gradients": sum(pinned) + width * parameters.largest_trainable,
            "pinned_rounding": sum(pinned_block_bytes(block) - block for block in pinned),
        }
    pinned = [4 * shard, 4 * shard, width * shard]
    if strategy.gradient_accumulation_steps > 1 and strategy.zero_stage == 2:
        pinned.append(width * shard)
    return {
        "offloaded_master_weights": 4 * shard,
        "offloaded_optimizer_states": states,
        "offloaded_gradients": sum(pinned) - 4 * shard + width * parameters.largest_trainable,
        "pinned_rounding": sum(pinned_block_bytes(block) - block for block in pinned),
    }


_MB = 10**6


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Range of a quantity that differs between machines."""

    low: float
    middle: float
    high: float
    """Largest published value, used to decide whether a plan fits."""


CONTEXT_BYTES = Interval(low=350 * _MB, middle=800 * _MB, high=1000 * _MB)
"""CUDA context with kernels: 0.3-0.5 GB (arXiv 2411.06465), 0.80 GB measured in a training process on an H100
(docs/measurements/gpu.md), 1 GB with kernels (Ultra-Scale Playbook)."""

COMMUNICATOR_BYTES = Interval(low=150 * _MB, middle=400 * _MB, high=700 * _MB)
"""Buffers of one NCCL communicator: about 0.5 GB (arXiv 2411.06465)."""

RESERVED_OVER_ALLOCATED = Interval(low=1.007, middle=1.038, high=1.093)
"""Allocator blocks divided by tensor bytes: minimum, median and maximum of 344 ranks on B200 (SimuMax v1.2)."""


ALLOCATED_OVER_PREDICTED = Interval(low=0.95, middle=1.0, high=1.05)
"""Tensor bytes divided by their prediction: the largest errors of the grid of measured runs, rounded outwards
(docs/measurements/memory.md)."""

EXPANDABLE_FROM_TOKENS = 32_768
"""Sequence length from which launches set `expandable_segments:True`: with 32,768 tokens of a vocabulary of 128,256 an
H100 ran out of memory with 12 GB of free blocks that no tensor fitted (docs/measurements/gpu.md)."""

EXPANDABLE_RESERVED = Interval(low=1.0, middle=1.01, high=1.02)
"""Allocator blocks divided by tensor bytes with expandable segments. Before an allocation fails, the allocator unmaps
all complete pages of free blocks (`release_cached_blocks`, c10/cuda/CUDACachingAllocator.cpp), so that a gap between
tensors wastes less than two pages of 20 MiB: 1.6 GB of 80 GB if all inputs of 40 layers have gaps."""

RESERVED_OVER_PREDICTED = (
    RESERVED_OVER_ALLOCATED.low * ALLOCATED_OVER_PREDICTED.low,
    RESERVED_OVER_ALLOCATED.middle * ALLOCATED_OVER_PREDICTED.middle,
    RESERVED_OVER_ALLOCATED.high * ALLOCATED_OVER_PREDICTED.high,
)
"""Product of both; measured runs move this interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """Bytes on the fullest accelerator."""

    peak_bytes: int
    """Expected peak with runtime and allocator overhead."""
    low_bytes: int
    high_bytes: int
    """Upper end of the interval, used to decide whether the layout fits."""
    allocated_bytes: int
    """Tensors alone at the peak."""
    capacity_bytes: int
    """Memory that a process can allocate on the accelerator."""
    phase: Phase
    terms: Terms
    phases: dict[str, int]
    """Tensor bytes of every phase."""
    calibrated_runs: int = 0
    """Measured runs that moved the allocator's interval; 0 for the published interval."""
    stage: int | None = None
    """Index of the fullest pipeline stage, which the other fields describe; `None` without a pipeline."""

    @property
    def fits(self) -> bool:
        return self.high_bytes <= self.capacity_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Memory of a layout on the accelerator, the host and NVMe."""

    gpu: GpuMemory
    host: HostMemory
    nvme_capacity_bytes_per_node: int

    @property
    def fits(self) -> bool:
        return self.lacks is None

    @property
    def lacks(self) -> Literal["GPU", "host", "NVMe"] | None:
        """The memory that is too small, the accelerator's first; `None` if the layout fits."""
        if not self.gpu.fits:
            return "GPU"
        if self.host.peak_bytes_per_node > self.host.capacity_bytes_per_node:
            return "host"
        return "NVMe" if self.host.nvme_bytes_per_node > self.nvme_capacity_bytes_per_node else None

    @property
    def fullest(self) -> tuple[str, int, int]:
        """The memory that is fullest in relation to its size, in words, with needed bytes and size."""
        sizes = (
            ("GPU memory", self.gpu.high_bytes, self.gpu.capacity_bytes),
            ("host memory per node", self.host.peak_bytes_per_node, self.host.capacity_bytes_per_node),
            ("NVMe per node", self.host.nvme_bytes_per_node, self.nvme_capacity_bytes_per_node),
        )
        return max(sizes, key=lambda size: size[1] / max(1, size[2]))


def estimate_memory(
    strategy: Layout,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    activations: ActivationSource | None = None,
    calibration: Calibration | None = None,
) -> MemoryEstimate:
    """Return the memory of a layout: `max over phases of (states + buffers + activations)` plus overheads.

    Raises:
        UsageError: there are fewer layers than pipeline stages.
        UnknownFamilyError: no coefficients are stored, and there is no `activations`.
    """
    ratios = calibration.ratios(gpu=hardware.gpu, architecture=model.architecture) if calibration else ()
    expandable = expands_segments(job, hardware)
    stages = []
    for share in rank_shares(strategy, model, job):
        phases = fullest_by_phase(share_moment_terms(strategy, share, job, activations, gpu=hardware.gpu != "CPU"))
        phase = max(phases, key=lambda name: sum(phases[name].values()))
        index = None if share.stage is None else share.stage.index
        stages.append(_with_overheads(strategy, hardware, phase, phases, ratios, stage=index, expandable=expandable))
    return MemoryEstimate(
        gpu=max(stages, key=lambda stage: stage.high_bytes),
        host=estimate_host_memory(strategy, model, hardware, job, rank_parameters(model, job, strategy), activations),
        nvme_capacity_bytes_per_node=hardware.nvme_bytes_per_node,
    )


def terms_by_phase(
    strategy: Layout, model: ModelSpec, job: TrainingJob, *, stage: int | None = None, gpu: bool = True
) -> dict[Phase, Terms]:
    """Return the named tensor bytes of every phase at its fullest moment, whose sums are `GpuMemory.phases`.

    For a plan with traced activations the sums differ, because traces are not stored. `stage` is `GpuMemory.stage`.

    Raises:
        UnknownFamilyError: neither coefficients nor a bound from the model's structure exist.
    """
    shares = rank_shares(strategy, model, job)
    share = next(share for share in shares if (None if share.stage is None else share.stage.index) == stage)
    return fullest_by_phase(share_moment_terms(strategy, share, job, gpu=gpu))


def expands_segments(job: TrainingJob, hardware: HardwareSpec) -> bool:
    """Return whether launches set `expandable_segments:True`, which CUDA supports: for long sequences."""
    is_cuda = "compute_capability" in gpu_catalog().get(hardware.gpu, {})
    return is_cuda and job.seq_len_tokens >= EXPANDABLE_FROM_TOKENS


def _with_overheads(
    strategy: Layout,
    hardware: HardwareSpec,
    phase: Phase,
    phases: dict[Phase, Terms],
    ratios: Sequence[float],
    *,
    stage: int | None,
    expandable: bool,
) -> GpuMemory:
    allocated = sum(phases[phase].values())
    # DeepSpeed makes a communicator for one rank too.
    communicators = int(strategy.world_size > 1 or strategy.engine == "deepspeed")
    communicators += strategy.dp_replicate > 1 and strategy.dp_shard > 1
    communicators += strategy.zero.hpz_partition_size > 1
    communicators += sum(getattr(strategy, axis) > 1 for axis in ("sp", "cp", "tp", "pp", "ep"))

    published = RESERVED_OVER_PREDICTED
    if expandable:
        reserved, allocated_part = EXPANDABLE_RESERVED, ALLOCATED_OVER_PREDICTED
        published = (
            reserved.low * allocated_part.low,
            reserved.middle * allocated_part.middle,
            reserved.high * allocated_part.high,
        )
    low, middle, high = moved_factors(published, ratios)
    terms = dict(phases[phase])
    terms["allocator_fragmentation"] = round(allocated * (middle - 1))
    terms["runtime_context"] = round(CONTEXT_BYTES.middle)
    if communicators:
        terms["communicators"] = round(communicators * COMMUNICATOR_BYTES.middle)
    return GpuMemory(
        peak_bytes=sum(terms.values()),
        low_bytes=round(allocated * low + CONTEXT_BYTES.low + communicators * COMMUNICATOR_BYTES.low),
        high_bytes=round(allocated * high + CONTEXT_BYTES.high + communicators * COMMUNICATOR_BYTES.high),
        allocated_bytes=allocated,
        capacity_bytes=hardware.gpu_bytes,
        phase=phase,
        terms=terms,
        phases={name: sum(parts.values()) for name, parts in phases.items()},
        calibrated_runs=len(ratios),
        stage=stage,
    )


def cpu_rank_terms(strategy: Layout, model: ModelSpec, job: TrainingJob) -> dict[Phase, Terms]:
    """Return the named tensor bytes of each phase on one CPU rank, including what a GPU rank would offload.

    Raises:
        UnknownFamilyError: no stored coefficients.
    """
    return max(
        (phases for _, phases in cpu_share_terms(strategy, model, job)),
        key=lambda phases: max(sum(terms.values()) for name, terms in phases.items() if name != "init"),
    )


def cpu_share_terms(strategy: Layout, model: ModelSpec, job: TrainingJob) -> list[tuple[RankShare, dict[Phase, Terms]]]:
    """Return the shares that can be on the fullest CPU rank, each with its named bytes by phase."""
    by_share = []
    for share in rank_shares(strategy, model, job):
        device = share_moment_terms(strategy, share, job, unmasked="fused", gpu=False)
        parameters = share_parameters(share.model, job, ep=strategy.ep)
        offloaded = offload_terms(strategy, share.model, job, parameters)
        offloaded.pop("pinned_rounding", None)
        host = at_moments(offloaded)
        if strategy.engine == "fsdp2" and offloaded:
            # FSDP2 allocates gradient shards on the host one by one; DeepSpeed allocates all of them ahead.
            gradients = offloaded.pop("offloaded_gradients")
            growing = growing_gradients(strategy, parameters, gradients)
            host = at_moments(offloaded, **growing, step={"gradients": gradients})
        phases = fullest_by_phase({moment: device[moment] | host[moment] for moment in device})
        layers = share.model.dimensions.num_layers
        if count := offloaded_checkpoints(strategy, layers):
            traced = cached_activations(share.model, job, unmasked="fused")(
                strategy.micro_batch_size, activation_mode(strategy, job)
            )
            # The meter counts these apart, so that they do not decide which moment is the fullest. The input of the
            # last layer has left the host when its backward pass begins.
            size = checkpoint_bytes(strategy, traced)
            waiting: dict[Phase, int] = {"loss": count, "backward": min(count, layers - 1)}
            for phase, inputs in waiting.items():
                phases[phase] = phases[phase] | {"offloaded_checkpoints": inputs * size}
        by_share.append((share, phases))
    return by_share
