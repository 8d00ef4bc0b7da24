"""A layout with every micro-batch and checkpointing that it may run with, and the best of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from ..legality.candidate import Candidate
from ..legality.rules import legality_faults
from ..memory.activation_source import ActivationSource
from ..memory.calibration import Calibration
from ..memory.estimate import MemoryEstimate, estimate_memory
from ..specs.errors import Fault
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from ..step_time.step_cost import MICRO_BATCH_TOKENS, filling_micro_batch_sizes, pipeline_micro_batches
from .levels import lean_variant

USEFUL_TOKENS = 16_384
"""Tokens of one micro-batch beyond which matrix products gain nothing from more (Megatron-LM, arXiv 2104.04473)."""

ENOUGH_TOKENS = 2048
"""Tokens of one micro-batch that keep an accelerator busy; with fewer, checkpointing buys a larger micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A layout with its micro-batch, and the job with the placement of its teacher."""

    strategy: Strategy
    memory: MemoryEstimate
    job: TrainingJob
    level: int
    """Position of the layout in the order of preference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a plan is made for."""

    model: ModelSpec
    hardware: HardwareSpec
    job: TrainingJob
    activations: ActivationSource | None = None
    """Traced activation bytes, for models without stored coefficients."""
    calibration: Calibration | None = None
    """Measured runs to learn from."""


Judge = Callable[[Candidate], tuple[Fault, ...]]
"""Returns what makes a candidate illegal."""


def best_variant(
    layout: Strategy, question: Question, *, level: int, faults: list[Fault], judge: Judge = legality_faults
) -> Variant | None:
    """Return the layout with its best micro-batch and checkpointing; `None` when none is legal (`faults` says why)."""
    evaluated = list(_evaluate(layout, question, faults, judge))
    if not evaluated:
        return None
    strategy, memory = _best(evaluated, question.job)
    return Variant(strategy=strategy, memory=memory, job=question.job, level=level)


def _evaluate(
    level: Strategy, question: Question, faults: list[Fault], judge: Judge
) -> Iterator[tuple[Strategy, MemoryEstimate]]:
    """Yield every legal micro-batch and checkpointing of a layout; collect what makes it illegal."""
    model, hardware, job = question.model, question.hardware, question.job
    switches = {"auto": (False, True), "on": (True,), "off": (False,)}[job.gradient_checkpointing]
    lean = lean_variant(level, model, job)
    for micro_batch, accumulation in micro_batches(level, job):
        fits = False
        for layout, checkpointing in product((level,) if lean is None else (level, lean), switches):
            strategy = replace(
                layout,
                micro_batch_size=micro_batch,
                gradient_accumulation_steps=accumulation,
                gradient_checkpointing=checkpointing,
            )
            broken = judge(Candidate(strategy=strategy, model=model, hardware=hardware, job=job))
            faults += broken
            if broken:
                continue
            memory = estimate_memory(
                strategy, model, hardware, job, activations=question.activations, calibration=question.calibration
            )
            fits = fits or memory.fits
            yield strategy, memory
        if not fits and job.global_batch_size is None:
            # A larger micro-batch needs more; with a global batch it also accumulates less, which may need less.
            return


def micro_batches(level: Strategy, job: TrainingJob) -> list[tuple[int, int]]:
    """Return the micro-batch sizes to try with their accumulation steps, smallest first.

    With a global batch the product must meet it, and in a pipeline the sizes leave enough micro-batches to fill its
    stages (`filling_micro_batch_sizes`). Without, one micro-batch makes a step, or in a pipeline as many as fill its
    stages (`pipeline_micro_batches`), each small, since it is their number that keeps stages busy.
    """
    ranks = level.data_parallel_size
    useful = MICRO_BATCH_TOKENS if level.pp > 1 else USEFUL_TOKENS * level.sp * level.cp
    if job.global_batch_size is None:
        sizes = [job.micro_batch_size] if job.micro_batch_size is not None else []
        if not sizes:
            most = max(1, useful // job.seq_len_tokens)
            sizes = [1 << power for power in range(most.bit_length())]
        return [(size, pipeline_micro_batches(level, job, size) if level.pp > 1 else 1) for size in sizes]
    per_rank = max(1, job.global_batch_size // ranks)
    if job.micro_batch_size is not None:
        return [(job.micro_batch_size, max(1, per_rank // job.micro_batch_size))]
    most = max(1, min(per_rank, useful // job.seq_len_tokens))
    if level.pp > 1:
        return [(size, per_rank // size) for size in filling_micro_batch_sizes(per_rank, most, level.pp)]
    return [(size, per_rank // size) for size in range(1, most + 1) if per_rank % size == 0]


def _best(evaluated: list[tuple[Strategy, MemoryEstimate]], job: TrainingJob) -> tuple[Strategy, MemoryEstimate]:
    """Return the fitting variant with the largest useful micro-batch, else the one that needs least.

    Without checkpointing when that leaves `ENOUGH_TOKENS` or as large a micro-batch as checkpointing does; with the
    normal buffers when they cost no micro-batch.
    """
    fitting = [pair for pair in evaluated if pair[1].fits]
    if not fitting:
        return min(evaluated, key=lambda pair: (_host_shortage(pair[1]), pair[1].gpu.high_bytes))

    def size(strategy: Strategy) -> int:
        return strategy.micro_batch_size

    # What one rank of a sequence computes keeps it busy.
    strategy_ranks = fitting[0][0].sp * fitting[0][0].cp
    plain = [pair for pair in fitting if not pair[0].gradient_checkpointing]
    largest = max(size(strategy) for strategy, _ in fitting)
    if plain:
        largest_plain = max(size(strategy) for strategy, _ in plain)
        if largest_plain * job.seq_len_tokens >= ENOUGH_TOKENS * strategy_ranks or largest_plain == largest:
            fitting = plain
    return max(fitting, key=lambda pair: size(pair[0]))


def _host_shortage(memory: MemoryEstimate) -> int:
    return max(0, memory.host.peak_bytes_per_node - memory.host.capacity_bytes_per_node)
