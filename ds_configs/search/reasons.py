"""One sentence for each choice and each rejection, with the numbers that decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..memory.moments import Terms
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from ..specs.units import gigabytes
from ..step_time.estimate import StepTime
from ..step_time.terms import time_term_name
from .variants import Question, Variant

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


def display_name(strategy: Strategy) -> str:
    """Return the layout's name for people, such as `ZeRO-1 + TP 2` or `ZeRO-2 + CPU offload of optimizer`."""
    base, *parts = strategy.label.split("+")
    names = [_NAMES[base]]
    for part in parts:
        axis = part[:2]
        if axis in strategy.axes and part[2:].isdigit():
            names.append(f"{axis.upper()} {part[2:]}")
        else:
            names.append(part.replace("cpu-", "CPU ").replace("nvme-", "NVMe "))
    return " + ".join(names)


def largest_terms(terms: Terms, *, count: int = 4) -> str:
    """Return the largest named terms in GB, such as `optimizer states 12.0, activations 8.1`."""
    ranked = sorted(terms.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name.replace('_', ' ')} {gigabytes(value)}" for name, value in ranked)


def chosen_reason(taken: Variant, question: Question, *, faster: Variant, others: Sequence[Variant]) -> str:
    """Return why this layout was taken; `faster` is the fastest that fits, `others` the best of each other layout."""
    strategy, gpu = taken.strategy, taken.memory.gpu
    return (
        f"{display_name(strategy)} is {_preference(taken, question)}: "
        f"{speed(taken.time)}{_near(taken, faster)}. It needs {gigabytes(gpu.peak_bytes)} GB "
        f"({gigabytes(gpu.low_bytes)} to {gigabytes(gpu.high_bytes)}) of {gigabytes(gpu.capacity_bytes)} GB, at most "
        f"in the {gpu.phase} phase{_of_stage(gpu.stage)}: {largest_terms(gpu.terms)}; micro-batch "
        f"{strategy.micro_batch_size}{_accumulated(strategy)} {recomputation(taken)}"
        f"{_calibrated(gpu.calibrated_runs, question.hardware)}."
        + _of_division(strategy, question.model, question.job)
        + (_too_large(strategy, others) if strategy.axes else "")
    )


def speed(time: StepTime) -> str:
    """Return the speed of a step with its interval and its largest terms."""
    shown = ", ".join(f"{time_term_name(name)} {_seconds(value)}" for name, value in _largest(time.terms))
    return (
        f"{time.tokens_per_second:,.0f} tokens/s, {_seconds(time.seconds)} s a step "
        f"({_seconds(time.low_seconds)} to {_seconds(time.high_seconds)}: {shown})"
    )


def recomputation(variant: Variant) -> str:
    """Return which layers are recomputed, and that the loss is chunked."""
    strategy = variant.strategy
    loss = ", with the chunked loss" if variant.job.loss == "chunked" else ""
    if not strategy.gradient_checkpointing:
        return f"without gradient checkpointing{loss}"
    if strategy.keeps_products:
        return f"with gradient checkpointing that keeps products and attention{loss}"
    if strategy.checkpointed_layers is None:
        return f"with gradient checkpointing{loss}"
    layers = -(-variant.question.model.dimensions.num_layers // strategy.pp)
    return f"with gradient checkpointing of the first {strategy.checkpointed_layers} of {layers} layers{loss}"


def _largest(terms: Mapping[str, float], count: int = 3) -> list[tuple[str, float]]:
    return sorted(terms.items(), key=lambda item: -item[1])[:count]


def _near(taken: Variant, faster: Variant) -> str:
    if taken.job.objective == "memory" or taken.tokens_per_second >= faster.tokens_per_second:
        return ""
    share = faster.tokens_per_second / taken.tokens_per_second - 1
    return f", and simpler than the fastest, which gains {100 * share:.1f} %"


def _accumulated(strategy: Strategy) -> str:
    return f" x {strategy.gradient_accumulation_steps}" if strategy.gradient_accumulation_steps > 1 else ""


def _seconds(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.4f}"


def _of_division(strategy: Strategy, model: ModelSpec, job: TrainingJob) -> str:
    """Say what each axis divides."""
    sizes = model.dimensions
    divided = {
        "tp": f"the matrices of each layer ({sizes.num_attention_heads} heads)",
        "pp": f"the {sizes.num_layers} layers, of {strategy.gradient_accumulation_steps} micro-batches in a step",
        "sp": f"sequences of {job.seq_len_tokens:,} tokens",
        "cp": f"sequences of {job.seq_len_tokens:,} tokens",
        "ep": f"the {sizes.num_experts} experts of each layer",
    }
    parts = "; ".join(f"{axis.upper()} {size} divides {divided[axis]}" for axis, size in strategy.axes.items())
    return f" {parts}." if parts else ""


def _too_large(strategy: Strategy, others: Sequence[Variant]) -> str:
    """Name the next smaller division that does not fit, and the smallest layout without any."""

    def size(other: Strategy) -> int:
        return max(other.axes.values(), default=1)

    failing = [one for one in others if not one.memory.fits]
    same = [
        one
        for one in failing
        if one.strategy.axes.keys() == strategy.axes.keys() and size(one.strategy) < size(strategy)
    ]
    same.sort(key=lambda one: (-size(one.strategy), one.memory.gpu.high_bytes))
    plain = sorted((one for one in failing if not one.strategy.axes), key=lambda one: one.memory.gpu.high_bytes)
    shown = [
        f"{display_name(one.strategy)} needs up to {gigabytes(one.memory.gpu.high_bytes)} GB: "
        f"{largest_terms(one.memory.gpu.terms)}"
        for one in same[:1] + plain[:1]
    ]
    return f" Too large: {'; '.join(shown)}." if shown else ""


def _of_stage(stage: int | None) -> str:
    return "" if stage is None else f" of stage {stage}"


def _calibrated(runs: int, hardware: HardwareSpec) -> str:
    if runs == 0:
        return ""
    return f"; interval from {runs} measured run{'s' if runs > 1 else ''} on {hardware.gpu}"


def _preference(taken: Variant, question: Question) -> str:
    strategy, job = taken.strategy, question.job
    sizes = " with the sizes you asked for" if any((size or 1) > 1 for size in job.axis_sizes.values()) else ""
    batch = _of_batch(strategy, job, sizes)
    if job.strategy != "auto":
        return f"the strategy you asked for{batch}"
    if job.objective == "memory":
        return f"the layout that needs least memory{sizes}{batch}"
    if strategy.engine == "single":
        return "enough for one accelerator"
    return f"the fastest layout that fits{sizes}{batch}"


def _of_batch(strategy: Strategy, job: TrainingJob, sizes: str) -> str:
    """Say that data parallelism alone was illegal, where the batch is too small for it."""
    batch, ranks = job.global_batch_size, strategy.world_size
    if batch is None or sizes or not strategy.axes or batch % ((job.micro_batch_size or 1) * ranks) == 0:
        return ""
    shown = f" in micro-batches of {job.micro_batch_size}" if (job.micro_batch_size or 1) > 1 else ""
    return f"; data parallelism alone cannot divide a global batch of {batch} over {ranks} ranks{shown}"


def rejected_reason(variant: Variant, taken: Variant | None) -> str:
    """Return why this layout was not taken: what it lacks, or what it loses against the chosen one."""
    memory, job = variant.memory, variant.job
    name, gpu, host = display_name(variant.strategy) + _with_teacher(job), memory.gpu, memory.host
    if not gpu.fits:
        return (
            f"{name} needs up to {gigabytes(gpu.high_bytes)} GB of {gigabytes(gpu.capacity_bytes)} GB: "
            f"{largest_terms(gpu.terms)}."
        )
    if host.peak_bytes_per_node > host.capacity_bytes_per_node:
        return (
            f"{name} needs {gigabytes(host.peak_bytes_per_node)} GB of {gigabytes(host.capacity_bytes_per_node)} GB "
            f"host memory on each node: {largest_terms(host.terms)}."
        )
    if host.nvme_bytes_per_node > memory.nvme_capacity_bytes_per_node:
        return (
            f"{name} needs {gigabytes(host.nvme_bytes_per_node)} GB of "
            f"{gigabytes(memory.nvme_capacity_bytes_per_node)} GB NVMe on each node."
        )
    assert taken is not None, "a layout that fits is only rejected for a better one"
    if taken.job.teacher_placement != job.teacher_placement:
        return f"{name} fits with {gigabytes(gpu.high_bytes)} GB, but not{_with_teacher(taken.job)}."
    return f"{name} fits with {gigabytes(gpu.high_bytes)} GB, but {_loss_against(variant, taken)}."


def _with_teacher(job: TrainingJob) -> str:
    where = "as a replica" if job.teacher_placement == "replica" else job.teacher_placement
    return "" if job.teacher is None else f" with the teacher {where}"


def _loss_against(variant: Variant, taken: Variant) -> str:
    """Say how much slower a layout is, and which terms cost more for as many tokens."""
    ratio = taken.tokens_per_second / variant.tokens_per_second
    if taken.job.objective == "memory":
        return f"needs more memory; {speed(variant.time)}"
    if ratio <= 1 / 0.99:
        return f"is as fast within 1 %, and less simple; {speed(variant.time)}"
    scale = taken.time.seconds * taken.time.tokens_per_second / (variant.time.seconds * variant.time.tokens_per_second)
    more = {name: value * scale - taken.time.terms.get(name, 0.0) for name, value in variant.time.terms.items()}
    shown = ", ".join(
        f"{time_term_name(name)} {_seconds(value)} s"
        for name, value in _largest(more)
        if value > 0.2 * max(more.values())
    )
    return (
        f"is {ratio:.2f} times slower ({variant.time.tokens_per_second:,.0f} tokens/s {recomputation(variant)}); "
        f"for as many tokens it spends more on {shown}"
    )


def analysis_reason(variant: Variant, taken: Variant, *, why_not: str) -> str:
    """Return what a layout that cannot run would need and gain, beside the chosen one, and why it cannot run."""
    ratio = variant.tokens_per_second / taken.tokens_per_second
    return (
        f"{display_name(variant.strategy)} would be {ratio:.2f} times as fast as the chosen layout and fit with "
        f"{gigabytes(variant.memory.gpu.high_bytes)} GB. Analysis only, it cannot run with DeepSpeed 0.19.8: {why_not}."
    )
