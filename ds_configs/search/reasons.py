"""Reasons of a plan: one or two short sentences for the chosen layout and for each alternative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..memory.generation import vllm_share
from ..memory.rank_parameters import Terms
from ..specs.job import AXIS_FIELDS, GROUPED_TASKS
from ..specs.layout import Layout
from ..specs.units import gigabytes
from ..step_time.estimate import term_title
from ..step_time.utilization import low_utilization_reason
from .candidates import Candidate, SearchContext, global_batch_reason, requests_axes

AS_FAST = 0.95
"""Share of the best predicted speed at which a layout is as fast, so that the simpler one is preferred.

In published tables (docs/measurements/step_time.md), predictions of two configurations of one job differ in their error
by 6 % in the median. Of two, the one predicted to be up to 5 % faster was faster in three of five pairs, and from 5 to
10 % in three of four. A smaller predicted gain may be a loss, and does not justify ZeRO-3, gradient checkpointing, or
any other mechanism."""

OFFLOAD_GAIN = 1.25
"""How much faster than any layout without it offload has to be. Its price was not measured on accelerators, and some
steps with it take several times what its traffic explains (7B on eight A800: 17 to 20 s more)."""

_NAMES = {
    "single": "One process",
    "ddp": "DDP",
    "zero0": "ZeRO-0",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "zero3-hpz": "ZeRO-3 with hpZ",
    "fsdp2": "FSDP2",
    "fsdp2-hybrid": "Hybrid FSDP2",
}


def display_name(layout: Layout) -> str:
    """Return the layout's name for people, such as `ZeRO-1 + TP 2` or `ZeRO-2 + CPU offload of optimizer`."""
    base, *parts = layout.label.split("+")
    names = [_NAMES[base]]
    for part in parts:
        axis = part[:2]
        if axis in layout.axes and part[2:].isdigit():
            names.append(f"{axis.upper()} {part[2:]}")
        else:
            names.append(part.replace("cpu-", "CPU ").replace("nvme-", "NVMe "))
    return " + ".join(names)


def chosen_reason(
    best: Candidate, context: SearchContext, *, rows: Sequence[Candidate], others: Sequence[Candidate]
) -> str:
    """Return why a layout was chosen.

    `rows` are the layouts that the plan lists, each as a plan that requests it would have it, of all `others`.
    """
    layout, gpu, time, job = best.layout, best.memory.gpu, best.time, context.job
    sizes = context.model.dimensions
    sequences = f"sequences of {job.seq_len_tokens:,} tokens"
    split = {
        "tp": f"the matrices of each layer ({sizes.num_attention_heads} heads)",
        "pp": f"the {sizes.num_layers} layers, with {layout.gradient_accumulation_steps} micro-batches per step",
        "sp": sequences,
        "cp": sequences,
        "ep": f"the {sizes.num_experts} experts of each layer",
    }
    micro_batch = str(layout.micro_batch_size)
    if layout.gradient_accumulation_steps > 1:
        micro_batch += f" x {layout.gradient_accumulation_steps}"
    batch_size = layout.global_batch_size
    size = f"{batch_size:,} sequence{'s' if batch_size > 1 else ''} ({batch_size * best.job.seq_len_tokens:,} tokens)"
    batch_reason = global_batch_reason(best.job, context.hardware.world_size, batch_size)
    set_by = " (--global-batch-size)" if best.job.global_batch_size is None else ""
    sentences = [
        f"{display_name(layout)} is {_preference(best, context, rows)}.",
        f"Micro-batch {micro_batch}, {_recomputation(best)}.",
        f"Global batch {size}: {batch_reason}{set_by}.",
    ]
    if job.task in GROUPED_TASKS and job.generation != "vllm-server":
        sentences.append(_generation(best, context))
    if low := low_utilization_reason(time, context.model, context.hardware, best.job):
        sentences.append(low)
    if gpu.calibrated_runs:
        runs = f"{gpu.calibrated_runs} measured run{'s' if gpu.calibrated_runs > 1 else ''}"
        sentences.append(f"The memory interval comes from {runs} on {context.hardware.gpu}.")
    if time.measured_runs:
        runs = f"{time.measured_runs} measured run{'s' if time.measured_runs > 1 else ''}"
        times = f"Step times are {time.learned_scale:.2f} times the published prediction"
        sentences.append(f"{times}, from {runs} on {context.hardware.gpu} (shardwright calibrate --list).")
    if layout.pp > 1 and job.pipeline_parallel_size is None:
        sentences.append("Only pipelines fit. A stock Trainer cannot run one: PipelineTrainer does.")
    batch, ranks = job.global_batch_size, layout.world_size
    if batch is not None and layout.axes and not requests_axes(job) and batch % ((job.micro_batch_size or 1) * ranks):
        shown = f" in micro-batches of {job.micro_batch_size}" if (job.micro_batch_size or 1) > 1 else ""
        sentences.append(f"Data parallelism alone cannot divide a global batch of {batch} over {ranks} ranks{shown}.")
    sentences += [f"{axis.upper()} {size} splits {split[axis]}." for axis, size in layout.axes.items()]
    if layout.axes and (large := _too_large(layout, others)):
        sentences.append(f"Too large: {large}.")
    return " ".join(sentences)


def _generation(best: Candidate, context: SearchContext) -> str:
    """Return where completions come from."""
    job, hardware, requested = best.job, context.hardware, context.job
    if job.generation == "transformers":
        tried = requested.generation == "auto" and hardware.gpu != "CPU"
        return "Completions come from `generate`" + (": vLLM does not fit beside training." if tried else ".")
    share, size = vllm_share(best.layout, context.model, job, hardware.gpu_bytes), job.vllm_tensor_parallel_size or 1
    engine = f"{size} GPU{'s' if size > 1 else ''} per engine with {share:.0%} of the memory"
    state = "asleep during updates" if job.vllm_sleep == "on" else "awake during updates"
    is_open = requested.vllm_tensor_parallel_size is None or requested.vllm_sleep == "auto"
    why = " It is the simplest way that fits." if is_open else ""
    return f"Completions come from vLLM on the training GPUs: {engine}, {state}.{why}"


def _preference(best: Candidate, context: SearchContext, rows: Sequence[Candidate]) -> str:
    layout, job = best.layout, context.job
    sizes = " with the requested sizes" if requests_axes(job) else ""
    if job.strategy != "auto":
        return "the requested strategy"
    if layout.engine == "single":
        return "all that one accelerator needs"
    faster = [row for row in rows if row.memory.fits and row.tokens_per_second > best.tokens_per_second]
    faster.sort(key=lambda row: -row.tokens_per_second)
    pipelines = [row for row in faster if row.layout.pp > 1 and layout.pp == 1]
    offloading = [row for row in faster if _only_offload_differs(row, best) and row not in pipelines]
    near = [row for row in faster if row not in pipelines and row not in offloading]
    in_rings = [row for row in near if row.layout.cp > 1 and layout.cp == 1]
    near = [row for row in near if row not in in_rings]
    # Others are named only if they are faster than the layout that is compared with.
    named = (near[0] if near else best).tokens_per_second
    pipelines, offloading, in_rings = (
        [row for row in group if row.tokens_per_second > named] for group in (pipelines, offloading, in_rings)
    )
    layouts = f"layout{' without offload' if offloading else ''}{' without context parallelism' if in_rings else ''}"
    layouts += " that a stock Trainer runs" if pipelines else ""
    if near:
        gain, name = _percent(near[0], best), display_name(near[0].layout)
        text = f"simpler than the fastest {layouts}{sizes}: {name} is only {gain} % faster"
    else:
        text = f"the fastest {layouts}{'' if offloading or pipelines or in_rings else ' that fits'}{sizes}"
    if offloading:
        text += (
            f". {display_name(offloading[0].layout)} is predicted to be {_percent(offloading[0], best)} % faster; "
            f"offload, whose speed is less certain, has to be {OFFLOAD_GAIN - 1:.0%} faster"
        )
    return text


def _percent(faster: Candidate, best: Candidate) -> str:
    """Return how much faster a candidate is, in the digits of the table of alternatives."""
    gain = 100 * (faster.time.tokens_per_second / best.time.tokens_per_second - 1)
    return f"{gain:.1f}" if gain >= 0.05 else "0.1"


def _only_offload_differs(faster: Candidate, best: Candidate) -> bool:
    """Return whether a faster layout was rejected because it offloads and the chosen one does not."""
    return faster.layout.offload_optimizer != "none" and best.layout.offload_optimizer == "none"


def _recomputation(candidate: Candidate) -> str:
    layout = candidate.layout
    layers = -(-candidate.context.model.dimensions.num_layers // layout.pp)
    text = "gradient checkpointing" if layout.gradient_checkpointing else "no gradient checkpointing"
    if layout.gradient_checkpointing and layout.checkpointed_layers is not None:
        text += f" of the first {layout.checkpointed_layers} of {layers} layers"
    if count := layout.offloaded_checkpoints:
        text += f" with {'all' if count >= layers else f'{count} of {layers}'} layer inputs in host memory"
    text += ", tiled MLP" if layout.tiled_mlp else ""
    return text + (", chunked loss" if candidate.job.loss == "chunked" else "")


def _seconds(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.4f}"


def _too_large(layout: Layout, others: Sequence[Candidate]) -> str:
    """Return the next smaller size of the same axes that does not fit, and the smallest layout without axes."""

    def size(layout: Layout) -> int:
        return max(layout.axes.values(), default=1)

    failing = [other for other in others if not other.memory.fits]
    same = [
        other
        for other in failing
        if other.layout.axes.keys() == layout.axes.keys() and size(other.layout) < size(layout)
    ]
    same.sort(key=lambda other: (-size(other.layout), other.memory.gpu.high_bytes))
    plain = sorted((other for other in failing if not other.layout.axes), key=lambda other: other.memory.gpu.high_bytes)
    largest = ((other, other.memory.fullest) for other in same[:1] + plain[:1])
    return ", ".join(
        f"{display_name(other.layout)} (up to {gigabytes(needed)} GB {kind})" for other, (kind, needed, _) in largest
    )


def rejected_reason(candidate: Candidate, best: Candidate | None) -> str:
    """Return why a layout was not chosen: which memory is too small, or how much slower it is than the chosen one."""
    memory, job = candidate.memory, candidate.job
    name, gpu, host = display_name(candidate.layout), memory.gpu, memory.host
    for second in job.second_models:
        placement = "as a replica" if second.placement == "replica" else second.placement
        name += f" with the {second.role} {placement}"
    if memory.lacks == "GPU":
        return (
            f"{name} lacks GPU memory: it needs up to {gigabytes(gpu.high_bytes)} of "
            f"{gigabytes(gpu.capacity_bytes)} GB: {_largest_terms(gpu.terms)}."
        )
    if memory.lacks == "host":
        return (
            f"{name} needs {gigabytes(host.peak_bytes_per_node)} of {gigabytes(host.capacity_bytes_per_node)} GB "
            f"host memory per node: {_largest_terms(host.terms)}."
        )
    if memory.lacks == "NVMe":
        return (
            f"{name} needs {gigabytes(host.nvme_bytes_per_node)} of "
            f"{gigabytes(memory.nvme_capacity_bytes_per_node)} GB NVMe per node."
        )
    assert best is not None, "a layout that fits is only rejected for a better one"
    size, speed = f"{gigabytes(gpu.high_bytes)} GB", f"{candidate.time.tokens_per_second:,.0f} tokens/s"
    ratio = best.tokens_per_second / candidate.tokens_per_second
    if ratio < AS_FAST and _only_offload_differs(candidate, best):
        return (
            f"{name} is predicted to be {1 / ratio:.2f} times as fast ({speed}, up to {size}). Offload, whose speed is "
            f"less certain, has to be {OFFLOAD_GAIN - 1:.0%} faster. Request it with --offload "
            f"{candidate.layout.offload_name}."
        )
    if ratio < AS_FAST:
        axes = candidate.layout.axes
        why = {
            "pp": "a stock Trainer cannot run a pipeline: PipelineTrainer does",
            "cp": "context parallelism has to be faster by more than its interval, because the sequences fit without",
        }
        axis = next((axis for axis in why if axis in axes), None)
        assert axis, "only pipelines and context parallelism that were not requested can be faster than the chosen one"
        wanted: dict[str, Any] = {field: axes[axis] for field, axis in AXIS_FIELDS.items() if axis in axes}
        flags = replace(job, **wanted).flags(job)
        return (
            f"{name} would be {1 / ratio:.2f} times as fast ({speed}, up to {size}), but {why[axis]}. Request it with "
            f"{' '.join(flags)}."
        )
    if ratio <= 1 / AS_FAST:
        harder = ", but has more parts that can fail" if candidate.complexity > best.complexity else ""
        return f"{name} differs in speed by at most 5 % ({speed}, up to {size}){harder}."
    # Extra seconds of each term for as many tokens as the chosen layout trains in one step.
    scale = (
        best.time.seconds * best.time.tokens_per_second / (candidate.time.seconds * candidate.time.tokens_per_second)
    )
    more = {term: value * scale - best.time.terms.get(term, 0.0) for term, value in candidate.time.terms.items()}
    shown = ", ".join(
        f"{term_title(term)} {_seconds(value)} s"
        for term, value in sorted(more.items(), key=lambda item: -item[1])[:3]
        if value > 0.2 * max(more.values())
    )
    return (
        f"{name} is {ratio:.2f} times slower: {speed}, up to {size}, {_recomputation(candidate)}. "
        f"Extra time for the same tokens: {shown}."
    )


def _largest_terms(terms: Terms) -> str:
    largest = sorted(terms.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{term_title(name)} {gigabytes(value)}" for name, value in largest)
