"""`search`: the fastest layout that fits, or the simplest of those that are as fast within 5 %, with reasons."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count, product

from ..legality.rules import legality_errors
from ..memory.estimate import MemoryEstimate, second_model_bytes
from ..memory.host import loading_terms
from ..memory.rank_parameters import rank_parameters
from ..specs.errors import ConfigError, UsageError
from ..specs.hardware import HardwareSpec
from ..specs.job import GROUPED_TASKS, LossImplementation, Switch, TrainingJob, job_errors
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from ..specs.optimizers import OPTIMIZERS
from ..specs.second_models import AUTOMATIC_PLACEMENTS, Placement, PlacementChoice, SecondModel, SecondModelRole
from ..specs.tasks import TASKS
from ..specs.terms import Term
from ..specs.units import gigabytes
from ..step_time.estimate import StepTime, valued_terms
from .candidates import (
    Candidate,
    Complexity,
    SearchContext,
    candidates,
    layouts_to_search,
    losses,
    planned_global_batch,
)
from .reasons import AS_FAST, OFFLOAD_GAIN, chosen_reason, rejected_reason

_SIZES_SHOWN_PER_AXIS = 2
"""Rejected sizes of one axis that a plan lists."""


class Search:
    """Layouts with their legal candidates, and what the search has learned about them.

    Attributes:
        by_layout: All candidates of each layout, by its index.
        leanest: The candidate of each layout that needs the least memory.
    """

    def __init__(
        self, layouts: list[Layout], indices: Iterable[int], context: SearchContext, errors: list[ConfigError]
    ) -> None:
        """Find the candidates of the layouts at `indices`; add the errors of layouts that the user's settings allow."""
        self.by_layout: dict[int, list[Candidate]] = {}
        self.leanest: dict[int, Candidate] = {}
        self._fastest: dict[int, Candidate] = {}
        contexts = losses(context)
        for index in indices:
            reported = errors if _has_requested_axes(layouts[index], context.job) else None
            if legal := list(candidates(layouts[index], contexts, index, reported)):
                self.by_layout[index] = legal

    def fastest(self, index: int) -> Candidate:
        """Return the fastest candidate of a layout, the simplest of equally fast ones."""
        if index not in self._fastest:
            # Recomputation makes none faster or simpler.
            self._fastest[index] = _fastest([each for each in self.by_layout[index] if each.keeping is None])
        return self._fastest[index]

    def possible(self, index: int) -> bool:
        """Return whether the leanest candidate of a layout fits: smallest micro-batch, everything that saves memory."""
        if index not in self.leanest:
            legal = self.by_layout[index]
            recomputing = [candidate for candidate in legal if candidate.layout.gradient_checkpointing] or legal
            chunked = [candidate for candidate in recomputing if candidate.job.loss == "chunked"] or recomputing
            tightest = [candidate for candidate in chunked if candidate.lean] or chunked
            tightest = [candidate for candidate in tightest if candidate.layout.tiled_mlp] or tightest
            offloading = [candidate for candidate in tightest if candidate.layout.offloaded_checkpoints]
            tightest = [candidate for candidate in tightest if not candidate.layout.offloaded_checkpoints] or tightest
            size = min(candidate.layout.micro_batch_size for candidate in tightest)
            lean = [_fastest([candidate for candidate in tightest if candidate.layout.micro_batch_size == size])]
            # Some engines keep unsharded gradients while they accumulate, so a larger micro-batch may need less.
            single = [candidate for candidate in tightest if candidate.layout.gradient_accumulation_steps == 1]
            if single and lean[0] not in single:
                lean.append(_fastest(single))
            if offloading and not any(candidate.memory.fits for candidate in lean):
                everything = _fastest(offloading)
                fewer = everything.with_most_offloaded() if everything.job.offload_activations == "auto" else everything
                lean.append(fewer if fewer.memory.fits else everything)
                if lean[-1] is not everything:
                    self.by_layout[index].append(lean[-1])
            self.leanest[index] = min(lean, key=_need)
        return self.leanest[index].memory.fits


def fewest_offloaded(candidate: Candidate) -> Candidate:
    """Return the candidate with as few layer inputs in host memory as fit; fewer copies are never slower."""
    low, high, fitting = -1, candidate.layout.offloaded_checkpoints, candidate
    while high - low > 1:
        middle = (low + high) // 2
        fewer = candidate.with_offloaded(middle)
        if fewer.memory.fits:
            high, fitting = middle, fewer
        else:
            low = middle
    return fitting


def _fastest(legal: list[Candidate]) -> Candidate:
    # A single candidate is not timed.
    return legal[0] if len(legal) == 1 else min(legal, key=_order)


def _order(candidate: Candidate) -> tuple[float, Complexity]:
    return -candidate.tokens_per_second, candidate.complexity


def _need(candidate: Candidate) -> tuple[int, int]:
    """Return the host memory that a candidate lacks per node, then its memory on an accelerator."""
    host = candidate.memory.host
    return max(0, host.peak_bytes_per_node - host.capacity_bytes_per_node), candidate.memory.gpu.high_bytes


def search_fastest(explored: Search, indices: Iterable[int]) -> Candidate | None:
    """Return the simplest of the candidates as fast as the fastest that fits, within 5 %; `None` when none fits."""
    heap: list[tuple[float, Complexity, int, bool, Candidate]] = []
    order = count()

    def push(candidate: Candidate, complexity: Complexity, bound: float, *, partly: bool = False) -> None:
        heapq.heappush(heap, (-bound, complexity, next(order), partly, candidate))

    # No candidate of a layout needs to be timed if the leanest one does not fit.
    possible = [index for index in indices if explored.possible(index)]
    for index in possible:
        for candidate in explored.by_layout[index]:
            push(candidate, candidate.complexity, candidate.speed_limit)
    best: float | None = None
    near: list[Candidate] = []
    while heap:
        bound, complexity, position, partly, candidate = heapq.heappop(heap)
        if best is not None and -bound < AS_FAST * best:
            break
        if near and complexity >= near[-1].complexity:
            # Neither faster nor simpler than one that fits.
            continue
        if partly:
            if (fewest := candidate.with_fewest_recomputed) is not None:
                push(fewest, complexity, fewest.tokens_per_second)
        elif candidate.tokens_per_second < -bound:
            heapq.heappush(heap, (-candidate.tokens_per_second, complexity, position, False, candidate))
        elif candidate.memory.fits:
            best = best or candidate.tokens_per_second
            near.append(candidate)
        elif candidate.job.gradient_checkpointing == "auto" and not candidate.layout.gradient_checkpointing:
            push(candidate, *candidate.best_with_recomputed, partly=True)
    if best is None:
        return None
    return near[-1]


def _fastest_with_cp_if_needed(explored: Search, indices: list[int], job: TrainingJob) -> Candidate | None:
    """Return the fastest candidate, with context parallelism only if it was requested, is needed or certainly faster.

    It is needed if nothing else fits, and certainly faster if even the upper end of its interval is.
    """
    whole = [index for index in indices if explored.by_layout[index][0].layout.cp == 1]
    if len(whole) == len(indices) or job.axis_sizes["cp"] is not None:
        return search_fastest(explored, indices)
    best = search_fastest(explored, whole)
    split = search_fastest(explored, [index for index in indices if index not in whole])
    if best is None or split is None:
        return best or split
    return split if split.time.high_seconds < best.time.seconds else best


def _preferred(explored: Search, indices: list[int], job: TrainingJob) -> Candidate | None:
    """Return the candidate of these layouts to plan; `None` when none fits.

    Offload that was not requested has to be faster than every layout without it by `OFFLOAD_GAIN`.
    """
    without = [index for index in indices if explored.by_layout[index][0].layout.offload_optimizer == "none"]
    if job.offload != "auto" or len(without) == len(indices):
        return _fastest_with_cp_if_needed(explored, indices, job)
    inside = _fastest_with_cp_if_needed(explored, without, job)
    least = 0.0 if inside is None else OFFLOAD_GAIN * inside.tokens_per_second
    offloaded = [
        index
        for index in indices
        if explored.by_layout[index][0].layout.offload_optimizer != "none"
        and explored.possible(index)
        and explored.fastest(index).tokens_per_second >= least
    ]
    best = search_fastest(explored, offloaded)
    return inside if best is None or (inside is not None and best.tokens_per_second <= least) else best


def _for_comparison(explored: Search, best: Candidate) -> list[Candidate]:
    """Return what a plan of each other layout would choose: the best candidate if it fits, else the leanest one.

    A plan lists the fastest sizes of each set of axes. Other layouts of the same axes are omitted if they are slower.
    """
    fitting = [index for index in explored.by_layout if index != best.index and explored.possible(index)]
    shown = [explored.leanest[index] for index in explored.by_layout if index not in (best.index, *fitting)]
    listed: dict[frozenset[str], dict[frozenset[tuple[str, int]], float]] = {}
    for index in sorted(fitting, key=lambda index: _order(explored.fastest(index))):
        fastest = explored.fastest(index)
        axes, sizes = frozenset(fastest.layout.axes), frozenset(fastest.layout.axes.items())
        speeds = listed.setdefault(axes, {})
        others = sorted((speed for other, speed in speeds.items() if other != sizes), reverse=True)
        slower_than = speeds.get(sizes, others[_SIZES_SHOWN_PER_AXIS - 1] if others[_SIZES_SHOWN_PER_AXIS - 1 :] else 0)
        if axes and fastest.tokens_per_second <= slower_than:
            continue
        choice = _preferred(explored, [index], best.job)
        assert choice is not None, "the leanest candidate fits"
        speeds[sizes] = max(speeds.get(sizes, 0), choice.tokens_per_second)
        shown.append(choice)
    return sorted(shown, key=_speed_or_need)


def _speed_or_need(candidate: Candidate) -> tuple[bool, float, int]:
    fits = candidate.memory.fits
    return not fits, -candidate.tokens_per_second if fits else float(candidate.memory.gpu.high_bytes), candidate.index


def _fewer_of_each_axis(ranked: Iterable[Candidate]) -> list[Candidate]:
    """Return all layouts without axes, and the best `_SIZES_SHOWN_PER_AXIS` of each set of axes."""
    counts: Counter[frozenset[str]] = Counter()
    sizes: set[frozenset[tuple[str, int]]] = set()
    shown: list[Candidate] = []
    for candidate in ranked:
        axes = candidate.layout.axes
        key = frozenset(axes.items())
        if axes:
            if key in sizes or counts[frozenset(axes)] >= _SIZES_SHOWN_PER_AXIS:
                continue
            sizes.add(key)
            counts[frozenset(axes)] += 1
        shown.append(candidate)
    return shown


_COSTS: dict[Placement, str] = {
    "replica": "no communication",
    "sharded": "gathers its parameters in every micro-batch",
    "offloaded": "copies its parameters over PCIe in every micro-batch",
    "quantized": "4-bit weights change the targets",
    "cached": "requires a cache of its outputs for exactly this data",
    "shared": "runs the trained model without its adapters",
    "layout": "has gradients and optimizer states too",
}
_COST_WITH_TRL = "TRL computes its log-probabilities before training"
_CONDITIONS: dict[str, tuple[str, str]] = {
    "sharded": ("requires at least two ranks to shard over", "use replica or offloaded"),
    "shared": ("requires adapters, and a reference that is the trained model", "use --method lora, or omit it"),
    "layout": ("requires a model that is trained too", "omit it"),
}
"""What a placement requires, and how to fix a request for it."""


def _placement_choice(best: Candidate, second: SecondModel, *, requested: bool) -> PlacementChoice:
    """Return a second model's placement under the chosen layout, and which simpler ones do not fit."""
    layout, hardware, job, placement = best.layout, best.context.hardware, best.job, second.planned_placement
    by_trl, rejected = TASKS[job.task].head != "model", []
    may_choose = placement in AUTOMATIC_PLACEMENTS and not (requested or second.trained)
    for other in AUTOMATIC_PLACEMENTS[: AUTOMATIC_PLACEMENTS.index(placement)] if may_choose else ():
        moved = replace(best, context=replace(best.context, job=job.placed(second.role, other)))
        gpu, host = moved.memory.gpu, moved.memory.host
        if other == "sharded" and hardware.world_size == 1:
            continue
        if by_trl and legality_errors(best.context.model, layout, moved.job, hardware):
            continue
        if not gpu.fits:
            needed = f"needs up to {gigabytes(gpu.high_bytes)} of {gigabytes(gpu.capacity_bytes)} GB"
        elif host.peak_bytes_per_node > host.capacity_bytes_per_node:
            used, capacity = gigabytes(host.peak_bytes_per_node), gigabytes(host.capacity_bytes_per_node)
            needed = f"needs {used} of {capacity} GB host memory per node"
        else:
            needed = f"fits in {gigabytes(gpu.high_bytes)} GB" if moved.memory.fits else "needs more NVMe"
        rejected.append(f"{other} {needed}")
    gpu_bytes, host_bytes = second_model_bytes(second, layout, hardware, job)
    size = f"up to {gigabytes(gpu_bytes)} GB per accelerator"
    if placement == "offloaded":
        size += f" and {gigabytes(host_bytes)} GB host memory per node"
    if requested:
        why = "was requested"
    elif by_trl and placement in ("replica", "sharded"):
        why = "is how TRL places it under this engine"
    else:
        why = "is the first placement that fits" if rejected else "is the simplest placement, and it fits"
    cost = _COST_WITH_TRL if by_trl and placement == "cached" else _COSTS[placement]
    return PlacementChoice(
        placement=placement,
        reason=f"{placement} {why}: {size}; {cost}." + (f" Rejected: {', '.join(rejected)}." if rejected else ""),
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """A layout with its predicted memory and step time, and the reason why it was chosen or rejected."""

    layout: Layout
    memory: MemoryEstimate
    time: StepTime
    reason: str
    """Short sentences with the numbers that decided."""
    loss: LossImplementation = "eager"
    """How head and loss are computed: `eager` or `chunked`."""
    placements: dict[SecondModelRole, PlacementChoice] = field(default_factory=dict)
    """Placements of second models under the chosen layout, by role; empty for rejected layouts."""

    @property
    def terms(self) -> tuple[Term, ...]:
        """Every term of memory and time with its meaning and value, which tables, reports and `explain` show."""
        return valued_terms(self.memory, self.time)

    @property
    def strategy(self) -> Layout:
        """Former name of `layout`, for scripts that were written before."""
        return self.layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of the search."""

    chosen: Evaluated | None
    """The fastest layout that fits; `None` when none does."""
    rejected: tuple[Evaluated, ...]
    job: TrainingJob
    """The job with the loss that was chosen."""


def _evaluated(candidate: Candidate, reason: str) -> Evaluated:
    return Evaluated(
        layout=candidate.layout, memory=candidate.memory, time=candidate.time, reason=reason, loss=candidate.job.loss
    )


LONG_SEQUENCE_TOKENS = 32_768
"""Sequence length from which every search tries tiled MLPs and offloaded layer inputs. Shorter ones try them only if
nothing fits otherwise: tiles have as many tokens as the hidden size, so they save little."""


def search(context: SearchContext, *, compare: bool = True) -> Outcome:
    """Return the layout to plan among those that fit, and why the others were rejected.

    The global batch is `planned_global_batch`, unless the user sets it. If it fits only with offload or not at all, but
    one sequence per accelerator does fit, the batch is that. Without `compare`, the result has no rejected layouts, in
    half of the time.

    Raises:
        UsageError: the job is invalid, or every layout that it allows breaks a rule.
    """
    job = context.job
    if wrong := job_errors(job):
        raise UsageError(wrong)
    for attempt in _attempts(context):
        outcome = _search_batch(attempt, compare=compare)
        chosen, smallest = outcome.chosen, _with_smallest_batch(attempt)
        offloads = chosen is not None and chosen.layout.offload_optimizer != "none" and job.offload == "auto"
        if smallest is not None and (chosen is None or offloads):
            tried = job
            if offloads:
                tried = replace(job, offload="none", pipeline_parallel_size=job.pipeline_parallel_size or 1)
            if _anything_fits(replace(smallest, job=tried)):
                outcome = _search_batch(smallest, compare=compare)
        if outcome.chosen is not None:
            break
    return outcome


def _attempts(context: SearchContext) -> list[SearchContext]:
    """Return what to try until something fits: with mechanisms for long sequences only these, else them last."""
    if context.long_sequences or "auto" not in (context.job.tiled_mlp, context.job.offload_activations):
        return [context]
    extended = replace(context, long_sequences=True)
    return [extended] if context.job.seq_len_tokens >= LONG_SEQUENCE_TOKENS else [context, extended]


def _with_smallest_batch(context: SearchContext) -> SearchContext | None:
    """Return the context with the fewest sequences per accelerator; `None` if its batch is fixed or that small."""
    accelerators = context.hardware.world_size
    smaller = planned_global_batch(context.job, accelerators, smallest=True)
    if smaller == planned_global_batch(context.job, accelerators):
        return None
    return replace(context, smallest_batch=True)


def _search_batch(context: SearchContext, *, compare: bool) -> Outcome:
    """Return the outcome for one global batch.

    Second models are tried as replicas on every rank, then sharded, then in host memory. Each placement is tried under
    all layouts without offload before the states of the trained model leave the accelerator.
    """
    job, errors = context.job, list[ConfigError]()
    layouts = layouts_to_search(context.model, context.hardware, job)
    best: Candidate | None = None
    searches: list[Search] = []
    for part, indices in _rounds(layouts, context):
        explored = Search(layouts, indices, part, errors)
        searches.append(explored)
        requested = job.pipeline_parallel_size is not None
        trainer_runs = [index for index in explored.by_layout if layouts[index].pp == 1 or requested]
        # A stock Trainer cannot run a pipeline, so one that was not requested is only proposed if nothing else fits.
        for proposed in (trainer_runs, list(explored.by_layout)):
            best = _preferred(explored, proposed, job)
            if best is not None:
                break
        if best is not None:
            break
    if not any(explored.by_layout for explored in searches):
        rule = f"has no layout with --offload {job.offload} on this hardware"
        fix = "use --offload auto or another strategy"
        nothing = ConfigError(where="strategy", value=job.strategy, rule=rule, fix=fix)
        # Errors of placements that the search tried are of use only if there are no others.
        tried = {f"{second.role}_placement" for second in job.second_models if second.placement == "auto"}
        different = list(dict.fromkeys(errors))
        raise UsageError([error for error in different if error.where not in tried] or different or nothing)
    chosen = None
    if best is None:
        leanest_of: dict[int, Candidate] = {}
        for explored in searches:
            for index in explored.by_layout:
                explored.possible(index)
                leanest = explored.leanest[index]
                leanest_of[index] = min(leanest_of.get(index, leanest), leanest, key=_need)
        others = sorted(leanest_of.values(), key=_speed_or_need)
    else:
        if job.offload_activations == "auto":
            best = fewest_offloaded(best)
        others = _for_comparison(searches[-1], best) if compare else []
        reason = chosen_reason(best, context, rows=_fewer_of_each_axis(others), others=others)
        placements = {
            second.role: _placement_choice(best, second, requested=requested.placement != "auto")
            for requested, second in zip(job.second_models, best.job.second_models, strict=True)
        }
        chosen = replace(_evaluated(best, reason), placements=placements)
    rejected = [_evaluated(candidate, rejected_reason(candidate, best)) for candidate in _fewer_of_each_axis(others)]
    return Outcome(
        chosen=chosen,
        rejected=tuple(rejected),
        job=job
        if best is None
        else replace(
            job,
            loss=best.job.loss,
            generation=best.job.generation,
            vllm_tensor_parallel_size=best.job.vllm_tensor_parallel_size,
            vllm_sleep=best.job.vllm_sleep,
        ),
    )


def generation_choices(job: TrainingJob, hardware: HardwareSpec) -> list[TrainingJob]:
    """Return the job with each way to generate, in order of preference.

    vLLM decodes several times as fast as `generate`. Without sleep nothing is copied between phases; more ranks per
    engine leave more memory for its cache.
    """
    if not TASKS[job.task].generates:
        return [job]
    if job.task not in GROUPED_TASKS or hardware.gpu == "CPU":
        return [replace(job, generation="transformers")] if job.generation == "auto" else [job]
    ways: list[TrainingJob] = []
    if job.generation in ("auto", "vllm"):
        sleeps: tuple[Switch, ...] = ("off", "on") if job.vllm_sleep == "auto" else (job.vllm_sleep,)
        sizes = [size for size in (1, 2, 4, 8) if hardware.gpus_per_node % size == 0]
        if job.vllm_tensor_parallel_size is not None:
            sizes = [job.vllm_tensor_parallel_size]
        ways += [
            replace(job, generation="vllm", vllm_sleep=sleep, vllm_tensor_parallel_size=size)
            for sleep, size in product(sleeps, sizes)
        ]
    if job.generation in ("auto", "transformers"):
        ways.append(replace(job, generation="transformers"))
    return ways or [job]


def anything_fits(context: SearchContext) -> bool:
    """Return whether `search` would choose a layout, which takes far less time than finding out which one.

    Raises:
        UsageError: the job is invalid.
    """
    job = context.job
    if wrong := job_errors(job):
        raise UsageError(wrong)
    for attempt in _attempts(context):
        smallest = _with_smallest_batch(attempt)
        if _anything_fits(attempt) or (smallest is not None and _anything_fits(smallest)):
            return True
    return False


def _anything_fits(context: SearchContext) -> bool:
    model, hardware, job = context.model, context.hardware, context.job
    total = hardware.world_size * hardware.gpu_bytes
    if job.offload != "none":
        total += hardware.nodes * (hardware.host_bytes_per_node + hardware.nvme_bytes_per_node)
    if _least_bytes(model, job) > total:
        return False
    layouts = layouts_to_search(model, hardware, job)
    for part, indices in _rounds(layouts, context):
        for index in indices:
            layout = layouts[index]
            # What the ranks of a pipeline load depends on its stages, which only candidates have.
            if layout.pp == 1:
                loading = loading_terms(layout, model, hardware, part.job)
                if sum(loading.values()) > hardware.host_bytes_per_node:
                    continue
            explored = Search(layouts, [index], part, [])
            if explored.by_layout and explored.possible(index):
                return True
    return False


def _least_bytes(model: ModelSpec, job: TrainingJob) -> float:
    """Bytes that any layout keeps somewhere: master weights, optimizer states, 16-bit gradients, frozen weights."""
    parameters = rank_parameters(model, job)
    return parameters.trainable * (6 + OPTIMIZERS[job.optimizer].state_bytes_per_parameter) + parameters.frozen_bytes


def _rounds(layouts: list[Layout], context: SearchContext) -> list[tuple[SearchContext, list[int]]]:
    """Return the rounds of the search: all layouts, or each placement of second models without and with offload.

    Layouts with axes that the user did not request are omitted where they cannot help: without offload, if the states
    exceed the memory of all accelerators together; and if the global batch is illegal for every layout without them,
    so that the error names the nearest legal batch sizes.
    """
    job, hardware = context.job, context.hardware
    too_large = _least_bytes(context.model, job) > hardware.gpu_bytes * hardware.world_size
    ranks = [layout.data_parallel_size for layout in layouts if _has_requested_axes(layout, job)]
    batch_is_illegal = (
        job.global_batch_size is not None
        and bool(ranks)
        and job.global_batch_size >= min(ranks)
        and all(job.global_batch_size % ((job.micro_batch_size or 1) * count) != 0 for count in ranks)
    )
    usable = [
        index
        for index, layout in enumerate(layouts)
        if not layout.axes
        or _has_requested_axes(layout, job)
        or not (batch_is_illegal or (too_large and layout.offload_optimizer == "none"))
    ]
    jobs = generation_choices(job, hardware)
    for second in job.second_models:
        shards = hardware.world_size > 1 or TASKS[job.task].head != "model"
        names = second.automatic_placements(context.model, adapters=job.method != "full", shards=shards)
        if second.placement == "auto":
            jobs = [part.placed(second.role, name) for part in jobs for name in names]
        elif second.placement not in names and (second.trained or second.placement in _CONDITIONS):
            rule, fix = ("must be layout: it is trained", "omit it")
            if not second.trained:
                rule, fix = _CONDITIONS[second.placement]
            raise UsageError(ConfigError(where=f"{second.role}_placement", value=second.placement, rule=rule, fix=fix))
    parts = [replace(context, job=part) for part in jobs]
    if len(parts) == 1:
        return [(parts[0], usable)]
    inside = [index for index in usable if layouts[index].offload_optimizer == "none"]
    outside = [index for index in usable if layouts[index].offload_optimizer != "none"]
    return [(part, indices) for indices in (inside, outside) for part in parts if indices]


def _has_requested_axes(layout: Layout, job: TrainingJob) -> bool:
    return all((job.axis_sizes[axis] or 1) == size for axis, size in layout.axes.items())
