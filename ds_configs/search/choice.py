"""The choice: the fastest layout that fits, the simpler one of those within 1 %, with its reason and the others'."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..memory.activation_source import ActivationSource
from ..memory.calibration import Calibration
from ..memory.estimate import MemoryEstimate
from ..memory.host_memory import loading_terms
from ..memory.rank_parameters import rank_parameters
from ..specs.errors import Fault, UsageError
from ..specs.hardware import HardwareSpec
from ..specs.job import OPTIMIZERS, TrainingJob, job_faults
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from ..specs.teacher_placement import TeacherChoice
from ..step_time.estimate import StepTime
from .analysis_only import best_three_dimensional
from .comparison import fewer_of_each_axis, for_comparison, leanest_of_each
from .fastest import Search, frontier, search_fastest
from .levels import candidate_levels
from .reasons import analysis_reason, chosen_reason, rejected_reason
from .teacher_choice import choose_teacher, jobs_by_placement
from .variants import Question, Variant, losses, variants

__all__ = ["Evaluated", "Outcome", "ParetoPoint", "search"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """A strategy with its memory, its time and the sentence that says why it was taken or not."""

    strategy: Strategy
    """The layout with micro-batch and recomputation."""
    memory: MemoryEstimate
    """Its predicted memory."""
    time: StepTime
    """The predicted time of its step."""
    reason: str
    """One sentence with numbers."""
    loss: str = "eager"
    """How head and loss are computed: `eager` or `chunked`."""
    teacher: TeacherChoice | None = None
    """Where the teacher lives under the chosen layout; `None` without one, and for layouts that were not taken."""
    analysis_only: bool = False
    """Whether no library runs the layout today, so that it is shown for comparison alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParetoPoint:
    """A layout that no other one beats in both speed and memory."""

    label: str
    """The layout in words, with micro-batch, recomputation and loss."""
    tokens_per_second: float
    """Predicted speed of all ranks together."""
    step_seconds: float
    """Predicted time of a step."""
    high_bytes: int
    """Upper end of its memory on one accelerator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of the search."""

    chosen: Evaluated | None
    """The fastest layout that fits; `None` when none does."""
    rejected: tuple[Evaluated, ...]
    """All other layouts, those that fit first, fastest first."""
    pareto: tuple[ParetoPoint, ...] = ()
    """Layouts from the fastest to the leanest."""
    job: TrainingJob
    """The job with the loss that was chosen."""
    candidates: int = 0
    """Legal variants of all layouts."""
    estimated: int = 0
    """Variants whose memory was estimated."""


def search(
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    activations: ActivationSource | None = None,
    calibration: Calibration | None = None,
) -> Outcome:
    """Return the layout that the job's objective prefers among those that fit, and why the others were not taken.

    A teacher is tried whole on every rank, then sharded, then in host memory, each under all layouts without offload
    before the student's states leave the accelerator.

    Raises:
        UsageError: the job is invalid or every layout that it allows breaks a rule; all faults together.
    """
    if wrong := job_faults(job):
        raise UsageError(wrong + _faults_beside(wrong, model, hardware, job))
    question = Question(model=model, hardware=hardware, job=job, activations=activations, calibration=calibration)
    faults: list[Fault] = []
    levels = candidate_levels(model, hardware, job)
    attempts = _attempts(levels, question)
    taken, found = None, Search(by_level={}, partial=False)
    tried: list[Search] = []
    for asked, indices in attempts:
        found = _legal(levels, indices, asked, faults)
        tried.append(found)
        taken = _preferred(found, job)
        if taken is not None:
            break
    if not any(one.by_level for one in tried):
        raise UsageError(list(dict.fromkeys(faults)) or [_nothing_allowed(job)])
    return _outcome(taken, found, tried, question)


def _faults_beside(wrong: list[Fault], model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> list[Fault]:
    """Return why no layout is legal, were the wrong values of a job the usual ones."""
    named = {"seq_len_tokens" if fault.where == "seq_len" else fault.where for fault in wrong}
    mended = replace(job, **{name: getattr(TrainingJob(), name) for name in named})
    levels = candidate_levels(model, hardware, mended)
    faults: list[Fault] = []
    attempts = _attempts(levels, Question(model=model, hardware=hardware, job=mended))
    legal = [_legal(levels, indices, asked, faults).by_level for asked, indices in attempts]
    return [] if any(legal) else list(dict.fromkeys(faults))


def anything_fits(
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    activations: ActivationSource | None = None,
    calibration: Calibration | None = None,
) -> bool:
    """Return whether `search` would choose a layout, which takes far less time to tell than which one.

    Raises:
        UsageError: the job is invalid.
    """
    if wrong := job_faults(job):
        raise UsageError(wrong)
    question = Question(model=model, hardware=hardware, job=job, activations=activations, calibration=calibration)
    everywhere = hardware.world_size * hardware.gpu_bytes
    everywhere += hardware.nodes * (hardware.host_bytes_per_node + hardware.nvme_bytes_per_node)
    if _least_bytes(model, job) > everywhere:
        return False
    levels = candidate_levels(model, hardware, job)
    for asked, indices in _attempts(levels, question):
        for index in indices:
            if not _can_be_loaded(levels[index], asked):
                continue
            found = _legal(levels, [index], asked, [])
            if found.by_level and found.possible(index):
                return True
    return False


def _can_be_loaded(level: Strategy, question: Question) -> bool:
    """Whether host memory takes the checkpoint, which can be told before any variant of a layout is made.

    What the ranks of a pipeline load depends on its stages.
    """
    if level.pp > 1:
        return True
    model, hardware, job = question.model, question.hardware, question.job
    loading = loading_terms(level, model, hardware, job, rank_parameters(model, job, level))
    return sum(loading.values()) <= hardware.host_bytes_per_node


def _least_bytes(model: ModelSpec, job: TrainingJob) -> float:
    """Bytes that any layout keeps somewhere: master weights, optimizer states, 16-bit gradients, frozen weights."""
    parameters = rank_parameters(model, job)
    return parameters.trainable * (6 + OPTIMIZERS[job.optimizer].state_bytes_per_parameter) + parameters.frozen_bytes


def _attempts(levels: list[Strategy], question: Question) -> list[tuple[Question, list[int]]]:
    """Return what is tried in turn: everything at once without a teacher, else each of its placements by offload."""
    usable = _usable(levels, question)
    placed = [replace(question, job=job) for job in jobs_by_placement(question.job, question.hardware)]
    if len(placed) == 1:
        return [(placed[0], usable)]
    inside = [index for index in usable if levels[index].offload_optimizer == "none"]
    outside = [index for index in usable if levels[index].offload_optimizer != "none"]
    return [(asked, indices) for indices in (inside, outside) for asked in placed if indices]


def _usable(levels: list[Strategy], question: Question) -> list[int]:
    """Return the layouts to try: without offload no division of states helps that all accelerators cannot hold.

    Nor do unasked axes mend a batch that the ranks do not divide: the user is told the nearest that they do.
    """
    job, hardware = question.job, question.hardware
    apart = _least_bytes(question.model, job) > hardware.gpu_bytes * hardware.world_size
    refused = _plain_layouts_are_illegal(levels, job)

    def useful(level: Strategy) -> bool:
        if not level.axes or _fixed(level, job):
            return True
        return not refused and not (apart and level.offload_optimizer == "none")

    return [index for index, level in enumerate(levels) if useful(level)]


def _plain_layouts_are_illegal(levels: list[Strategy], job: TrainingJob) -> bool:
    """Whether the batch, rather than memory, rules out every layout without unasked axes, and can be mended."""
    asked = [level.data_parallel_size for level in levels if _fixed(level, job)]
    if job.global_batch_size is None or not asked or job.global_batch_size < min(asked):
        return False
    return all(job.global_batch_size % ((job.micro_batch_size or 1) * ranks) != 0 for ranks in asked)


def _fixed(level: Strategy, job: TrainingJob) -> bool:
    return all((job.axis_sizes[axis] or 1) == size for axis, size in level.axes.items())


def _legal(levels: list[Strategy], indices: list[int], question: Question, faults: list[Fault]) -> Search:
    """Return all legal variants of the layouts."""
    questions = losses(question)
    by_level: dict[int, list[Variant]] = {}
    for index in indices:
        unasked = bool(levels[index].axes) and not _fixed(levels[index], question.job)
        found = list(variants(levels[index], questions, index, None if unasked else faults))
        if found:
            by_level[index] = found
    return Search(by_level=by_level, partial=question.job.gradient_checkpointing == "auto")


def _preferred(found: Search, job: TrainingJob) -> Variant | None:
    if job.objective == "memory":
        possible = [level for level in found.by_level if found.possible(level)]
        leanest = [found.leanest[level] for level in possible]
        return min(leanest, key=lambda one: (one.memory.gpu.high_bytes, -one.tokens_per_second), default=None)
    return search_fastest(found, found.by_level)


def _nothing_allowed(job: TrainingJob) -> Fault:
    return Fault(
        where="strategy",
        value=job.strategy,
        rule=f"has no layout with --offload {job.offload} on this hardware",
        fix="use --offload auto or another strategy",
    )


def _outcome(taken: Variant | None, found: Search, tried: list[Search], question: Question) -> Outcome:
    others = for_comparison(found, taken)
    chosen, better = None, []
    if taken is not None:
        chosen = _chosen(taken, found, others, question)
        better = _analysis_only(taken, question)
    else:
        others = leanest_of_each(tried)
    rejected = tuple(_rejected(variant, taken) for variant in fewer_of_each_axis(others))
    return Outcome(
        chosen=chosen,
        rejected=(*better, *rejected),
        pareto=tuple(_pareto_point(variant) for variant in frontier(found.fitting)),
        job=question.job if taken is None else replace(question.job, loss=taken.job.loss),
        candidates=sum(len(found) for one in tried for found in one.by_level.values()),
        estimated=sum(one.estimated for one in tried),
    )


def _chosen(taken: Variant, found: Search, others: list[Variant], question: Question) -> Evaluated:
    teacher = choose_teacher(
        taken.strategy,
        taken.memory,
        question.model,
        question.hardware,
        taken.job,
        asked=question.job.teacher_placement != "auto",
        activations=question.activations,
        calibration=question.calibration,
    )
    faster = max(found.fitting, key=lambda one: one.tokens_per_second)
    return Evaluated(
        strategy=taken.strategy,
        memory=taken.memory,
        time=taken.time,
        loss=taken.job.loss,
        reason=chosen_reason(taken, question, faster=faster, others=others),
        teacher=teacher,
    )


def _rejected(variant: Variant, taken: Variant | None) -> Evaluated:
    return Evaluated(
        strategy=variant.strategy,
        memory=variant.memory,
        time=variant.time,
        loss=variant.job.loss,
        reason=rejected_reason(variant, taken),
    )


def _pareto_point(variant: Variant) -> ParetoPoint:
    strategy = variant.strategy
    label = f"{strategy.label}, micro-batch {strategy.micro_batch_size} x {strategy.gradient_accumulation_steps}"
    if strategy.gradient_checkpointing:
        layers = variant.question.model.dimensions.num_layers
        label += f", {strategy.recomputed_layers(-(-layers // strategy.pp))} layers recomputed"
        label += " but for products" if strategy.keeps_products else ""
    if variant.job.loss == "chunked":
        label += ", chunked loss"
    return ParetoPoint(
        label=label,
        tokens_per_second=variant.time.tokens_per_second,
        step_seconds=variant.time.seconds,
        high_bytes=variant.memory.gpu.high_bytes,
    )


def _analysis_only(taken: Variant, question: Question) -> list[Evaluated]:
    """Return the layout of tensor and pipeline parallelism together that would be faster, if there is one."""
    found = best_three_dimensional(question, faster_than=taken.tokens_per_second)
    if found is None:
        return []
    variant, why_not = found
    reason = analysis_reason(variant, taken, why_not=why_not)
    return [
        Evaluated(
            strategy=variant.strategy, memory=variant.memory, time=variant.time, reason=reason, analysis_only=True
        )
    ]
