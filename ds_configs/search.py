"""The choice: the first layout in the order of preference that fits, with its reason and the rejected ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .calibration import Calibration
from .candidate import Candidate
from .errors import Fault, UsageError
from .hardware import HardwareSpec
from .job import TrainingJob, validate_job
from .levels import candidate_levels, lean_variant
from .memory import MemoryEstimate, estimate_memory
from .model import ModelSpec
from .reasons import chosen_reason, rejected_reason
from .rules import legality_faults
from .strategy import Strategy
from .teacher_choice import choose_teacher, jobs_by_placement
from .teacher_placement import TeacherChoice
from .tensor_terms import ActivationSource

USEFUL_TOKENS = 16_384
"""Tokens of one micro-batch beyond which matrix products gain nothing from more (Megatron-LM, arXiv 2104.04473)."""

ENOUGH_TOKENS = 2048
"""Tokens of one micro-batch that keep an accelerator busy; with fewer, checkpointing buys a larger micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """A strategy with its memory and the sentence that says why it was taken or not."""

    strategy: Strategy
    """The layout with micro-batch and checkpointing."""
    memory: MemoryEstimate
    """Its predicted memory."""
    reason: str
    """One sentence with numbers."""
    teacher: TeacherChoice | None = None
    """Where the teacher lives under the chosen layout; `None` without one, and for layouts that were not taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Variant:
    """A layout with its micro-batch, and the job with the placement of its teacher."""

    strategy: Strategy
    memory: MemoryEstimate
    job: TrainingJob
    level: int
    """Position of the layout in the order of preference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the search found."""

    chosen: Evaluated | None
    """The preferred layout that fits; `None` when none does."""
    rejected: tuple[Evaluated, ...]
    """All other layouts in the order of preference."""


def search(
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    activations: ActivationSource | None = None,
    calibration: Calibration | None = None,
) -> Outcome:
    """Return the first layout in the order of preference that fits, and why the others were not taken.

    A teacher is tried whole on every rank, then sharded, then in host memory, each under all layouts without offload
    before the student's states leave the accelerator.

    Raises:
        UsageError: the job is invalid or every layout that it allows breaks a rule; all faults together.
    """
    validate_job(job)
    best: list[_Variant] = []
    faults: list[Fault] = []
    levels = candidate_levels(model, hardware, job)
    tiers = list(dict.fromkeys((level.offload_optimizer, level.offload_param) for level in levels))
    for tier in tiers:
        for placed in jobs_by_placement(job, hardware):
            for index, level in enumerate(levels):
                if (level.offload_optimizer, level.offload_param) != tier:
                    continue
                evaluated = list(_evaluate_level(level, model, hardware, placed, activations, calibration, faults))
                if evaluated:
                    strategy, memory = _best(evaluated, job)
                    best.append(_Variant(strategy=strategy, memory=memory, job=placed, level=index))
    if not best:
        raise UsageError(list(dict.fromkeys(faults)) or [_nothing_allowed(job)])
    return _outcome(best, model, hardware, job, activations, calibration)


def _nothing_allowed(job: TrainingJob) -> Fault:
    return Fault(
        where="strategy",
        value=job.strategy,
        rule=f"has no layout with --offload {job.offload} on this hardware",
        fix="use --offload auto or another strategy",
    )


def _evaluate_level(
    level: Strategy,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    activations: ActivationSource | None,
    calibration: Calibration | None,
    faults: list[Fault],
) -> Iterator[tuple[Strategy, MemoryEstimate]]:
    """Yield every legal micro-batch and checkpointing of a layout; collect what makes it illegal."""
    switches = {"auto": (False, True), "on": (True,), "off": (False,)}[job.gradient_checkpointing]
    lean = lean_variant(level, model, job)
    for layout in (level,) if lean is None else (level, lean):
        for micro_batch, accumulation in micro_batches(level, job):
            for checkpointing in switches:
                strategy = replace(
                    layout,
                    micro_batch_size=micro_batch,
                    gradient_accumulation_steps=accumulation,
                    gradient_checkpointing=checkpointing,
                )
                broken = legality_faults(Candidate(strategy=strategy, model=model, hardware=hardware, job=job))
                faults += broken
                if not broken:
                    memory = estimate_memory(
                        strategy, model, hardware, job, activations=activations, calibration=calibration
                    )
                    yield strategy, memory


def micro_batches(level: Strategy, job: TrainingJob) -> list[tuple[int, int]]:
    """Return the micro-batch sizes to try with their accumulation steps, smallest first.

    With a global batch the product must meet it; without, one micro-batch makes a step.
    """
    ranks = level.data_parallel_size
    if job.global_batch_size is None:
        if job.micro_batch_size is not None:
            return [(job.micro_batch_size, 1)]
        most = max(1, USEFUL_TOKENS // job.seq_len_tokens)
        return [(1 << power, 1) for power in range(most.bit_length())]
    per_rank = max(1, job.global_batch_size // ranks)
    if job.micro_batch_size is not None:
        return [(job.micro_batch_size, max(1, per_rank // job.micro_batch_size))]
    most = max(1, min(per_rank, USEFUL_TOKENS // job.seq_len_tokens))
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

    plain = [pair for pair in fitting if not pair[0].gradient_checkpointing]
    largest = max(size(strategy) for strategy, _ in fitting)
    if plain:
        largest_plain = max(size(strategy) for strategy, _ in plain)
        if largest_plain * job.seq_len_tokens >= ENOUGH_TOKENS or largest_plain == largest:
            fitting = plain
    return max(fitting, key=lambda pair: size(pair[0]))


def _host_shortage(memory: MemoryEstimate) -> int:
    return max(0, memory.host.peak_bytes_per_node - memory.host.capacity_bytes_per_node)


def _outcome(
    best: list[_Variant],
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    activations: ActivationSource | None,
    calibration: Calibration | None,
) -> Outcome:
    taken = next((variant for variant in best if variant.memory.fits), None)
    chosen = None
    if taken is not None:
        reason = chosen_reason(taken.strategy, taken.memory, model, hardware, job, skipped=taken.level)
        teacher = choose_teacher(
            taken.strategy,
            taken.memory,
            model,
            hardware,
            taken.job,
            asked=job.teacher_placement != "auto",
            activations=activations,
            calibration=calibration,
        )
        chosen = Evaluated(strategy=taken.strategy, memory=taken.memory, reason=reason, teacher=teacher)
    others = [variant for variant in _one_for_each_layout(best) if taken is None or variant.level != taken.level]
    rejected = tuple(
        Evaluated(
            strategy=variant.strategy,
            memory=variant.memory,
            reason=rejected_reason(
                variant.strategy,
                variant.memory,
                model,
                hardware,
                variant.job,
                chosen=None if taken is None else taken.strategy,
                chosen_job=None if taken is None else taken.job,
            ),
        )
        for variant in others
    )
    return Outcome(chosen=chosen, rejected=rejected)


def _one_for_each_layout(best: list[_Variant]) -> list[_Variant]:
    """Return the layouts in the order of preference, each with the first placement that fits, else the smallest."""
    found: dict[int, _Variant] = {}
    for variant in best:
        known = found.setdefault(variant.level, variant)
        smaller = variant.memory.gpu.high_bytes < known.memory.gpu.high_bytes
        if not known.memory.fits and (variant.memory.fits or smaller):
            found[variant.level] = variant
    return [found[level] for level in sorted(found)]
