"""Changes that would make a job fit, with the memory they need."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..specs.errors import ConfigError, ShardwrightError, UsageError
from ..specs.hardware import HardwareSpec, gpu_catalog, parse_hardware, with_gpus
from ..specs.job import AXIS_FIELDS, GROUPED_TASKS, Method, TrainingJob
from ..specs.second_models import Placement
from ..specs.texts import flag_words
from ..specs.units import gigabytes
from .candidates import SearchContext
from .reasons import display_name
from .search import Evaluated, anything_fits, search

_MOST = 3
_LARGEST_WORLD = 4096
_SHORTEST_SEQUENCE = 512
_SMALLER_OPTIMIZERS = ("adamw_8bit", "adamw_torch_8bit", "adafactor")


def change_flags(hardware: HardwareSpec, job: TrainingJob, other: HardwareSpec, changed_job: TrainingJob) -> str:
    """Return the options to add to a command that plans a job on a hardware, to plan another job on another one."""
    options, known = other.options(), hardware.options()
    if other.file and other.file == hardware.file and other.world_size != hardware.world_size:
        return f"nodes: {other.nodes} and gpus_per_node: {other.gpus_per_node} in the hardware file"
    # A name does not have what a hardware file says.
    is_named = bool(hardware.file) and not other.file
    differing = {name: text for name, text in options.items() if is_named or known.get(name) != text}
    return shlex.join([*flag_words(differing), *changed_job.flags(job)])


SERVED_SHARE = 0.8
"""Share of a GPU's memory that the weights of a vLLM server may fill, beside its cache."""


def splits_with_server(context: SearchContext) -> list[SearchContext]:
    """Return the context; with a vLLM server one for each split, with the GPUs that train and how many serve.

    A server has whole nodes of several, or 1, 2, 4, ... GPUs of a single one; as few share its weights as hold them.

    Raises:
        UsageError: there are too few GPUs for the server and a training rank.
    """
    model, hardware, job = context.model, context.hardware, context.job
    if job.generation != "vllm-server":
        return [context]
    node, whole = hardware.gpus_per_node, hardware.nodes > 1
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= node]
    held = [size for size in sizes if 2 * model.parameter_count <= SERVED_SHARE * size * hardware.gpu_bytes]
    servers = [node] if whole else [size for size in held if size < node]
    if job.vllm_gpus is not None:
        servers = [job.vllm_gpus]
    left = [hardware.world_size - count for count in servers if held and (count % node == 0 if whole else True)]
    if not held or not left or min(left) < 1:
        rule = f"needs {held[0] if held else 'more'} GPUs or more for the server, and others that train"
        rule += f": {hardware.name} has {hardware.world_size}" + (f", in nodes of {node}" if whole else "")
        fix = "use more GPUs, or --generation vllm, whose engine shares them"
        raise UsageError(ConfigError(where="vllm_gpus", value=job.vllm_gpus, rule=rule, fix=fix))
    splits = []
    for count in servers:
        trained = hardware.world_size - count
        nodes = trained // node if whole else 1
        name = f"{nodes}x{node}x{hardware.gpu}" if nodes > 1 else f"{trained}x{hardware.gpu}"
        rest = replace(hardware, name=name, nodes=nodes, gpus_per_node=trained // nodes)
        size = job.vllm_tensor_parallel_size or held[0]
        split = replace(job, vllm_gpus=count, vllm_tensor_parallel_size=size)
        splits.append(replace(context, hardware=rest, job=split))
    return splits


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """One change that makes the job fit."""

    change: str
    """The flag to pass."""
    layout: str
    high_bytes: int
    capacity_bytes: int

    def __str__(self) -> str:
        used = f"{gigabytes(self.high_bytes)} of {gigabytes(self.capacity_bytes)} GB GPU memory"
        return f"{self.change} ({self.layout}, up to {used})"


def cheapest_changes(context: SearchContext) -> tuple[Suggestion, ...]:
    """Return up to three changes that would fit: first fixed settings set to auto, then the method, then hardware.

    At most one change of each kind is returned, the cheapest; other clusters fill the remaining places.
    """
    suggestions: list[Suggestion] = []
    hardware, job = context.hardware, context.job

    *jobs, adapters = ([(hardware, changed) for changed in kind] for kind in _changed_jobs(hardware, job))
    *sizes, others = ([(cluster, job) for cluster in kind] for kind in _changed_clusters(hardware, job))
    for changes in (*jobs, *sizes, adapters, others):
        limit = min(_MOST, len(suggestions) + (_MOST if changes is others else 1))
        if len(suggestions) == limit:
            continue
        for cluster, changed in changes:
            trial = replace(context, hardware=cluster, job=changed)
            try:
                splits = [split for split in splits_with_server(trial) if anything_fits(split)]
                evaluated = [search(split, compare=False).chosen for split in splits]
            except ShardwrightError:
                continue
            fitting = [each for each in evaluated if each is not None]
            chosen = max(fitting, key=lambda each: each.time.tokens_per_second, default=None)
            flags = change_flags(hardware, job, cluster, changed)
            # A larger accelerator can be among the other clusters too.
            if chosen is not None and flags not in (known.change for known in suggestions):
                gpu, name = chosen.memory.gpu, display_name(chosen.layout)
                suggestions.append(
                    Suggestion(change=flags, layout=name, high_bytes=gpu.high_bytes, capacity_bytes=gpu.capacity_bytes)
                )
            if len(suggestions) == limit:
                break
    return tuple(suggestions)


def adapters_without_offload(context: SearchContext, chosen: Evaluated) -> str:
    """Return a sentence that offers LoRA, if the chosen layout of full training offloads and LoRA fits without."""
    job = context.job
    if job.method != "full" or job.offload != "auto" or chosen.layout.offload_optimizer == "none":
        return ""
    try:
        fits = anything_fits(replace(context, job=replace(job, method="lora", offload="none")))
    except ShardwrightError:
        return ""
    return " With --method lora it fits without offload." if fits else ""


def _changed_jobs(hardware: HardwareSpec, job: TrainingJob) -> Iterator[list[TrainingJob]]:
    """Yield alternatives of each kind of change, the cheapest first; the last kind is QLoRA on short sequences."""
    fields: dict[str, Any] = {
        "gradient_checkpointing": "auto",
        "micro_batch_size": None,
        "offload": "auto",
        "strategy": "auto",
        **{f"{second.role}_placement": "auto" for second in job.second_models},
        **dict.fromkeys(AXIS_FIELDS),
    }
    if job.task in GROUPED_TASKS:
        fields |= dict.fromkeys(("vllm_tensor_parallel_size", "vllm_memory_share", "vllm_gpus"))
        fields |= {"vllm_sleep": "auto", "generation": "auto"}
    fixed = {field: value for field, value in fields.items() if getattr(job, field) != value}
    one_open = [replace(job, **{field: value}) for field, value in fixed.items()]
    yield one_open + ([replace(job, **fixed)] if len(fixed) > 1 else [])

    placements: tuple[Placement, ...] = ("cached", "quantized")
    if job.second_models:
        yield [
            job.placed(second.role, placement)
            for second in job.second_models
            for placement in placements
            if second.placement != placement and not second.trained
        ]
    else:
        yield [replace(job, loss="chunked")] if job.loss != "chunked" else []

    # Sequence and context parallelism can split the rounded length over all ranks.
    unit = 2 * hardware.world_size
    rounded = job.seq_len_tokens // unit * unit
    is_shorter = _SHORTEST_SEQUENCE <= rounded < job.seq_len_tokens
    lengths = [rounded] if is_shorter else [job.seq_len_tokens]
    lengths += _halved(lengths[0])
    yield [replace(job, seq_len_tokens=length) for length in lengths if length < job.seq_len_tokens]

    smaller: list[TrainingJob] = []
    if job.method == "full":
        if job.optimizer in ("adamw_torch_fused", "adamw_torch"):
            smaller.append(replace(job, optimizer="adamw_8bit"))
        if job.weights_dtype != "bf16":
            smaller.append(replace(job, weights_dtype="bf16"))
        # Rounded moments, approximated moments, then rounded weights.
        others = [replace(job, optim_args="", weights_dtype="fp32", optimizer=name) for name in _SMALLER_OPTIMIZERS]
        smaller += [*others, replace(others[1], weights_dtype="bf16", optim_args="bf16_stochastic_round=true")]
    yield smaller

    # LoRA instead of QLoRA: only the first rank of sharded 16-bit weights loads them. That is less host memory where
    # bitsandbytes leaves most weights in 16 bit, as fused experts.
    methods: dict[Method, tuple[Method, ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ("lora",)}
    yield [replace(job, method=method) for method in methods[job.method]]

    yield [
        replace(job, method="qlora", loss="chunked", seq_len_tokens=length)
        for length in (job.seq_len_tokens, *_halved(job.seq_len_tokens))
        if length >= _SHORTEST_SEQUENCE
    ]


def _halved(length: int) -> list[int]:
    lengths = []
    while (length := length // 2) >= _SHORTEST_SEQUENCE:
        lengths.append(length)
    return lengths


def _changed_clusters(hardware: HardwareSpec, job: TrainingJob) -> Iterator[list[HardwareSpec]]:
    """Yield clusters with more accelerators, larger ones, more host memory, and others by total memory."""
    more, nodes, gpus = [], hardware.nodes, hardware.gpus_per_node
    while nodes * gpus < _LARGEST_WORLD:
        nodes, gpus = (nodes, min(8, 2 * gpus)) if gpus < 8 else (2 * nodes, gpus)
        larger = with_gpus(hardware, nodes=nodes, gpus_per_node=gpus)
        if job.global_batch_size is None or job.global_batch_size % larger.world_size == 0:
            more.append(larger)
    yield more

    # An accelerator of each memory size in GiB, the first of the catalog.
    kinds: dict[float, str] = {}
    for gpu, entry in gpu_catalog().items():
        kinds.setdefault(float(entry["usable_gib"]), gpu)
    options = hardware.options()

    def named(name: str) -> HardwareSpec:
        return parse_hardware(name, host_memory=options.get("host_memory"), nvme=options.get("nvme"))

    count = f"{hardware.nodes}x" * (hardware.nodes > 1) + f"{hardware.gpus_per_node}x"
    yield [named(count + gpu) for memory, gpu in sorted(kinds.items()) if memory * 2**30 > hardware.gpu_bytes * 1.02]

    assumed = tuple(name for name in hardware.assumed if name != "host_bytes_per_node")
    host_sizes = (hardware.host_bytes_per_node * 2**power for power in range(1, 5))
    yield [replace(hardware, host_bytes_per_node=size, assumed=assumed) for size in host_sizes]

    sizes = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8), (64, 8)]
    clusters = [
        (nodes * gpus * memory, f"{nodes}x{gpus}x{gpu}")
        for nodes, gpus in sizes
        for memory, gpu in kinds.items()
        if gpu != "CPU"
    ]
    yield [named(name) for _, name in sorted(clusters)]
