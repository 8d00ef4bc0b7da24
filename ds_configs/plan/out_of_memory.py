"""What a run that ran out of memory needed, what its plan predicted, and the plans that need less."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from ..memory.estimate import OVERHEADS
from ..search.candidates import SearchContext
from ..search.reasons import display_name
from ..search.search import Evaluated, search
from ..specs.errors import ShardwrightError
from ..specs.job import AXIS_FIELDS, HUGGING_FACE_NAMES, PLACEMENT_FIELDS, TrainingJob
from ..specs.layout import Layout
from ..specs.texts import flag_words
from ..specs.units import gigabytes
from ..step_time.estimate import term_title
from .plan import Plan

FIRST_WORDS = "out of memory in phase"
"""Start of the message."""
_MOST_TERMS = 6
_LAYOUT_OPTIONS = {"micro_batch_size", "gradient_checkpointing", "strategy", "offload", "global_batch_size", "loss"}
_LAYOUT_OPTIONS |= {"tiled_mlp", "offload_activations", *PLACEMENT_FIELDS, *AXIS_FIELDS}


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """Measurements at the moment when an allocation failed."""

    phase: str
    """`loading`, `forward`, `backward`, `optimizer step` or `evaluation`."""
    error: str
    peak_bytes: int | None = None
    """Largest bytes of tensors on this rank; `None` if unknown."""
    limit_bytes: int | None = None
    """Memory that this rank could allocate; `None` if unknown."""
    on_host: bool = False
    """Whether the memory of the host ran out instead of that of an accelerator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NextPlan:
    """A layout with the same global batch that needs less memory than the plan."""

    evaluated: Evaluated
    job: TrainingJob


def next_plans(plan: Plan, failure: OutOfMemory) -> list[NextPlan]:
    """Return a smaller micro-batch, recomputation, sharding and offload, each if it fits; the fastest first.

    The planner gets a lower limit: the run has shown that the tensors of its layout need more than there is. A layout
    must need fewer bytes of tensors than the layout that failed, and than the rank could allocate; where the host ran
    out of memory, less host memory. Each job selects its layout also without the lower limit.
    """
    gpu, host = plan.chosen.memory.gpu, plan.chosen.memory.host
    allowed, least_host = gpu.capacity_bytes, host.capacity_bytes_per_node
    if failure.on_host:
        least_host = host.peak_bytes_per_node - 1
        hardware = replace(plan.hardware, host_bytes_per_node=least_host)
    else:
        allowed = min(gpu.allocated_bytes - 1, failure.limit_bytes or gpu.allocated_bytes)
        lower = max(1, gpu.high_bytes - (gpu.allocated_bytes - allowed))
        hardware = replace(plan.hardware, gpu_bytes=min(plan.hardware.gpu_bytes, lower))
    layout, job = plan.chosen.layout, plan.job
    open_fields = ("tiled_mlp", "offload_activations", *PLACEMENT_FIELDS)
    same = replace(layout_job(job, plan.chosen), **{name: getattr(job, name) for name in open_fields})
    smaller = [size for size in range(layout.micro_batch_size - 1, 0, -1) if layout.micro_batch_size % size == 0]
    recomputing = replace(same, gradient_checkpointing="on")
    # Alternatives of each kind of change, the smallest change first. `first k of n layers` counts as recomputation, so
    # that recomputing all layers is a change too.
    changes = [[replace(same, micro_batch_size=size) for size in smaller]]
    changes.append([recomputing, *(replace(recomputing, micro_batch_size=size) for size in smaller[-1:])])
    for strategy, offload in (
        ("zero3", "none"),
        ("fsdp2", "none"),
        ("zero2", "cpu"),
        ("zero3", "cpu"),
        ("zero3", "cpu-all"),
    ):
        moved: Any = {"strategy": strategy, "offload": offload} | dict.fromkeys(AXIS_FIELDS, 1)
        changes.append(
            [
                replace(same, micro_batch_size=size, gradient_checkpointing=recompute, **moved)
                for size in (layout.micro_batch_size, *smaller[-1:])
                for recompute in dict.fromkeys((same.gradient_checkpointing, "on"))
            ]
        )
    plans: list[NextPlan] = []
    for alternatives in changes:
        for changed in alternatives:
            context = SearchContext(model=plan.model, hardware=hardware, job=changed)
            if (lean := _chosen(context)) is None:
                continue
            fixed = layout_job(changed, lean)
            evaluated = _chosen(replace(context, hardware=plan.hardware, job=fixed))
            if evaluated is None or evaluated.memory.host.peak_bytes_per_node > least_host:
                continue
            if evaluated.memory.gpu.allocated_bytes <= allowed:
                plans.append(NextPlan(evaluated=evaluated, job=fixed))
                break
    return sorted(plans, key=lambda next_plan: -next_plan.evaluated.time.tokens_per_second)


def _chosen(context: SearchContext) -> Evaluated | None:
    try:
        return search(context, compare=False).chosen
    except ShardwrightError:
        return None


def layout_job(job: TrainingJob, evaluated: Evaluated) -> TrainingJob:
    """Return the job with every setting of a layout, where options can express it."""
    layout = evaluated.layout
    changed: dict[str, Any] = {field: layout.axes.get(axis, 1) for field, axis in AXIS_FIELDS.items()}
    changed |= {f"{role}_placement": choice.placement for role, choice in evaluated.placements.items()}
    recomputation = "reentrant" if job.gradient_checkpointing == "reentrant" else "on"
    input_offload = "transformers" if job.offload_activations == "transformers" else "on"
    changed |= {
        "strategy": layout.label.partition("+")[0],
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_size": layout.global_batch_size,
        "gradient_checkpointing": recomputation if layout.gradient_checkpointing else "off",
        "offload": layout.offload_name,
        "loss": evaluated.loss,
        "tiled_mlp": "on" if layout.tiled_mlp else "off",
        "offload_activations": input_offload if layout.offloaded_checkpoints else "off",
    }
    return replace(job, **changed)


def out_of_memory_text(plan: Plan, failure: OutOfMemory, command: str = "", options: Collection[str] = ()) -> str:
    """Return the message of a run that ran out of memory.

    Options of other plans are added to the `command` of the run, which has the job's `options`; without a command, the
    message has those that make the plans.
    """
    gpu, layout = plan.chosen.memory.gpu, plan.chosen.layout
    lines = [f"{FIRST_WORDS} {failure.phase}: {failure.error}"]
    lines.append(f"layout: {_settings(layout)}")
    if failure.on_host:
        host = plan.chosen.memory.host
        lines.append(
            f"planned host memory: {_size(host.peak_bytes_per_node)} of {_size(host.capacity_bytes_per_node)} per node"
        )
        terms = host.terms
    else:
        limit = "" if failure.limit_bytes is None else f" of {_size(failure.limit_bytes)} that this rank can allocate"
        if failure.peak_bytes is not None:
            lines.append(f"measured peak of tensors: {_size(failure.peak_bytes)}{limit}")
        lines.append(
            f"planned peak of tensors: {_size(gpu.allocated_bytes)} (phase {gpu.phase}); with runtime and "
            f"fragmentation {_size(gpu.peak_bytes)}, up to {_size(gpu.high_bytes)}"
        )
        no_tensors = {term.name for term in OVERHEADS}
        terms = {name: count for name, count in gpu.terms.items() if name not in no_tensors}
    largest = sorted(terms.items(), key=lambda term: -term[1])[:_MOST_TERMS]
    lines += [
        f"  {term_title(name):<24}{_size(count):>12}{'  largest term' if index == 0 else ''}"
        for index, (name, count) in enumerate(largest)
        if count > 0.001 * largest[0][1]
    ]
    plans = next_plans(plan, failure)
    if not plans:
        lines.append("no layout with the same global batch needs less memory on this hardware")
        lines.append("use more accelerators, a shorter --seq-len, or --method lora")
    for index, alternative in enumerate(plans):
        if index == 0:
            lines.append("plans with the same global batch that need less:")
        memory = alternative.evaluated.memory
        needed = f"{_size(memory.gpu.allocated_bytes)} of tensors"
        if failure.on_host:
            needed = f"{_size(memory.host.peak_bytes_per_node)} of host memory"
        speed = f"{alternative.evaluated.time.tokens_per_second:,.0f} tokens/s"
        lines.append(f"  {_settings(alternative.evaluated.layout)}: {needed}, {speed}")
        lines.append(f"    {_command(plan, alternative.job, command, options)}")
    return "\n".join(lines)


def _command(plan: Plan, job: TrainingJob, command: str, options: Collection[str]) -> str:
    if not command:
        words = ["shardwright", "plan", plan.model.name]
        words += [] if plan.model.revision is None else ["--revision", plan.model.revision]
        return shlex.join(
            [*words, *flag_words(plan.hardware.options()), *job.flags(), "--output-dir", "plan", "--force"]
        )
    words = shlex.split(command)
    has_plan = any(word.partition("=")[0] == "--plan" for word in words)
    # The command has its other settings already, from any source, unless its plan had them.
    replaced = set(options) if has_plan else set(options) & _LAYOUT_OPTIONS
    names = {"plan", *replaced, *(other for name in replaced for other in HUGGING_FACE_NAMES.get(name, ()))}
    kept: list[str] = []
    skips = False
    for word in words:
        option, sign, _ = word.partition("=")
        is_replaced = option.startswith("--") and option[2:].replace("-", "_") in names
        if not (is_replaced or skips):
            kept.append(word)
        skips = is_replaced and not sign
    if "--resume" not in kept and "--force" not in kept:
        kept.append("--force")
    stated = {name: text for name, text in plan.hardware.options().items() if has_plan and name != "num_processes"}
    return shlex.join([*kept, *flag_words(stated), *job.flags(None if has_plan else TrainingJob(), of=replaced)])


def _settings(layout: Layout) -> str:
    recomputes = "with" if layout.gradient_checkpointing else "no"
    micro_batches = f"micro-batch {layout.micro_batch_size} x {layout.gradient_accumulation_steps}"
    return f"{display_name(layout)}, {micro_batches}, {recomputes} gradient checkpointing"


def _size(count: int) -> str:
    return f"{gigabytes(count)} GB" if count >= 10**9 else f"{count / 1e6:.3g} MB"
