"""Changes that would make a job fit, with the memory they need."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ..specs.errors import ShardwrightError
from ..specs.hardware import HardwareSpec, gpu_catalog, parse_hardware, with_gpus
from ..specs.job import AXIS_FIELDS, TrainingJob
from ..specs.texts import flag_words
from ..specs.units import gigabytes
from .candidates import SearchContext
from .optimizer_choice import ORDER
from .reasons import display_name
from .search import anything_fits, search

_MOST = 3
_LARGEST_WORLD = 4096
_SHORTEST_SEQUENCE = 512


Pair = tuple[HardwareSpec, TrainingJob]
"""The changed hardware and job."""
Change = tuple[str, HardwareSpec, TrainingJob]
"""The options of a change, the changed hardware and job."""


def change_flags(hardware: HardwareSpec, job: TrainingJob, pair: Pair) -> str:
    """Return the options to add to a command that plans a job on a hardware, to plan a change of them."""
    other, changed_job = pair
    options, known = other.options(), hardware.options()
    if other.file and other.file == hardware.file and other.world_size != hardware.world_size:
        return f"nodes: {other.nodes} and gpus_per_node: {other.gpus_per_node} in the hardware file"
    # A name does not have what a hardware file says.
    is_named = bool(hardware.file) and not other.file
    differing = {name: text for name, text in options.items() if is_named or known.get(name) != text}
    return shlex.join([*flag_words(differing), *changed_job.flags(job)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """One change that makes the job fit."""

    change: str
    """The flag to pass."""
    strategy: str
    high_bytes: int
    """Upper end of its memory on one accelerator."""
    capacity_bytes: int

    def __str__(self) -> str:
        used = f"{gigabytes(self.high_bytes)} of {gigabytes(self.capacity_bytes)} GB GPU memory"
        return f"{self.change} ({self.strategy}, up to {used})"


def cheapest_changes(context: SearchContext) -> tuple[Suggestion, ...]:
    """Return up to three changes that would fit: first fixed settings set to auto, then the method, then hardware.

    At most one change of each kind is returned, the cheapest; other clusters fill the remaining places.
    """
    suggestions: list[Suggestion] = []

    def fits(change: Change) -> bool:
        _, cluster, changed = change
        try:
            return anything_fits(replace(context, hardware=cluster, job=changed))
        except ShardwrightError:
            return False

    hardware, job = context.hardware, context.job
    more_memory = [(_with_host_memory(hardware, hardware.host_bytes_per_node * 2**power), job) for power in range(1, 5)]
    kinds: list[tuple[Iterable[Pair], int]] = [
        (_automatic_settings(hardware, job), 1),
        (_chunked_loss_or_smaller_teacher(hardware, job), 1),
        (_shorter_sequences(hardware, job), 1),
        (chain(_smaller_states(hardware, job), _smaller_weights(hardware, job)), 1),
        (chain(_adapters(hardware, job), _first_rank_adapters(hardware, job)), 1),
        (_more_accelerators(hardware, job), 1),
        (_larger_accelerators(hardware, job), 1),
        (more_memory, 1),
        (_smallest_adapters(hardware, job), 1),
        (_other_clusters(hardware, job), _MOST),
    ]
    for pairs, most in kinds:
        limit = min(_MOST, len(suggestions) + most)
        if len(suggestions) == limit:
            continue
        changes = ((change_flags(hardware, job, pair), *pair) for pair in pairs)
        for change, changed_hardware, changed_job in _fitting(changes, fits):
            try:
                outcome = search(replace(context, hardware=changed_hardware, job=changed_job), compare=False)
            except ShardwrightError:
                continue
            if outcome.chosen is not None:
                gpu = outcome.chosen.memory.gpu
                suggestions.append(
                    Suggestion(
                        change=change,
                        strategy=display_name(outcome.chosen.strategy),
                        high_bytes=gpu.high_bytes,
                        capacity_bytes=gpu.capacity_bytes,
                    )
                )
            if len(suggestions) == limit:
                break
    return tuple(suggestions)


def _fitting(changes: Iterable[Change], fits: Callable[[Change], bool]) -> Iterator[Change]:
    """Yield the changes that fit, in order.

    The last change of a kind has the most memory. If it does not fit, clusters with less of everything are skipped,
    unless a fixed global batch may forbid the larger cluster.
    """
    compared = ("nodes", "gpus_per_node", "gpu_bytes", "host_bytes_per_node", "nvme_bytes_per_node", "supports_bf16")
    failed: list[HardwareSpec] = []
    remaining = list(changes)
    for index, change in enumerate(remaining):
        _, cluster, job = change
        last = remaining[-1][1]
        grows = job.global_batch_size is None and cluster != last
        if index == 1 and grows and not fits(remaining[-1]):
            failed.append(last)
        if any(all(getattr(cluster, name) <= getattr(other, name) for name in compared) for other in failed):
            continue
        if fits(change):
            yield change
        elif grows:
            failed.append(cluster)


def _automatic_settings(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Pair]:
    """Yield each fixed setting set to auto, then all of them together."""
    fields: dict[str, Any] = {
        "gradient_checkpointing": "auto",
        "micro_batch_size": None,
        "offload": "auto",
        "strategy": "auto",
        "teacher_placement": "auto",
        **dict.fromkeys(AXIS_FIELDS),
    }
    fixed = {field: value for field, value in fields.items() if getattr(job, field) != value}
    for field, value in fixed.items():
        change: dict[str, Any] = {field: value}
        yield hardware, replace(job, **change)
    if len(fixed) > 1:
        yield hardware, replace(job, **fixed)


def _chunked_loss_or_smaller_teacher(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Pair]:
    if job.teacher is None:
        if job.loss != "chunked":
            yield hardware, replace(job, loss="chunked")
        return
    for placement in ("cached", "quantized"):
        if job.teacher_placement != placement:
            yield hardware, replace(job, teacher_placement=placement)


def _shorter_sequences(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Pair]:
    unit = 2 * hardware.world_size
    rounded = job.seq_len_tokens // unit * unit
    length = job.seq_len_tokens
    if _SHORTEST_SEQUENCE <= rounded < length:
        # Sequence and context parallelism can split this length over all ranks.
        yield hardware, replace(job, seq_len_tokens=rounded)
        length = rounded
    length //= 2
    while length >= _SHORTEST_SEQUENCE:
        yield hardware, replace(job, seq_len_tokens=length)
        length //= 2


def _smaller_states(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Pair]:
    if job.method == "full" and job.optimizer in ("adamw_torch_fused", "adamw_torch"):
        yield hardware, replace(job, optimizer="adamw_8bit")


def _smaller_weights(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Pair]:
    """Yield bf16 weights, then the optimizers that `--optimizer auto` would select for speed too."""
    if job.method != "full":
        return
    if job.weights_dtype != "bf16":
        yield hardware, replace(job, weights_dtype="bf16")
    for step in (step for step in ORDER[1:] if not step.only_to_fit):
        yield (
            hardware,
            replace(job, optimizer=step.optimizer, weights_dtype=step.weights_dtype, optim_args=step.optim_args),
        )


def _adapters(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Pair]:
    if job.method == "full":
        yield hardware, replace(job, method="lora")
    if job.method != "qlora":
        yield hardware, replace(job, method="qlora")


def _first_rank_adapters(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Pair]:
    """Yield LoRA instead of QLoRA: only the first rank of sharded 16-bit weights loads them.

    That is less host memory where bitsandbytes leaves most weights in 16 bit, as fused experts.
    """
    if job.method == "qlora":
        yield hardware, replace(job, method="lora")


def _more_accelerators(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Pair]:
    nodes, gpus = hardware.nodes, hardware.gpus_per_node
    while nodes * gpus < _LARGEST_WORLD:
        if gpus < 8:
            gpus = min(8, 2 * gpus)
        else:
            nodes *= 2
        larger = with_gpus(hardware, nodes=nodes, gpus_per_node=gpus)
        batch = job.global_batch_size
        if batch is None or batch % larger.world_size == 0:
            yield larger, job


def _larger_accelerators(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Pair]:
    prefix = f"{hardware.nodes}x" if hardware.nodes > 1 else ""
    for memory, gpu in sorted(_memories().items()):
        if memory * 2**30 > hardware.gpu_bytes * 1.02:
            yield _named(f"{prefix}{hardware.gpus_per_node}x{gpu}", hardware), job


def _memories() -> dict[float, str]:
    """Return an accelerator of each memory size in GiB, the first of the catalog."""
    memories: dict[float, str] = {}
    for gpu, entry in gpu_catalog().items():
        memories.setdefault(float(entry["usable_gib"]), gpu)
    return memories


def _named(name: str, hardware: HardwareSpec) -> HardwareSpec:
    """Return the cluster of a name with the host memory and NVMe of the user's command."""
    options = hardware.options()
    return parse_hardware(name, host_memory=options.get("host_memory"), nvme=options.get("nvme"))


def _with_host_memory(hardware: HardwareSpec, size: int) -> HardwareSpec:
    assumed = tuple(name for name in hardware.assumed if name != "host_bytes_per_node")
    return replace(hardware, host_bytes_per_node=size, assumed=assumed)


def _smallest_adapters(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Pair]:
    """Yield QLoRA with chunked loss and ever shorter sequences."""
    length = job.seq_len_tokens
    while length >= _SHORTEST_SEQUENCE:
        small = replace(job, method="qlora", loss="chunked", seq_len_tokens=length)
        yield hardware, small
        length //= 2


def _other_clusters(hardware: HardwareSpec, job: TrainingJob) -> Iterator[Pair]:
    """Yield clusters of known accelerators by total memory, the smallest first."""
    sizes = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8), (64, 8)]
    kinds = {gpu: memory for memory, gpu in _memories().items() if gpu != "CPU"}
    clusters = [
        (nodes * gpus * memory, f"{nodes}x{gpus}x{kind}") for nodes, gpus in sizes for kind, memory in kinds.items()
    ]
    for _, name in sorted(clusters):
        yield _named(name, hardware), job
