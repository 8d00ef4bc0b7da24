"""Memory of one accelerator as the maximum over the phases of a training step, every term named.

The phases are `init`, `loss` (end of the forward pass with head and loss), `backward` and `step`. Tensors come from
`model_states.py`, `buffers.py` and `activations.py`; what the runtime and the caching allocator add is an interval.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .activations import ActivationEstimate, Adapter, Mode, UnknownFamilyError, estimate_activations
from .buffers import buffer_terms
from .errors import Fault, UsageError
from .hardware import HardwareSpec
from .host_memory import HostMemory, estimate_host_memory
from .job import TrainingJob
from .model import ModelSpec, adapted_experts
from .model_states import Phase, RankParameters, Terms, model_state_terms, rank_parameters
from .strategy import Strategy

ActivationSource = Callable[[int, Mode], ActivationEstimate]
"""Activation bytes for a micro-batch size and a precision mode."""

_MB = 10**6


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A quantity that differs between machines."""

    low: float
    """Smallest published value."""
    middle: float
    """Typical value."""
    high: float
    """Largest published value, which decides whether a plan fits."""


CONTEXT_BYTES = Interval(low=350 * _MB, middle=600 * _MB, high=1000 * _MB)
"""CUDA context with kernels and cuBLAS workspace: 0.3-0.5 GB (arXiv 2411.06465), 1 GB with kernels (Ultra-Scale
Playbook)."""

COMMUNICATOR_BYTES = Interval(low=150 * _MB, middle=400 * _MB, high=700 * _MB)
"""Buffers of one NCCL communicator: about 0.5 GB (arXiv 2411.06465)."""

RESERVED_OVER_ALLOCATED = Interval(low=1.007, middle=1.038, high=1.093)
"""Allocator blocks over tensor bytes: minimum, median and maximum of 344 ranks measured on B200 (SimuMax v1.2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """Bytes on the fullest accelerator."""

    peak_bytes: int
    """Expected peak with runtime and allocator overhead."""
    low_bytes: int
    """Lower end of the interval."""
    high_bytes: int
    """Upper end of the interval, which the fit decision uses."""
    allocated_bytes: int
    """Tensors alone at the peak."""
    capacity_bytes: int
    """What a process can allocate on the accelerator."""
    phase: Phase
    """The phase of the peak."""
    terms: Terms
    """What makes up `peak_bytes`, by name."""
    phases: dict[str, int]
    """Tensor bytes of every phase."""

    @property
    def fits(self) -> bool:
        """Whether the upper end of the interval is within the accelerator's memory."""
        return self.high_bytes <= self.capacity_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Memory of a strategy on the accelerator, the host and NVMe."""

    gpu: GpuMemory
    host: HostMemory
    nvme_capacity_bytes_per_node: int

    @property
    def fits(self) -> bool:
        """Whether accelerator, host and NVMe all suffice."""
        return (
            self.gpu.fits
            and self.host.peak_bytes_per_node <= self.host.capacity_bytes_per_node
            and self.host.nvme_bytes_per_node <= self.nvme_capacity_bytes_per_node
        )


def estimate_memory(
    strategy: Strategy,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    activations: ActivationSource | None = None,
) -> MemoryEstimate:
    """Return the memory of one strategy: `max over phases of (states + buffers + activations)` plus overheads.

    `activations` supplies traced activation bytes for models without cached coefficients.

    Raises:
        UsageError: the strategy uses tensor, pipeline or expert parallelism, whose terms are not modelled.
        UnknownFamilyError: no cached coefficients and no `activations` given.
    """
    _refuse_unmodelled_axes(strategy)
    parameters = rank_parameters(model, job)
    source = activations or cached_activations(model, job)
    phases = tensor_terms(strategy, model, job, parameters, source)
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    host = estimate_host_memory(strategy, model, hardware, job, parameters)
    return MemoryEstimate(
        gpu=_with_overheads(strategy, hardware, phase, phases),
        host=host,
        nvme_capacity_bytes_per_node=hardware.nvme_bytes_per_node,
    )


def _refuse_unmodelled_axes(strategy: Strategy) -> None:
    faults = [
        Fault(where=axis, value=getattr(strategy, axis), rule="has no memory terms yet", fix="use 1")
        for axis in ("tp", "pp", "ep")
        if getattr(strategy, axis) > 1
    ]
    if faults:
        raise UsageError(faults)


def cached_activations(model: ModelSpec, job: TrainingJob) -> ActivationSource:
    """Return the activation bytes of the traced coefficients that ship with the package."""
    window = model.sliding_window
    attention: Literal["auto", "masked"] = "masked" if window and job.seq_len_tokens > window else "auto"

    def estimate(micro_batch_size: int, mode: Mode, adapter: Adapter) -> ActivationEstimate:
        return estimate_activations(
            family=model.model_type,
            dimensions=model.dimensions,
            micro_batch_size=micro_batch_size,
            seq_len_tokens=job.seq_len_tokens,
            mode=mode,
            adapter=adapter,
            lora_rank=0 if adapter == "none" else job.lora_rank,
            chunked_loss=job.loss == "chunked",
            attention=attention,
        )

    def source(micro_batch_size: int, mode: Mode) -> ActivationEstimate:
        try:
            return estimate(micro_batch_size, mode, adapter_name(job))
        except UnknownFamilyError:
            # Full training keeps at least what adapters on frozen weights keep.
            return estimate(micro_batch_size, mode, "none")

    return source


def activations_are_stored(model: ModelSpec, job: TrainingJob) -> bool:
    """Return whether the package holds coefficients for every precision mode that the job's layouts may use."""
    modes: tuple[Mode, ...] = ("fp32",) if job.precision == "fp32" else ("bf16", "bf16_autocast")
    source = cached_activations(model, job)
    try:
        for mode in modes:
            source(1, mode)
    except UnknownFamilyError:
        return False
    return model.task == "causal_lm"


def adapter_name(job: TrainingJob) -> Adapter:
    """Return the activation profile of the job's adapters; unusual targets count as all Linear modules."""
    if job.method == "full":
        return "none"
    return "lora_attention" if set(job.lora_targets) <= {"q_proj", "v_proj"} else "lora_all_linear"


def activation_mode(strategy: Strategy, job: TrainingJob) -> Mode:
    """Return how the engine computes: on 16-bit weights (DeepSpeed, FSDP2) or under autocast (one process, DDP)."""
    if job.precision == "fp32":
        return "fp32"
    return "bf16_autocast" if strategy.engine in ("single", "ddp") else "bf16"


def tensor_terms(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters, source: ActivationSource
) -> dict[Phase, Terms]:
    """Return the named tensor bytes of each phase."""
    states = model_state_terms(strategy, model, job, parameters)
    buffers = buffer_terms(strategy, model, job, parameters)
    activations = _activation_terms(strategy, model, job, parameters, source)
    constant: Terms = {"model_buffers": model.buffer_bytes}
    if job.teacher is not None:
        share = strategy.shard_size if strategy.shards_parameters else 1
        constant["teacher_weights"] = -(-job.teacher.parameter_count * job.compute_bytes // share)
    combined: dict[Phase, Terms] = {}
    for phase in states:
        parts = states[phase] | buffers[phase] | activations[phase] | constant
        combined[phase] = {name: count for name, count in parts.items() if count}
    _keep_fuller_backward_end(combined, strategy, model, parameters, activations)
    return combined


def _activation_terms(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters, source: ActivationSource
) -> dict[Phase, Terms]:
    traced = source(strategy.micro_batch_size, activation_mode(strategy, job))
    checkpointing = strategy.gradient_checkpointing
    layers = max(1, model.dimensions.num_layers)
    tokens = strategy.micro_batch_size * job.seq_len_tokens
    dropout_masks = model.residual_dropout_masks * tokens * model.dimensions.hidden_size
    if checkpointing:
        per_layer = traced.checkpointed_bytes_per_layer
        transient = traced.recompute_backward_transient_bytes + dropout_masks
    else:
        per_layer = traced.saved_bytes_per_layer + dropout_masks
        transient = traced.backward_transient_bytes
    ranks = strategy.sp * strategy.cp
    # Frozen weights are 16-bit already; with adapters only those are fp32 and copied.
    fp32_matrices = parameters.trainable
    if job.method == "full":
        fp32_matrices = model.linear_parameters(include_head=True) + _tied_head(model)
    kept = {
        "activations": (model.dimensions.num_layers * per_layer + traced.outside_layer_bytes) // ranks,
        "autocast_weight_copies": traced.autocast_weight_copy_bytes_per_parameter * fp32_matrices,
    }
    if job.method != "full":
        # PEFT computes an adapted expert's weight as base + update and keeps the sum for the backward pass.
        copies = sum(p.total for p in adapted_experts(model, job.lora_targets) if p.kind == "experts")
        kept["adapted_expert_copies"] = job.compute_bytes * copies // (layers if checkpointing else 1)
    loss = kept | {"loss": max(traced.loss_forward_peak_bytes, traced.loss_backward_peak_bytes) // ranks}
    backward = kept | {"backward_transient": transient // ranks}
    if checkpointing:
        # Autocast's cache holds every copy until the forward pass ends; recomputation then casts one layer at a time.
        backward["autocast_weight_copies"] //= layers
    if job.loss == "chunked" and job.method == "full":
        # A chunked loss computes the head's gradient in the forward pass.
        head = model.dimensions.vocab_size * model.dimensions.hidden_size
        loss["head_gradient"] = (2 if activation_mode(strategy, job) == "bf16" else 4) * head
    if job.method == "qlora":
        widest = max((p.numel for p in model.parameters if p.kind == "linear" and p.in_layer), default=0)
        loss["dequantized_weight"] = backward["dequantized_weight"] = job.compute_bytes * widest
    if job.teacher is not None:
        vocabulary = job.teacher.dimensions.vocab_size
        loss["teacher_logits"] = (4 + job.compute_bytes) * tokens // ranks * vocabulary
    return {"init": {}, "loss": loss, "backward": backward, "step": {}}


def _tied_head(model: ModelSpec) -> int:
    """Elements of a tied head, which autocast copies although it is listed as the embedding."""
    return model.dimensions.vocab_size * model.dimensions.hidden_size if model.tied_embeddings else 0


def _keep_fuller_backward_end(
    phases: dict[Phase, Terms],
    strategy: Strategy,
    model: ModelSpec,
    parameters: RankParameters,
    activations: dict[Phase, Terms],
) -> None:
    """Replace the backward phase by the fuller of its two ends.

    At its start all activations live with the gradients of the head and the last layer; at its end one layer's
    activations with all gradients. Between the two both change linearly, so one of the ends is the peak.
    """
    if strategy.gradient_accumulation_steps > 1:
        return
    layers = max(1, model.dimensions.num_layers)
    end = dict(phases["backward"])
    end["activations"] = activations["backward"]["activations"] // layers
    start = dict(phases["backward"])
    if not strategy.shards_parameters and "gradients" in start and parameters.trainable:
        early = (
            parameters.trainable_outside_layers + (parameters.trainable - parameters.trainable_outside_layers) // layers
        )
        start["gradients"] = start["gradients"] * early // parameters.trainable
    phases["backward"] = max(start, end, key=lambda terms: sum(terms.values()))


def _with_overheads(strategy: Strategy, hardware: HardwareSpec, phase: Phase, phases: dict[Phase, Terms]) -> GpuMemory:
    allocated = sum(phases[phase].values())
    communicators = 0 if strategy.world_size == 1 else 1
    communicators += strategy.dp_replicate > 1 and strategy.dp_shard > 1
    communicators += strategy.zero.hpz_partition_size > 1
    communicators += strategy.sp > 1 or strategy.cp > 1

    terms = dict(phases[phase])
    terms["allocator_fragmentation"] = round(allocated * (RESERVED_OVER_ALLOCATED.middle - 1))
    terms["runtime_context"] = round(CONTEXT_BYTES.middle)
    if communicators:
        terms["communicators"] = round(communicators * COMMUNICATOR_BYTES.middle)
    return GpuMemory(
        peak_bytes=sum(terms.values()),
        low_bytes=round(
            allocated * RESERVED_OVER_ALLOCATED.low + CONTEXT_BYTES.low + communicators * COMMUNICATOR_BYTES.low
        ),
        high_bytes=round(
            allocated * RESERVED_OVER_ALLOCATED.high + CONTEXT_BYTES.high + communicators * COMMUNICATOR_BYTES.high
        ),
        allocated_bytes=allocated,
        capacity_bytes=hardware.gpu_bytes,
        phase=phase,
        terms=terms,
        phases={name: sum(parts.values()) for name, parts in phases.items()},
    )
