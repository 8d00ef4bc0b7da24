"""The choice: the first layout in the order of preference that fits, with its reason and the rejected ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..memory.activation_source import ActivationSource
from ..memory.calibration import Calibration
from ..memory.estimate import MemoryEstimate
from ..memory.rank_parameters import rank_parameters
from ..specs.errors import Fault, UsageError
from ..specs.hardware import HardwareSpec
from ..specs.job import OPTIMIZERS, TrainingJob, validate_job
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from ..specs.teacher_placement import TeacherChoice
from ..step_time.step_cost import step_cost
from .analysis_only import best_three_dimensional
from .levels import candidate_levels
from .reasons import analysis_reason, chosen_reason, rejected_reason
from .teacher_choice import choose_teacher, jobs_by_placement
from .variants import ENOUGH_TOKENS, USEFUL_TOKENS, Question, Variant, best_variant, micro_batches

__all__ = ["ENOUGH_TOKENS", "USEFUL_TOKENS", "Evaluated", "Outcome", "micro_batches", "search"]

_SHOWN_OF_AN_AXIS = 2
"""Sizes of one axis that were not taken and are shown."""


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
    analysis_only: bool = False
    """Whether no library runs the layout today, so that it is shown for comparison alone."""


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
    question = Question(model=model, hardware=hardware, job=job, activations=activations, calibration=calibration)
    faults: list[Fault] = []
    levels = candidate_levels(model, hardware, job)
    tried = _try_in_order(levels, question, faults)
    if not tried:
        raise UsageError(list(dict.fromkeys(faults)) or [_nothing_allowed(job)])
    return _outcome(tried, question)


def _try_in_order(levels: list[Strategy], question: Question, faults: list[Fault]) -> list[Variant]:
    """Return the layouts that are legal, each at its best, in the order in which they are preferred.

    Those with axes beyond data parallelism are evaluated until a layout fits, and then the first of each axis, for
    comparison. A layout without lost time that fits is preferred to all of them, so that they cost nothing then.
    """
    tried: list[Variant] = []
    later: dict[frozenset[str], tuple[int, Question]] = {}
    illegal = _plain_layouts_are_illegal(levels, question)
    for tier in dict.fromkeys((level.offload_optimizer, level.offload_param) for level in levels):
        possible = not illegal and _states_fit_together(question, tier)
        for placed in jobs_by_placement(question.job, question.hardware):
            asked = replace(question, job=placed)
            for index, level in enumerate(levels):
                if (level.offload_optimizer, level.offload_param) != tier:
                    continue
                if level.axes and not _fixes(level, placed):
                    if not possible:
                        continue
                    if any(variant.memory.fits for variant in tried):
                        later.setdefault(frozenset(level.axes), (index, asked))
                        continue
                unasked = level.axes and not _fixes(level, placed)
                found = best_variant(level, asked, level=index, faults=[] if unasked else faults)
                tried += [] if found is None else [found]
    return tried + _for_comparison(tried, levels, later)


def _for_comparison(
    tried: list[Variant], levels: list[Strategy], later: dict[frozenset[str], tuple[int, Question]]
) -> list[Variant]:
    """Return the first layout of each axis that comes after the chosen one, where axes were weighed at all."""
    taken = next((variant for variant in tried if variant.memory.fits), None)
    if taken is None or not any(variant.strategy.axes for variant in tried):
        return []
    seen = {frozenset(variant.strategy.axes) for variant in tried}
    found = (
        best_variant(levels[index], question, level=index, faults=[])
        for axes, (index, question) in later.items()
        if axes not in seen and index > taken.level
    )
    return [variant for variant in found if variant is not None]


def _fixes(level: Strategy, job: TrainingJob) -> bool:
    return all((job.axis_sizes[axis] or 1) == size for axis, size in level.axes.items())


def _plain_layouts_are_illegal(levels: list[Strategy], question: Question) -> bool:
    """Whether the batch, rather than memory, rules out every layout without unasked axes, and can be mended."""
    job = question.job
    asked = [level.data_parallel_size for level in levels if _fixes(level, job)]
    if job.global_batch_size is None or not asked or job.global_batch_size < min(asked):
        return False
    return all(job.global_batch_size % ((job.micro_batch_size or 1) * ranks) != 0 for ranks in asked)


def _states_fit_together(question: Question, tier: tuple[str, str]) -> bool:
    """Whether all accelerators together could hold the states: without that no division of them helps.

    At least fp32 master weights, optimizer states and 16-bit gradients of what is trained.
    """
    if tier != ("none", "none"):
        return True
    parameters = rank_parameters(question.model, question.job)
    states = OPTIMIZERS[question.job.optimizer].state_bytes_per_parameter
    least = parameters.trainable * (6 + states) + parameters.frozen_bytes
    return least <= question.hardware.gpu_bytes * question.hardware.world_size


def _nothing_allowed(job: TrainingJob) -> Fault:
    return Fault(
        where="strategy",
        value=job.strategy,
        rule=f"has no layout with --offload {job.offload} on this hardware",
        fix="use --offload auto or another strategy",
    )


def _outcome(tried: list[Variant], question: Question) -> Outcome:
    model, hardware, job = question.model, question.hardware, question.job
    taken = next((variant for variant in tried if variant.memory.fits), None)
    chosen, better = None, []
    if taken is not None:
        smaller = [variant for variant in tried if variant.level < taken.level and not variant.memory.fits]
        reason = chosen_reason(
            taken.strategy,
            taken.memory,
            model,
            hardware,
            job,
            skipped=taken.level,
            smaller=[(variant.strategy, variant.memory) for variant in smaller],
        )
        teacher = choose_teacher(
            taken.strategy,
            taken.memory,
            model,
            hardware,
            taken.job,
            asked=job.teacher_placement != "auto",
            activations=question.activations,
            calibration=question.calibration,
        )
        chosen = Evaluated(strategy=taken.strategy, memory=taken.memory, reason=reason, teacher=teacher)
        better = _analysis_only(taken, question)
    others = [variant for variant in _one_for_each_layout(tried) if taken is None or variant.level != taken.level]
    rejected = tuple(_rejected(variant, taken, question) for variant in _fewer_of_each_axis(others))
    return Outcome(chosen=chosen, rejected=(*better, *rejected))


def _rejected(variant: Variant, taken: Variant | None, question: Question) -> Evaluated:
    reason = rejected_reason(
        variant.strategy,
        variant.memory,
        question.model,
        question.hardware,
        variant.job,
        chosen=None if taken is None else taken.strategy,
        chosen_job=None if taken is None else taken.job,
    )
    return Evaluated(strategy=variant.strategy, memory=variant.memory, reason=reason)


def _analysis_only(taken: Variant, question: Question) -> list[Evaluated]:
    """Return the layout of tensor and pipeline parallelism together that would lose less, if there is one."""
    lost = step_cost(taken.strategy, question.model, question.hardware, question.job).lost_seconds
    found = best_three_dimensional(question, lost_seconds=lost)
    if found is None:
        return []
    strategy, memory, why_not = found
    reason = analysis_reason(
        strategy, memory, question.model, question.hardware, question.job, chosen=taken.strategy, why_not=why_not
    )
    return [Evaluated(strategy=strategy, memory=memory, reason=reason, analysis_only=True)]


def _one_for_each_layout(tried: Iterable[Variant]) -> list[Variant]:
    """Return the layouts in the order of preference, each with the first placement that fits, else the smallest."""
    found: dict[int, Variant] = {}
    for variant in tried:
        known = found.setdefault(variant.level, variant)
        smaller = variant.memory.gpu.high_bytes < known.memory.gpu.high_bytes
        if not known.memory.fits and (variant.memory.fits or smaller):
            found[variant.level] = variant
    return [found[level] for level in sorted(found)]


def _fewer_of_each_axis(variants: list[Variant]) -> list[Variant]:
    """Leave out all but the smallest layouts of each axis, which say enough; those without further axes all stay."""
    smallest: dict[frozenset[tuple[str, int]], Variant] = {}
    for variant in sorted(variants, key=lambda variant: variant.memory.gpu.high_bytes):
        smallest.setdefault(frozenset(variant.strategy.axes.items()), variant)
    counts: Counter[frozenset[str]] = Counter()
    shown: set[int] = set()
    for sizes, variant in smallest.items():
        axes = frozenset(axis for axis, _ in sizes)
        counts[axes] += 1
        if counts[axes] <= _SHOWN_OF_AN_AXIS:
            shown.add(variant.level)
    return [variant for variant in variants if not variant.strategy.axes or variant.level in shown]
