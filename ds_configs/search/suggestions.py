"""The cheapest changes that would make a job fit, each with the memory it would then need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..memory.activation_source import ActivationSource
from ..memory.calibration import Calibration
from ..specs.errors import ShardwrightError
from ..specs.hardware import HardwareSpec, gpu_catalog, parse_hardware, with_gpus
from ..specs.job import AXIS_FIELDS, TrainingJob
from ..specs.model import ModelSpec
from ..specs.units import gigabytes
from ..step_time.estimate import estimate_step_time
from .choice import Evaluated, anything_fits, search
from .reasons import display_name

_MOST = 3
_LARGEST_OFFERED = 64
_LEAST_GAIN = 1.05
"""Times faster from which on a change is worth a word."""
_LARGEST_WORLD = 4096
_VOCABULARY_MULTIPLE = 64
"""Rows to which vocabularies are padded: a multiple of 8 on up to 8 ranks of tensor parallelism."""
_SHORTEST_SEQUENCE = 512


Change = tuple[str, HardwareSpec, TrainingJob]
"""A flag with the hardware and the job that it leads to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """One change with its result."""

    change: str
    """What to do, as the flag to write."""
    strategy: str
    """The layout that would then be chosen, as people name it."""
    high_bytes: int
    """Upper end of its memory on one accelerator."""
    capacity_bytes: int
    """Memory of one accelerator."""

    def __str__(self) -> str:
        used = f"{gigabytes(self.high_bytes)} of {gigabytes(self.capacity_bytes)} GB"
        return f"{self.change} ({self.strategy}, up to {used})"


def cheapest_changes(
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    activations: ActivationSource | None = None,
    calibration: Calibration | None = None,
) -> tuple[Suggestion, ...]:
    """Return up to three changes that would fit: free settings first, then the method, then hardware.

    Of each kind the cheapest is returned; other clusters fill what is missing. `activations` belongs to the job's
    sequence length, so with it no change of the sequence is tried.
    """
    found: list[Suggestion] = []

    def fits(change: Change) -> bool:
        _, cluster, changed = change
        try:
            return anything_fits(model, cluster, changed, activations=activations, calibration=calibration)
        except ShardwrightError:
            return False

    for changes, most in _kinds(hardware, job, traced=activations is not None):
        wanted = min(_MOST, len(found) + most)
        if len(found) == wanted:
            continue
        for change, changed_hardware, changed_job in _fitting(changes, fits):
            try:
                outcome = search(model, changed_hardware, changed_job, activations=activations, calibration=calibration)
            except ShardwrightError:
                continue
            if outcome.chosen is not None:
                gpu = outcome.chosen.memory.gpu
                found.append(
                    Suggestion(
                        change=change,
                        strategy=display_name(outcome.chosen.strategy),
                        high_bytes=gpu.high_bytes,
                        capacity_bytes=gpu.capacity_bytes,
                    )
                )
            if len(found) == wanted:
                break
    return tuple(found)


def _fitting(changes: Iterable[Change], fits: Callable[[Change], bool]) -> Iterator[Change]:
    """Yield the changes that fit, in their order.

    The last one of a kind has most memory. Where not even that fits, nothing that has less of everything is tried, as
    long as no batch forbids larger clusters.
    """
    failed: list[HardwareSpec] = []
    remaining = list(changes)
    for index, change in enumerate(remaining):
        _, cluster, job = change
        last = remaining[-1][1]
        grows = job.global_batch_size is None and cluster != last
        if index == 1 and grows and not fits(remaining[-1]):
            failed.append(last)
        if any(_has_no_more(cluster, other) for other in failed):
            continue
        if fits(change):
            yield change
        elif grows:
            failed.append(cluster)


def _has_no_more(cluster: HardwareSpec, other: HardwareSpec) -> bool:
    """Whether a cluster has as many nodes and accelerators as another and as much memory, or less."""
    names = ("nodes", "gpus_per_node", "gpu_bytes", "host_bytes_per_node", "nvme_bytes_per_node", "supports_bf16")
    return all(getattr(cluster, name) <= getattr(other, name) for name in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A change of the training's numbers that would make it faster; a plan never makes it unasked."""

    change: str
    """What to do, as the flag or the line of Python to write."""
    times_faster: float
    """Tokens per second over those of the plan."""
    strategy: str
    """The layout that would then be chosen, as people name it."""

    def __str__(self) -> str:
        return f"{self.times_faster:.2f} times faster with {self.change} ({self.strategy})"


def faster_changes(chosen: Evaluated, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> tuple[Offer, ...]:
    """Return what would be faster if the training's numbers may change: vocabulary, 8-bit optimizer states, adapters.

    The latter two only where memory costs the plan time (it offloads or recomputes) on up to `_LARGEST_OFFERED`
    accelerators: on more, states are spread so thinly that neither helps.
    """
    if job.teacher is not None:
        return ()
    found = _padded_vocabulary(chosen, model, hardware, job)
    if hardware.world_size > _LARGEST_OFFERED:
        return tuple(found)
    if not chosen.strategy.gradient_checkpointing and chosen.strategy.offload_optimizer == "none":
        return tuple(found)
    for change, _, changed in (*_smaller_states(hardware, job), *_adapters(hardware, job)):
        # The loss is open again: another one may then be the faster.
        try:
            other = search(model, hardware, replace(changed, loss="auto")).chosen
        except ShardwrightError:
            continue
        if other is None:
            continue
        ratio = other.time.tokens_per_second / chosen.time.tokens_per_second
        if ratio > _LEAST_GAIN:
            found.append(Offer(change=change, times_faster=ratio, strategy=display_name(other.strategy)))
    return tuple(found)


def _padded_vocabulary(chosen: Evaluated, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> list[Offer]:
    """Return the gain of rows that nobody reads: kernels are slow where a width is no multiple of 8 elements."""
    rows = model.dimensions.vocab_size
    padded = -(-rows // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    if rows % 8 == 0:
        return []
    parameters = tuple(
        replace(parameter, shape=tuple(padded if size == rows else size for size in parameter.shape))
        for parameter in model.parameters
    )
    wider = replace(model, dimensions=replace(model.dimensions, vocab_size=padded), parameters=parameters)
    time = estimate_step_time(chosen.strategy, wider, hardware, job)
    ratio = chosen.time.seconds / time.seconds
    if ratio <= _LEAST_GAIN:
        return []
    change = f"model.resize_token_embeddings({padded}) instead of {rows} rows"
    return [Offer(change=change, times_faster=ratio, strategy=display_name(chosen.strategy))]


def _kinds(hardware: HardwareSpec, job: TrainingJob, *, traced: bool) -> Iterator[tuple[Iterator[Change], int]]:
    """Yield the kinds of changes, cheapest first, with how many of each are wanted."""
    kinds = [_freed_settings(hardware, job), _chunked_loss(hardware, job), _smaller_teacher(hardware, job)]
    if not traced:
        kinds.append(_shorter_sequences(hardware, job))
    kinds += [
        _smaller_states(hardware, job),
        _adapters(hardware, job),
        _more_accelerators(hardware, job),
        _larger_accelerators(hardware, job),
        _more_host_memory(hardware, job),
    ]
    if not traced:
        kinds.append(_smallest_adapters(hardware, job))
    for kind in kinds:
        yield kind, 1
    yield _other_clusters(job), _MOST


def _freed_settings(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Change]:
    """Each setting that the user fixed given back to the planner, then all of them."""
    freed = {
        "--gradient-checkpointing auto": replace(job, gradient_checkpointing="auto"),
        "--micro-batch-size auto": replace(job, micro_batch_size=None),
        "--offload auto": replace(job, offload="auto"),
        "--strategy auto": replace(job, strategy="auto"),
        "--teacher-placement auto": replace(job, teacher_placement="auto"),
    }
    free: dict[str, Any] = dict.fromkeys(AXIS_FIELDS)
    for field in AXIS_FIELDS:
        one: dict[str, Any] = {field: None}
        freed[f"--{field.replace('_', '-')} auto"] = replace(job, **one)
    changed = {flag: changed_job for flag, changed_job in freed.items() if changed_job != job}
    for flag, changed_job in changed.items():
        yield flag, hardware, changed_job
    if len(changed) > 1:
        everything = replace(
            job,
            gradient_checkpointing="auto",
            micro_batch_size=None,
            offload="auto",
            strategy="auto",
            teacher_placement="auto",
            **free,
        )
        yield " ".join(changed), hardware, everything


def _chunked_loss(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Change]:
    if job.loss != "chunked" and job.teacher is None:
        yield "--loss chunked", hardware, replace(job, loss="chunked")


def _smaller_teacher(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Change]:
    if job.teacher is None:
        return
    for placement in ("cached", "quantized"):
        if job.teacher_placement != placement:
            yield f"--teacher-placement {placement}", hardware, replace(job, teacher_placement=placement)


def _shorter_sequences(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Change]:
    unit = 2 * hardware.world_size
    rounded = job.seq_len_tokens // unit * unit
    length = job.seq_len_tokens
    if _SHORTEST_SEQUENCE <= rounded < length:
        # Only then can sequence and context parallelism divide it over all ranks.
        yield f"--seq-len {rounded}", hardware, replace(job, seq_len_tokens=rounded)
        length = rounded
    length //= 2
    while length >= _SHORTEST_SEQUENCE:
        yield f"--seq-len {length}", hardware, replace(job, seq_len_tokens=length)
        length //= 2


def _smaller_states(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Change]:
    if job.method == "full" and job.optimizer in ("adamw_torch_fused", "adamw_torch"):
        yield "--optimizer adamw_8bit", hardware, replace(job, optimizer="adamw_8bit")


def _adapters(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Change]:
    if job.method == "full":
        yield f"--method lora --lora-rank {job.lora_rank}", hardware, replace(job, method="lora")
    if job.method != "qlora":
        yield f"--method qlora --lora-rank {job.lora_rank}", hardware, replace(job, method="qlora")


def _more_accelerators(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Change]:
    nodes, gpus = hardware.nodes, hardware.gpus_per_node
    while nodes * gpus < _LARGEST_WORLD:
        if gpus < 8:
            gpus = min(8, 2 * gpus)
        else:
            nodes *= 2
        larger = with_gpus(hardware, nodes=nodes, gpus_per_node=gpus)
        batch = job.global_batch_size
        if batch is None or batch % larger.world_size == 0:
            yield _hardware_change(larger), larger, job


def _hardware_change(hardware: HardwareSpec) -> str:
    if hardware.gpu in gpu_catalog():
        return f"--hardware {hardware.name}"
    return f"nodes: {hardware.nodes} and gpus_per_node: {hardware.gpus_per_node} in the hardware file"


def _stated_memory(hardware: HardwareSpec) -> dict[str, Any]:
    """Host memory and NVMe that the user stated, which another accelerator does not change."""
    stated: dict[str, Any] = {"nvme_bytes_per_node": hardware.nvme_bytes_per_node, "nvme_path": hardware.nvme_path}
    if "host_bytes_per_node" not in hardware.assumed:
        stated["host_bytes_per_node"] = hardware.host_bytes_per_node
    return stated


def _larger_accelerators(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Change]:
    larger = [name for name, entry in gpu_catalog().items() if entry["usable_gib"] * 2**30 > hardware.gpu_bytes * 1.02]
    prefix = f"{hardware.nodes}x" if hardware.nodes > 1 else ""
    stated = _stated_memory(hardware)
    for name in sorted(larger, key=lambda gpu: float(gpu_catalog()[gpu]["usable_gib"])):
        candidate = replace(parse_hardware(f"{prefix}{hardware.gpus_per_node}x{name}"), **stated)
        yield f"--hardware {candidate.name}", candidate, job


def _smallest_adapters(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Change]:
    """QLoRA with chunked loss and a shorter sequence, all at once."""
    length = job.seq_len_tokens
    while length >= _SHORTEST_SEQUENCE:
        small = replace(job, method="qlora", loss="chunked", seq_len_tokens=length)
        yield f"--method qlora --loss chunked --seq-len {length}", hardware, small
        length //= 2


def _other_clusters(job: TrainingJob) -> Iterator[Change]:
    """The smallest cluster of another kind, by total accelerator memory."""
    sizes = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8), (64, 8)]
    kinds = {name: float(entry["usable_gib"]) for name, entry in gpu_catalog().items() if name != "CPU"}
    clusters = [
        (nodes * gpus * memory, f"{nodes}x{gpus}x{kind}") for nodes, gpus in sizes for kind, memory in kinds.items()
    ]
    for _, name in sorted(clusters):
        short = name.removeprefix("1x")
        yield f"--hardware {short}", parse_hardware(short), job


def _more_host_memory(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Change]:
    size = hardware.host_bytes_per_node
    for _ in range(4):
        size *= 2
        yield f"--host-memory {size // 2**30}GiB", replace(hardware, host_bytes_per_node=size), job
