"""`estimate_memory`: the peak of an accelerator and of a host under a layout, with measured corrections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from ..specs.errors import ConfigError, UsageError
from ..specs.hardware import HardwareSpec, gpu_catalog
from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from ..specs.second_models import SecondModel
from ..specs.tasks import TASKS, in_sequences
from ..specs.terms import Term
from . import communication, generation, host, layers, loss, model_states, second_models
from .activations import Attention, tiled_mlp_elements
from .communication import buffer_terms, viewed_elements
from .generation import generation_moments, vllm_share
from .host import HostMemory, estimate_host_memory, offloaded_states, second_model_host_terms
from .layers import activation_terms, in_tiles_or_between_modules, offloaded_inputs, rank_step, weight_copies
from .loss import head_bytes, loss_terms
from .model_states import model_state_terms
from .rank_parameters import (
    PHASES,
    Moment,
    Phase,
    RankShare,
    Terms,
    at_moments,
    fullest_by_phase,
    growing_gradients,
    rank_shares,
    share_parameters,
    summed,
)
from .second_models import frozen_model_terms, trained_model_terms


def share_moment_terms(
    layout: Layout,
    share: RankShare,
    job: TrainingJob,
    *,
    unmasked: Attention = "auto",
    gpu: bool = True,
    device_bytes: int = 0,
) -> dict[Moment, Terms]:
    """Return the named tensor bytes of a rank's share at each moment of a training step.

    `device_bytes` is the memory of the accelerator, of which a colocated vLLM uses a share; 0 without one.

    Raises:
        UsageError: neither coefficients nor a bound from the model's structure exist.
    """
    model = share.model
    step = rank_step(in_sequences(layout, job.task), share, job, unmasked=unmasked, gpu=gpu)
    # States and buffers are the same for many candidates of a search. Of the batch, they depend only on whether
    # gradients accumulate, and of recomputation only the gathers of ZeRO-3.
    same: dict[str, Any] = {
        "micro_batch_size": 1,
        "gradient_accumulation_steps": min(2, layout.gradient_accumulation_steps),
    }
    layers_count = model.dimensions.num_layers
    if layout.zero_stage != 3:
        same |= {"gradient_checkpointing": False, "checkpointed_layers": None}
    elif not viewed_elements(model, job) and 0 < layout.recomputed_layers(layers_count) < layers_count:
        same["checkpointed_layers"] = 1
    states = _states_and_buffers(layout.changed(**same), model, job)
    parts = [states, activation_terms(step), weight_copies(step)]
    later: list[dict[Moment, Terms]] = []
    for second in job.second_models:
        terms = second_model_terms(second, layout, job, unmasked=unmasked, gpu=gpu)
        # A reference runs after the forward pass, while what that keeps exists, unless the task generates.
        (later if second.role == "reference" and not TASKS[job.task].generates else parts).append(terms)
    losses = [loss_terms(step), *(dict.fromkeys(PHASES, terms["init"]) for terms in later)]
    combined = {moment: summed(*(part[moment] for part in (*parts, *losses))) for moment in states}
    if later:
        _, kept, _ = head_bytes(step.layout, model, job, element=step.element_bytes, on_gpu=gpu)
        during = summed({"loss": kept}, *(part["forward_end"] for part in (*parts, *later)))
        combined["forward_end"] = max(combined["forward_end"], during, key=lambda terms: sum(terms.values()))
    if not gpu and model.tied_embeddings and job.method == "full" and layout.engine in ("single", "ddp"):
        # torch adds the gradients of head and embedding in place on CUDA (metered on an H100), but not on the CPU.
        combined["embedding_backward"]["module_gradients"] += job.trained_weight_bytes * model.embedding_parameters
    if layout.zero_stage == 3 and tiled_mlp_elements(layout, model, job):
        recomputed = layout.recomputed_layers(layers_count)
        again_in_last: tuple[tuple[Moment, bool], ...] = (
            ("last_layer_backward", recomputed == layers_count),
            ("first_large_layer_backward", recomputed > model.first_large_layer),
            ("first_layer_backward", recomputed > 0),
        )
        for moment, again in again_in_last:
            combined[moment] = in_tiles_or_between_modules(step, combined[moment], again=again)
    if not model.first_large_layer:
        del combined["first_large_layer_backward"]
    if TASKS[job.task].generates and not model.has_score_head:
        share_of_vllm = vllm_share(layout, model, job, device_bytes) if device_bytes else 0
        engine_bytes = round(device_bytes * share_of_vllm)
        steps = [terms for moment, terms in combined.items() if moment != "init"]
        resident = {name: min(terms.get(name, 0) for terms in steps) for name in steps[0]}
        if layout.zero_stage != 3:
            # Freed after the step; ZeRO-3 keeps its buffer of partitions.
            resident.pop("gradients", None)
        before = generation_moments(step, resident, engine_bytes=engine_bytes)
        if job.generation == "vllm" and job.vllm_sleep != "on":
            awake = {"vllm_engine": engine_bytes}
            combined = {moment: summed(terms, awake) for moment, terms in combined.items()}
        combined |= before
    return combined


def second_model_terms(
    second: SecondModel, layout: Layout, job: TrainingJob, *, unmasked: Attention = "auto", gpu: bool = True
) -> dict[Moment, Terms]:
    """Return the named bytes of a second model on an accelerator at each moment of the trained model's step."""
    if not second.trained:
        return frozen_model_terms(second, in_sequences(layout, job.task), job, gpu=gpu)
    alone = job.without_second_models()
    (share,) = rank_shares(layout, second.spec, alone)
    return trained_model_terms(second.role, share_moment_terms(layout, share, alone, unmasked=unmasked, gpu=gpu))


def second_model_bytes(
    second: SecondModel, layout: Layout, hardware: HardwareSpec, job: TrainingJob
) -> tuple[int, int]:
    """Return the peaks of one second model on an accelerator, and on a node's host while loading or training."""
    moments = second_model_terms(second, layout, job, gpu=hardware.gpu != "CPU").values()
    loaded, training = second_model_host_terms(second, layout, hardware, job)
    return max(sum(terms.values()) for terms in moments), max(loaded, sum(training.values()))


@lru_cache(maxsize=2048)
def _states_and_buffers(layout: Layout, model: ModelSpec, job: TrainingJob) -> dict[Moment, Terms]:
    parameters = share_parameters(model, job, ep=layout.ep)
    states = offloaded_states(layout, model, job, parameters).accelerator
    states = states or model_state_terms(layout, model, job, parameters)
    buffers, always = buffer_terms(layout, model, job, parameters), {"model_buffers": model.buffer_bytes}
    return {moment: summed(always, states[moment], buffers[moment]) for moment in states}


SMALLEST_RATIO, LARGEST_RATIO = 0.5, 2.0
"""Outside of these, the run differed from the plan, or the prediction has an error that no factor corrects."""

Factors = tuple[float, float, float]
"""Low, middle and high of a factor or a size that differs between machines; the largest published value decides whether
a plan fits."""


def _product(one: Factors, other: Factors) -> Factors:
    low, middle, high = (a * b for a, b in zip(one, other, strict=True))
    return low, middle, high


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """Measurements of a training run on accelerators, with the prediction of its plan."""

    identifier: str
    """SHA-256 of the measurement, in hexadecimal."""
    gpu: str
    architecture: str
    model: str
    layout: str
    """The layout's label, such as `zero2`."""
    ranks: int
    predicted_allocated_bytes: int
    """Tensor bytes at the plan's peak."""
    allocated_peak_bytes: int
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


_MB = 10**6


CONTEXT_BYTES: Factors = (350 * _MB, 800 * _MB, 1000 * _MB)
"""CUDA context with kernels: 0.3-0.5 GB (arXiv 2411.06465), 0.80 GB measured in a training process on an H100
(docs/measurements/gpu.md), 1 GB with kernels (Ultra-Scale Playbook)."""

COMMUNICATOR_BYTES: Factors = (150 * _MB, 400 * _MB, 700 * _MB)
"""Buffers of one NCCL communicator: about 0.5 GB (arXiv 2411.06465)."""

RESERVED_OVER_ALLOCATED: Factors = (1.007, 1.038, 1.093)
"""Allocator blocks divided by tensor bytes: minimum, median and maximum of 344 ranks on B200 (SimuMax v1.2)."""


ALLOCATED_OVER_PREDICTED: Factors = (0.95, 1.0, 1.05)
"""Tensor bytes divided by their prediction: the largest errors of the grid of measured runs, rounded outwards
(docs/measurements/memory.md)."""

EXPANDABLE_FROM_TOKENS = 32_768
"""Sequence length from which launches set `expandable_segments:True`: with 32,768 tokens of a vocabulary of 128,256 an
H100 ran out of memory with 12 GB of free blocks that no tensor fitted (docs/measurements/gpu.md)."""

EXPANDABLE_RESERVED: Factors = (1.0, 1.01, 1.02)
"""Allocator blocks divided by tensor bytes with expandable segments. Before an allocation fails, the allocator unmaps
all complete pages of free blocks (`release_cached_blocks`, c10/cuda/CUDACachingAllocator.cpp), so that a gap between
tensors wastes less than two pages of 20 MiB: 1.6 GB of 80 GB if all inputs of 40 layers have gaps."""

RESERVED_OVER_PREDICTED = _product(RESERVED_OVER_ALLOCATED, ALLOCATED_OVER_PREDICTED)
"""Product of both; measured runs move this interval."""


def _gigabytes(interval: Factors, each: str = "") -> str:
    low, middle, high = (f"{count / 1e9:g}" for count in interval)
    return f"{middle} GB {each}expected, {low} to {high} GB in the interval"


_LEAST, _EXPECTED, _MOST = (f"{100 * (factor - 1):.1f} %" for factor in RESERVED_OVER_PREDICTED)

OVERHEADS = (
    Term(
        "allocator_fragmentation",
        f"memory that the allocator reserves beyond tensors: {_EXPECTED} expected, {_LEAST} to {_MOST} in the "
        "interval; measured runs replace these values, by negative ones if they needed less than predicted",
    ),
    Term("runtime_context", f"CUDA context, kernels and workspaces: {_gigabytes(CONTEXT_BYTES)}"),
    Term("communicators", f"NCCL buffers: {_gigabytes(COMMUNICATOR_BYTES, 'for each communicator ')}"),
    Term(
        "exchange_buffers",
        "NCCL buffers for exchanges of sequence, context and expert parallelism: 12 MiB for each channel to another "
        "rank of the node, and 32 MiB for each rank that sends to other nodes",
    ),
)
"""Terms of device memory that are no tensors."""


def declared_terms() -> tuple[Term, ...]:
    """Return every term of memory, and the seconds of offload and second models, in the order of their modules."""
    groups = (model_states, communication, layers, loss, generation, second_models, host)
    buffers = Term("model_buffers", "rotary tables and other fp32 buffers, on every rank")
    return (buffers, *(term for group in groups for term in group.TERMS), *OVERHEADS)


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
    layout: Layout,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    calibration: Calibration | None = None,
) -> MemoryEstimate:
    """Return the memory of a layout: `max over phases of (states + buffers + activations)` plus overheads.

    A worked example: Llama-3.1-8B on 8xA100-80GB under ZeRO-3 with gradient checkpointing and default buckets, one
    sequence of T = 4096 tokens per rank, in bf16 with AdamW. The model has P = 8030261248 parameters, L = 32 layers of
    width h = 4096, heads of d = 128, and V = 128256 tokens in the vocabulary; N = 8 ranks share its states. The fullest
    moment is the backward pass of the loss:

    ======================= ============================== ==============
    term                    bytes                                   value
    ======================= ============================== ==============
    weights                 2 * P / N                       2,007,565,312
    master_weights          4 * P / N                       4,015,130,624
    gradients               2 * P / N                       2,007,565,312
    optimizer_states        8 * P / N                       8,030,261,248
    persistent_parameters   2 * (2 * L + 1) * h                   532,480
    reduce_bucket           2 * h**2                           33,554,432
    gathered_parameters     2 * V * h                       1,050,673,152
    activations             2*L*T*h + T * (8*h + 4*d + 12)  1,210,105,856
    loss                    12 * T * V + 8                  6,304,038,920
    model_buffers           4 * d                                     512
    allocator_fragmentation 0.038 * tensors                   937,058,258
    runtime_context         0.8e9                             800,000,000
    communicators           0.4e9                             400,000,000
    ======================= ============================== ==============

    Persistent parameters are the norms. The output head stays gathered for the backward pass of the loss. Activations
    are the inputs of the layers, and the final norm with rotary tables and positions; the loss has logits in bf16 and
    fp32 and gradients of both. Of the sum of 26,796,486,106 bytes, 24,659,427,848 are tensors. The step needs
    22,117,106,176 bytes of them: the states, and fp32 and flattened gradients of a sub-group (6 * P / N). Eight
    processes need 24,000,000,000 bytes of host memory.

    Raises:
        UsageError: there are fewer layers than pipeline stages, or neither activation coefficients nor a bound.
    """
    ratios = calibration.ratios(gpu=hardware.gpu, architecture=model.architecture) if calibration else ()
    reserved = EXPANDABLE_RESERVED if expands_segments(job, hardware) else RESERVED_OVER_ALLOCATED
    factors = moved_factors(_product(reserved, ALLOCATED_OVER_PREDICTED), ratios)
    # DeepSpeed makes a communicator for one rank too.
    communicators = int(layout.world_size > 1 or layout.engine == "deepspeed") + len(layout.axes)
    communicators += layout.dp_replicate > 1 and layout.dp_shard > 1
    communicators += layout.zero.hpz_partition_size > 1
    exchange = exchange_buffer_bytes(layout, hardware)
    overheads = [
        context + communicators * each + exchange
        for context, each in zip(CONTEXT_BYTES, COMMUNICATOR_BYTES, strict=True)
    ]
    stages = []
    for share in rank_shares(layout, model, job):
        phases = fullest_by_phase(
            share_moment_terms(layout, share, job, gpu=hardware.gpu != "CPU", device_bytes=hardware.gpu_bytes)
        )
        sizes: dict[str, int] = {name: sum(parts.values()) for name, parts in phases.items()}
        phase = max(phases, key=lambda name: sizes[name])
        allocated = sizes[phase]
        low, high = (round(allocated * factors[end] + overheads[end]) for end in (0, 2))
        terms = dict(phases[phase])
        terms["allocator_fragmentation"] = round(allocated * (factors[1] - 1))
        terms["runtime_context"] = round(CONTEXT_BYTES[1])
        if communicators:
            terms["communicators"] = round(communicators * COMMUNICATOR_BYTES[1])
        if exchange:
            terms["exchange_buffers"] = exchange
        fullest = GpuMemory(
            peak_bytes=sum(terms.values()),
            low_bytes=low,
            high_bytes=high,
            allocated_bytes=allocated,
            capacity_bytes=hardware.gpu_bytes,
            phase=phase,
            terms=terms,
            phases=sizes,
            calibrated_runs=len(ratios),
            stage=None if share.stage is None else share.stage.index,
        )
        stages.append(fullest)
    return MemoryEstimate(
        gpu=max(stages, key=lambda stage: stage.high_bytes),
        host=estimate_host_memory(layout, model, hardware, job),
        nvme_capacity_bytes_per_node=hardware.nvme_bytes_per_node,
    )


NVLINK_BYTES_PER_S = 25e9
"""One direction of one link of NVLink 3 and 4. One of NVLink 5 has twice as much, and both reach the most channels."""
SWITCHED_BYTES_PER_S = 200e9
"""The slowest NVSwitch of the catalog, of the A800 and H800. Not all of eight V100 are joined by links."""


def _is_cuda(gpu: str) -> bool:
    return "compute_capability" in gpu_catalog().get(gpu, {})


def exchange_buffer_bytes(layout: Layout, hardware: HardwareSpec) -> int:
    """Return the bytes of NCCL's buffers for exchanges (all-to-all) on CUDA; 0 elsewhere.

    Ranks of sequence and expert parallelism exchange with all others of their group, those of context parallelism with
    a neighbour (torch 2.13.0, `_context_parallel/_attention.py`). Pipelines are not counted.

    The first exchange connects every channel to each peer, whatever its size (`p2pTaskAppend`, src/enqueue.cc of NCCL
    2.27.5). In a node, that takes 10 MiB to receive and 2 MiB to send (src/transport/p2p.cc). Behind an NVSwitch there
    are two channels for each link, as a power of two, at most 32. There are 2 over PCIe, or if a rank is in another
    node (`ncclTopoGetNchannels`, src/graph/paths.cc). All peers in other nodes share a buffer of 32 MiB, 16 channels of
    16 steps of 128 KiB, to receive, and one to send for each rank of the node that sends through this one: all ranks
    where NVSwitch joins them (PXN; `sharedNetBuffersInit`, src/transport/net.cc).

    Eight ranks of H100 have 7 * 32 * 12 MiB = 2.8 GB. A first exchange there took 3.3 GB, with the start of its
    communicator (https://github.com/NVIDIA/nccl/issues/1685).
    """
    if not _is_cuda(hardware.gpu):
        return 0
    count = 0
    is_switched = hardware.link_bytes_per_s >= SWITCHED_BYTES_PER_S
    links = int(hardware.link_bytes_per_s / NVLINK_BYTES_PER_S)
    for ranks, is_ring in ((layout.sp, False), (layout.ep, False), (layout.cp, True)):
        in_node = min(ranks, hardware.gpus_per_node)
        channels = min(32, 2 ** (2 * links - 1).bit_length()) if is_switched and in_node == ranks else 2
        count += 12 * 2**20 * channels * (min(in_node - 1, 1) if is_ring else in_node - 1)
        if ranks > in_node:
            count += 32 * 2**20 * (1 + (in_node if is_switched and not is_ring else 1))
    return count


FREE_BLOCK_BYTES = 5200 * _MB
"""Free blocks that torch's allocator keeps beyond tensors and the pools of side streams while memory is left: the
median of 12 runs on an H100 of 0.7 to 12.6 GB (docs/measurements/gpu.md)."""
LARGEST_FREE_SHARE = 0.38
"""The most of these, divided by the tensors of the same run."""


def shown_bytes(gpu: GpuMemory, layout: Layout, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> int:
    """Return the bytes that nvidia-smi is expected to show for a rank, with what torch frees when memory is short.

    These are the peak, pools of side streams, and free blocks where they are more than the fragmentation of the peak;
    at most what the accelerator has. Measured runs of a calibration replace the free blocks. Accelerators without CUDA
    have the peak.
    """
    if not _is_cuda(hardware.gpu):
        return gpu.peak_bytes
    kept = min(FREE_BLOCK_BYTES, LARGEST_FREE_SHARE * gpu.allocated_bytes)
    more = 0 if gpu.calibrated_runs else max(0, round(kept) - gpu.terms["allocator_fragmentation"])
    pools = sum(side_stream_pools(layout, model, job).values())
    return max(gpu.peak_bytes, min(gpu.peak_bytes + pools + more, gpu.capacity_bytes))


NORM_ELEMENTS = 250_000_000
"""Elements of an offloaded gradient that DeepSpeed converts to fp64 at a time for its norm (stage3.py:1960)."""


def side_stream_pools(layout: Layout, model: ModelSpec, job: TrainingJob) -> Terms:
    """Return the free blocks of the streams of ZeRO-3 at the end of a step.

    A block of torch's allocator belongs to the stream that requested it, so that each stream keeps its own largest
    size, and their sum is in use; only before an allocation fails are free blocks of all streams given back
    (`release_cached_blocks`, c10/cuda/CUDACachingAllocator.cpp). Plans therefore decide by `peak_bytes`. With
    `overlap_comm`, DeepSpeed 0.19.8 gathers parameters on one stream (partitioned_param_coordinator.py:606) and reduces
    gradients on another (stage3.py:1669). With offload the latter copies the partition of a gradient back to the
    accelerator, converts it to fp64 for its norm, and then to fp32 (stage3.py:1440, `partition_grads`).
    """
    if layout.zero_stage != 3 or not layout.zero.overlap_comm:
        return {}
    share = rank_shares(layout, model, job)[0]
    moments = share_moment_terms(layout, share, job)
    fullest = max(moments.values(), key=lambda terms: sum(terms.values()))

    def pool(*names: str) -> tuple[int, int]:
        sizes = [sum(terms.get(name, 0) for name in names) for terms in moments.values()]
        return max(sizes), sum(fullest.get(name, 0) for name in names)

    gathered, in_gathers = pool("gathered_parameters", "prefetch_copies")
    reduced, in_reductions = pool("reduce_copy")
    if layout.offload_optimizer != "none":
        largest = -(-share_parameters(share.model, job, ep=layout.ep).largest_trainable // layout.shard_size)
        reduced = max(reduced, job.compute_bytes * largest + max(4 * largest, 8 * min(NORM_ELEMENTS, largest)))
    return {"gather_pool": gathered - in_gathers, "reduce_pool": reduced - in_reductions}


def expands_segments(job: TrainingJob, hardware: HardwareSpec) -> bool:
    """Return whether launches set `expandable_segments:True`, which CUDA supports: for long sequences."""
    return _is_cuda(hardware.gpu) and job.seq_len_tokens >= EXPANDABLE_FROM_TOKENS


def cpu_rank_terms(layout: Layout, model: ModelSpec, job: TrainingJob) -> dict[Phase, Terms]:
    """Return the named tensor bytes of each phase on one CPU rank, including what a GPU rank would offload.

    Raises:
        UsageError: neither coefficients nor a bound from the model's structure exist.
    """
    return max(
        (phases for _, phases in cpu_share_terms(layout, model, job)),
        key=lambda phases: max(sum(terms.values()) for name, terms in phases.items() if name != "init"),
    )


def cpu_share_terms(layout: Layout, model: ModelSpec, job: TrainingJob) -> list[tuple[RankShare, dict[Phase, Terms]]]:
    """Return the shares that can be on the fullest CPU rank, each with its named bytes by phase."""
    by_share = []
    for share in rank_shares(layout, model, job):
        device = share_moment_terms(layout, share, job, unmasked="fused", gpu=False)
        parameters = share_parameters(share.model, job, ep=layout.ep)
        offloaded = dict(offloaded_states(layout, share.model, job, parameters).host)
        offloaded.pop("pinned_rounding", None)
        host = at_moments(offloaded)
        if layout.engine == "fsdp2" and offloaded:
            # FSDP2 allocates gradient shards on the host one by one; DeepSpeed allocates all of them ahead.
            gradients = offloaded.pop("gradients")
            growing = growing_gradients(layout, parameters, gradients)
            host = at_moments(offloaded, **growing, step={"gradients": gradients})
        # What offload keeps on the host is there in every phase of generation too.
        phases = fullest_by_phase({moment: summed(device[moment], host.get(moment, host["init"])) for moment in device})
        count, size = offloaded_inputs(layout, share.model, job, unmasked="fused")
        if count:
            # The meter counts these apart, so that they do not decide which moment is the fullest. The input of the
            # last layer has left the host when its backward pass begins.
            waiting: dict[Phase, int] = {"loss": count, "backward": min(count, share.model.dimensions.num_layers - 1)}
            for phase, inputs in waiting.items():
                phases[phase] = phases[phase] | {"offloaded_checkpoints": inputs * size}
        by_share.append((share, phases))
    return by_share
