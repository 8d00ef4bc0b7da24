"""Candidates of the search: every layout with each micro-batch, recomputation, buffer size and loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil, lcm, prod
from typing import Any

from ..legality.rules import BATCH_RULES, LAYOUT_RULES, Rule, broken_rules, legality_errors
from ..memory.communication import default_zero_options
from ..memory.estimate import Calibration, MemoryEstimate, estimate_memory
from ..specs.errors import ConfigError
from ..specs.hardware import HardwareSpec
from ..specs.job import GROUPED_TASKS, LossImplementation, StrategyName, TrainingJob
from ..specs.layout import Layout, OffloadDevice
from ..specs.model import ModelSpec, has_liger_loss
from ..specs.tasks import TASKS
from ..step_time.estimate import StepTime, estimate_step_time
from ..step_time.learning import MeasuredStep, corrected_time

ENGINES_OF_AXIS: Mapping[str, tuple[StrategyName, ...]] = {
    "tp": ("zero1", "zero2"),
    "pp": ("zero1",),
    "sp": ("zero1", "zero2", "zero3"),
    "cp": ("fsdp2",),
    "ep": ("zero1", "zero2", "zero3"),
}
"""Engines that the planner may choose for each axis, by their `--strategy` name."""

_OFFLOADING_AXES = ("sp", "ep")
"""Axes that are tried together with offload without a request: long sequences and many experts need it."""


def requests_axes(job: TrainingJob) -> bool:
    return any((size or 1) > 1 for size in job.axis_sizes.values())


def axes_to_try(model: ModelSpec, hardware: HardwareSpec, job: TrainingJob, offload: str) -> Iterator[dict[str, int]]:
    """Yield the axes of each layout to try.

    Requested sizes are yielded unchecked, so that rules can reject them. If only tensor or only pipeline parallelism is
    requested, it is also combined with every size of the other. Without a request, one axis at a time is tried at every
    divisor of the ranks that can be legal, and tensor with pipeline parallelism.
    """
    fixed = {axis: size for axis, size in job.axis_sizes.items() if size is not None}
    requested = {axis: size for axis, size in fixed.items() if size > 1}
    world, sizes = hardware.world_size, model.dimensions
    limits = {
        "tp": hardware.gpus_per_node,
        "pp": min(world, sizes.num_layers),
        "sp": min(world, sizes.num_attention_heads),
        "cp": world,
        "ep": min(world, sizes.num_experts),
    }
    if requested:
        yield requested
    if job.second_models or TASKS[job.task].head != "model":
        # They support no other axes than requested sequence parallelism.
        return
    if requested:
        ((axis, size), *others) = requested.items()
        other = {"tp": "pp", "pp": "tp"}.get(axis)
        if others or offload != "none" or other is None or other in fixed:
            return
        for count in _divisors(world, limits[other]):
            if world % (size * count) == 0:
                yield {"tp": size, "pp": count} if axis == "tp" else {"tp": count, "pp": size}
        return
    for axis, limit in limits.items():
        if axis not in fixed and (offload == "none" or axis in _OFFLOADING_AXES):
            for size in _divisors(world, limit):
                yield {axis: size}
    if offload == "none" and not fixed.keys() & {"tp", "pp"}:
        for tp, pp in product(_divisors(world, limits["tp"]), _divisors(world, limits["pp"])):
            if world % (tp * pp) == 0:
                yield {"tp": tp, "pp": pp}


def _divisors(world: int, limit: int) -> list[int]:
    return [size for size in range(2, min(world, limit, 1024) + 1) if world % size == 0]


_OFFLOADS: dict[str, tuple[OffloadDevice, OffloadDevice]] = {
    "none": ("none", "none"),
    "cpu": ("cpu", "none"),
    "cpu-all": ("cpu", "cpu"),
    "nvme": ("nvme", "cpu"),
    "nvme-all": ("nvme", "nvme"),
}
"""Devices of optimizer states and parameters."""
_AUTO_NAMES = ("single", "ddp", "zero1", "zero2", "zero3", "zero3-hpz", "fsdp2", "fsdp2-hybrid")
_QUANTIZING = ("zero3", "zero3-hpz")
"""Engines with quantized collectives."""


def layouts_to_search(model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> list[Layout]:
    """Return the layouts that the job allows, with one sequence per micro-batch.

    The search then chooses micro-batch, recomputation, buffers and loss of each.
    """
    explicit = job.strategy != "auto"
    quantized = job.zero_quantized_weights or job.zero_quantized_gradients
    names: tuple[str, ...] = (job.strategy,) if explicit else _QUANTIZING if quantized else _AUTO_NAMES
    offloads: tuple[str, ...] = ("none", "cpu", "cpu-all")
    if job.offload == "nvme":
        offloads = ("nvme", "nvme-all")
    elif job.offload != "auto":
        offloads = (job.offload,)
    elif hardware.nvme_bytes_per_node:
        offloads = (*offloads, "nvme", "nvme-all")
    layouts: list[Layout | None] = []
    for offload in offloads:
        if not requests_axes(job):
            layouts += [_build(name, offload, model, hardware, job) for name in names]
        for axes in axes_to_try(model, hardware, job, offload):
            for name in _engines_for_axes(job, axes, quantized=quantized):
                base = _build(name, offload, model, hardware, replace(job, strategy=name))
                if base is not None:
                    # The remaining ranks are data-parallel.
                    left = max(1, hardware.world_size // prod(size for axis, size in axes.items() if axis != "ep"))
                    shards = max(1, left // base.dp_replicate)
                    sizes = {"dp_replicate": left} if base.dp_shard == 1 else {"dp_shard": shards}
                    layouts.append(base.changed(**axes, **sizes))
    legal = [layout for layout in layouts if layout is not None]
    if not quantized:
        return legal
    flags = {"quantized_weights": job.zero_quantized_weights, "quantized_gradients": job.zero_quantized_gradients}
    return [replace(layout, zero=replace(layout.zero, **flags)) for layout in legal]


def _engines_for_axes(job: TrainingJob, axes: Mapping[str, int], *, quantized: bool) -> tuple[StrategyName, ...]:
    """Return the engines to try for these axes.

    That is a requested engine if the axes were requested too or run on it, else all that the axes run on. If
    quantized collectives are requested and none of these engines has them, the result is empty, or for requested axes
    one engine whose rules then report why.
    """
    names: tuple[StrategyName, ...]
    if job.strategy != "auto":
        allowed = requests_axes(job) or all(job.strategy in ENGINES_OF_AXIS[axis] for axis in axes)
        names = (job.strategy,) if allowed else ()
    else:
        engines: tuple[StrategyName, ...] = ("zero1", "zero2", "zero3", "fsdp2")
        names = tuple(name for name in engines if all(name in ENGINES_OF_AXIS[axis] for axis in axes))
        names = names or ENGINES_OF_AXIS[next(iter(axes))][:1]
    if not quantized:
        return names
    able = tuple(name for name in names if name in _QUANTIZING)
    if able or not requests_axes(job):
        return able
    return ("zero3",) if job.strategy == "auto" else (job.strategy,)


def _build(name: str, offload: str, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> Layout | None:
    """Return the layout of an engine with an offload tier; `None` if it is only tried on request."""
    optimizer_device, parameter_device = _OFFLOADS[offload]
    world, automatic, offloads = hardware.world_size, job.strategy == "auto", offload != "none"
    if name in ("single", "ddp"):
        if (offloads and (automatic or job.offload == "auto")) or (automatic and (name == "single") != (world == 1)):
            return None
        return Layout(
            engine="single" if name == "single" else "ddp",
            offload_optimizer=optimizer_device,
            offload_param=parameter_device,
            dp_replicate=world,
        )
    if name.startswith("fsdp2"):
        hybrid = name == "fsdp2-hybrid"
        if automatic and (world == 1 or (hybrid and hardware.nodes == 1)):
            return None
        if (automatic or job.offload == "auto") and offload not in ("none", "cpu-all"):
            return None
        return Layout(
            engine="fsdp2",
            offload_optimizer=optimizer_device,
            offload_param=optimizer_device,
            dp_replicate=hardware.nodes if hybrid else 1,
            dp_shard=hardware.gpus_per_node if hybrid else world,
        )
    stage = 3 if name == "zero3-hpz" else int(name.removeprefix("zero"))
    if automatic and world == 1 and (not offloads or stage == 1):
        return None
    # Stage 1 keeps full gradients, so offload starts at stage 2; parameters and NVMe need stage 3.
    if (automatic or job.offload == "auto") and stage < {"none": 0, "cpu": 2}.get(offload, 3):
        return None
    if job.offload == "nvme" and stage < 3:
        # One layout is enough to report that NVMe needs stage 3.
        if offload == "nvme-all":
            return None
        parameter_device = "none"
    zero = default_zero_options(model, job, stage=stage)
    if name == "zero3-hpz":
        if automatic and (hardware.nodes == 1 or offloads):
            return None
        zero = replace(zero, hpz_partition_size=hardware.gpus_per_node)
    if parameter_device == "nvme":
        # A swap buffer must hold the largest shard (partitioned_param_swapper.py:357).
        zero = replace(zero, parameter_buffer_elements=-(-model.largest_parameter // world))
    return Layout(
        engine="deepspeed",
        zero_stage=stage,
        offload_optimizer=optimizer_device,
        offload_param=parameter_device,
        dp_replicate=world if stage == 0 else 1,
        dp_shard=1 if stage == 0 else world,
        zero=zero,
    )


Complexity = tuple[bool, int, int, int, bool, bool]


STEP_TOKENS = 16_384
"""Most tokens per accelerator and step when the user sets no global batch. A micro-batch of that size keeps every
product large (Megatron-LM, arXiv 2104.04473); which batch trains well is the user's decision."""


def planned_global_batch(job: TrainingJob, accelerators: int, *, smallest: bool = False) -> int:
    """Return the sequences of one optimizer step, the same for every layout that is compared.

    `smallest` is for jobs that only fit with one sequence per accelerator.

    >>> planned_global_batch(TrainingJob(seq_len_tokens=4096), 8)
    32
    """
    if job.global_batch_size is not None:
        return job.global_batch_size
    if job.micro_batch_size is not None:
        return job.micro_batch_size * accelerators
    task = TASKS[job.task]
    tokens = job.seq_len_tokens * task.sequences_per_sample
    most = max(task.least_micro_batch, 1 if smallest else STEP_TOKENS // tokens)
    if job.task not in GROUPED_TASKS:
        return accelerators << (most.bit_length() - 1)
    # Complete groups of completions. Decoding more of them together takes hardly longer.
    most = most if smallest else max(most, job.generations)
    return lcm(accelerators << (most.bit_length() - 1), job.generations)


def global_batch_reason(job: TrainingJob, accelerators: int, sequences: int) -> str:
    """Return why a plan has this many sequences per optimizer step."""
    planned = planned_global_batch(job, accelerators)
    if job.global_batch_size is not None:
        return "requested"
    if job.micro_batch_size is not None and sequences == planned:
        return "one requested micro-batch per accelerator"
    least = TASKS[job.task].least_micro_batch
    if sequences == planned and job.task in GROUPED_TASKS and planned * job.seq_len_tokens > accelerators * STEP_TOKENS:
        return f"{planned // job.generations} groups of {job.generations} completions, which are decoded together"
    if sequences == planned and planned > accelerators * least:
        tokens = planned // accelerators * job.seq_len_tokens
        return f"{tokens:,} tokens per accelerator, enough for an efficient step"
    fewest = (
        "one sequence per accelerator" if least == 1 else f"{least} sequences per accelerator, the fewest of {job.task}"
    )
    if sequences == planned:
        return fewest
    if sequences == accelerators * least:
        return f"{fewest}, because {planned // accelerators} do not fit without offload"
    return "the global batch of the plan for more nodes"


LARGEST_MICRO_BATCH_TOKENS = 65_536
"""Tokens of one micro-batch above which speed no longer grows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchContext:
    """Everything that a search depends on."""

    model: ModelSpec
    hardware: HardwareSpec
    job: TrainingJob
    calibration: Calibration | None = None
    measured_steps: tuple[MeasuredStep, ...] = ()
    smallest_batch: bool = False
    """Whether an open global batch has one sequence per accelerator."""
    long_sequences: bool = False
    """Whether tiled MLPs, tiled losses and offloaded checkpoints are tried without a request."""

    def broken_rules(self, rules: Iterable[Rule], layout: Layout) -> Iterator[ConfigError]:
        return broken_rules(rules, self.model, layout, self.job, self.hardware)


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A layout with micro-batch and recomputation, for a job whose loss and second models' placements are resolved."""

    layout: Layout
    context: SearchContext
    index: int
    lean: bool = False
    """Whether its buffers are smaller than DeepSpeed's defaults."""
    keeping: Candidate | None = None
    """The same candidate without recomputation, which is never slower."""

    @property
    def job(self) -> TrainingJob:
        return self.context.job

    @cached_property
    def time(self) -> StepTime:
        context = self.context
        time = estimate_step_time(self.layout, context.model, context.hardware, context.job)
        return corrected_time(time, context.measured_steps, hardware=context.hardware, engine=self.layout.engine)

    @cached_property
    def memory(self) -> MemoryEstimate:
        context = self.context
        return estimate_memory(
            self.layout, context.model, context.hardware, context.job, calibration=context.calibration
        )

    @cached_property
    def tokens_per_second(self) -> float:
        """Predicted speed, rounded to nine digits so that equal times summed in another order stay equal."""
        return float(f"{self.time.tokens_per_second:.9g}")

    @property
    def speed_limit(self) -> float:
        """A speed that the candidate does not exceed; that of `keeping` needs no further time estimate."""
        return (self.keeping or self).tokens_per_second

    @cached_property
    def complexity(self) -> Complexity:
        """Sort key: offloaded states, numbers of axes and mechanisms, sharding stage, FSDP2, buffers below defaults.

        Mechanisms are what a layout adds to plain data parallelism. Offload comes first: its speed depends on the host,
        about which a plan knows least. Axes come next: a stock Trainer runs everything else.
        """
        layout = self.layout
        devices = (layout.offload_optimizer, layout.offload_param)
        mechanisms = (
            *(device != "none" for device in devices),
            "nvme" in devices,
            layout.gradient_checkpointing,
            layout.tiled_mlp,
            layout.offloaded_checkpoints > 0,
            layout.zero.hpz_partition_size > 1,
            layout.engine == "fsdp2" and layout.dp_replicate > 1,
            self.job.loss == "chunked",
            layout.shards_parameters,
        )
        stage = 3 if layout.engine == "fsdp2" else layout.zero_stage or 0
        offloads, axes = devices != ("none", "none"), len(layout.axes)
        return offloads, axes, axes + sum(mechanisms), stage, layout.engine == "fsdp2", self.lean

    def with_recomputed(self, layers: int | None) -> Candidate:
        """Return the same layout with its first `layers` (of each stage) recomputed; `None` for all."""
        layout = self.layout.changed(gradient_checkpointing=True, checkpointed_layers=layers)
        return replace(self, layout=layout)

    @cached_property
    def best_with_recomputed(self) -> tuple[Complexity, float]:
        """Complexity with some recomputed layers, and the speed with one of them, which more layers do not reach."""
        least = self.with_recomputed(1)
        return least.complexity, least.tokens_per_second

    @cached_property
    def with_fewest_recomputed(self) -> Candidate | None:
        """The layout with as few recomputed layers as fit; `None` if all are needed, or too few.

        Recomputing all layers is a candidate that the search tries anyway.
        """
        everything, fitting = self.with_recomputed(None), None
        if not everything.memory.fits:
            return None
        low, high = 0, -(-self.context.model.dimensions.num_layers // self.layout.pp)
        most, least = (each.memory.gpu.high_bytes for each in (self, everything))
        capacity = self.memory.gpu.capacity_bytes
        while high - low > 1:
            # Memory falls almost evenly with each layer, so interpolation lands near the limit.
            share = (most - capacity) / (most - least) if most > capacity >= least else 0.5
            middle = min(high - 1, max(low + 1, low + ceil(share * (high - low))))
            partial = self.with_recomputed(middle)
            if partial.memory.fits:
                high, least, fitting = middle, partial.memory.gpu.high_bytes, partial
            else:
                low, most = middle, partial.memory.gpu.high_bytes
        return fitting

    def with_offloaded(self, layers: int) -> Candidate:
        """Return the same layout with the inputs of its first `layers` in host memory."""
        return replace(self, layout=self.layout.changed(offloaded_checkpoints=layers))

    def with_most_offloaded(self) -> Candidate:
        """Return the same layout with as many of its offloaded layer inputs in host memory as fit there."""
        host, layers = self.memory.host, self.layout.offloaded_checkpoints
        missing = host.peak_bytes_per_node - host.capacity_bytes_per_node
        each = (host.terms.get("offloaded_checkpoints", 0) + host.terms.get("pinned_rounding", 0)) / layers
        if missing <= 0 or missing >= each * layers:
            return self
        return self.with_offloaded(layers - ceil(missing / each))


def losses(context: SearchContext) -> list[SearchContext]:
    """Return the context with each loss to try.

    The chunked one needs Triton and a family that Liger supports; other models compute tiles, for long sequences only.
    With Liger's other kernels it is the only one, because `use_liger_kernel` of Transformers enables it too.
    """
    job, model = context.job, context.model
    if job.loss != "auto" or TASKS[job.task].head != "model":
        return [context]
    names: list[LossImplementation] = ["eager"]
    if not job.second_models and model.task == "causal_lm":
        fused = context.hardware.gpu != "CPU" and has_liger_loss(model.model_type, alone=not job.use_liger_kernel)
        if fused and job.use_liger_kernel:
            names = ["chunked"]
        elif fused or context.long_sequences:
            names.append("chunked")
    return [replace(context, job=replace(job, loss=loss)) for loss in names]


def candidates(
    layout: Layout, contexts: list[SearchContext], index: int, errors: list[ConfigError] | None
) -> Iterator[Candidate]:
    """Yield every legal candidate of a layout, without partial recomputation.

    There is one context for each loss to try. `errors` gets what makes candidates of the first one illegal.
    """
    job, layers, is_long = contexts[0].job, contexts[0].model.dimensions.num_layers, contexts[0].long_sequences
    # The ways to hold activations: recomputation, tiled MLP and offloaded layer inputs.
    switches = {"auto": (False, True), "off": (False,)}.get(job.gradient_checkpointing, (True,))
    requests_offload = job.offload_activations in ("on", "transformers")
    if requests_offload and job.gradient_checkpointing == "auto":
        switches = (True,)
    choices = {"on": (True,), "transformers": (True,), "off": (False,), "auto": (False, True) if is_long else (False,)}
    forms: list[dict[str, Any]] = [
        {"gradient_checkpointing": switch, "tiled_mlp": tiled, "offloaded_checkpoints": layers if offloads else 0}
        for switch, tiled, offloads in product(switches, choices[job.tiled_mlp], choices[job.offload_activations])
        if switch or not offloads or requests_offload
    ]
    layouts = [layout]
    if layout.engine == "deepspeed" and layout.zero_stage:
        small = replace(
            default_zero_options(contexts[0].model, job, stage=layout.zero_stage, lean=True),
            hpz_partition_size=layout.zero.hpz_partition_size,
            quantized_weights=layout.zero.quantized_weights,
            quantized_gradients=layout.zero.quantized_gradients,
            parameter_buffer_elements=layout.zero.parameter_buffer_elements,
        )
        layouts.append(replace(layout, zero=small))
    for context in contexts:
        # Most rules do not depend on the batch, of which there are many.
        legal = [not any(context.broken_rules(LAYOUT_RULES, layout.changed(**form))) for form in forms]
        collects = errors is not None and context is contexts[0]
        if not collects and not any(legal):
            continue
        sizes = micro_batches(layout, job, smallest=context.smallest_batch)
        keeping: dict[tuple[int, bool, bool], Candidate] = {}
        for (micro_batch, accumulation), variant, (is_legal, form) in product(
            sizes, layouts, tuple(zip(legal, forms, strict=True))
        ):
            if not collects and not is_legal:
                continue
            changed = variant.changed(micro_batch_size=micro_batch, gradient_accumulation_steps=accumulation, **form)
            if is_legal and not any(context.broken_rules(BATCH_RULES, changed)):
                lean = variant in layouts[1:]
                key = (micro_batch, lean, form["tiled_mlp"])
                candidate = Candidate(layout=changed, context=context, index=index, lean=lean, keeping=keeping.get(key))
                if not form["gradient_checkpointing"]:
                    keeping[key] = candidate
                yield candidate
            elif (
                collects
                and errors is not None
                # What the job requests, and nothing that the search adds.
                and (form["tiled_mlp"], form["offloaded_checkpoints"] > 0) == (job.tiled_mlp == "on", requests_offload)
            ):
                errors += legality_errors(context.model, changed, context.job, context.hardware)


def micro_batches(layout: Layout, job: TrainingJob, *, smallest: bool = False) -> list[tuple[int, int]]:
    """Return the micro-batch sizes to try with their accumulation steps, smallest first.

    Their product gives exactly the global batch, which is the same for every layout.
    """
    batch = planned_global_batch(job, layout.world_size, smallest=smallest)
    per_rank = max(1, batch // layout.data_parallel_size)
    if job.micro_batch_size is not None:
        return [(job.micro_batch_size, max(1, per_rank // job.micro_batch_size))]
    least = TASKS[job.task].least_micro_batch
    most = max(least, min(per_rank, LARGEST_MICRO_BATCH_TOKENS * layout.sp * layout.cp // job.seq_len_tokens))
    return [(size, per_rank // size) for size in range(1, most + 1) if per_rank % size == 0]
