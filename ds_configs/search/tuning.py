"""Which layouts `tune` measures, and which of the measured ones it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from ..legality.rules import legality_errors
from ..memory.estimate import estimate_memory
from ..specs.hardware import HardwareSpec
from ..specs.job import LossImplementation, TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from ..specs.units import gigabytes
from ..step_time.estimate import estimate_step_time
from .reasons import display_name
from .search import Evaluated

WORTH_MEASURING = 0.2
"""Layouts whose predicted step is longer than the fastest one's by more than this share are not measured.

On vTrain's table the measured best is inside for all of 136 questions (tests/test_tuner_choice.py)."""
WARM_UP_STEPS = 2
"""Untimed: the first builds kernels, and ZeRO-3 prefetches from the second on, after its trace."""
NOISY_SPREAD = 0.1
"""Spread of step times from which on another job probably uses the machine."""

TrialOutcome = Literal["measured", "slower", "out of memory", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A short real run of one layout."""

    layout: Layout
    loss: LossImplementation
    outcome: TrialOutcome
    """`slower` ended early because it could not win, `stopped` because of a time limit."""
    predicted_seconds: float
    predicted_allocated_bytes: int
    step_seconds: float | None = None
    """Median of the timed steps of the slowest rank; of a slower trial, of the steps until it ended."""
    spread: float | None = None
    """Longest minus shortest timed step, divided by the median."""
    steps: int = 0
    """Timed steps."""
    peak_allocated_bytes: int | None = None
    """Largest tensor bytes of any rank; on CPU ranks, of the two steps before the timed ones."""
    detail: str = ""
    """Why it failed."""
    wall_seconds: float = 0.0

    @property
    def name(self) -> str:
        return display_name(self.layout)

    @property
    def key(self) -> tuple[Layout, str]:
        """What identifies the layout among those of a plan."""
        return self.layout, self.loss


def layouts_to_measure(chosen: Evaluated, rejected: Iterable[Evaluated], *, trials: int) -> list[Evaluated]:
    """Return the chosen layout, then the others that may be faster, by predicted speed; at most `trials`.

    Each layout of a plan is already the best variant of itself: micro-batch, recomputation and buffers. Pipelines that
    were not requested are omitted, since a stock Trainer does not run them. Offload comes last if the chosen layout
    does without: it only copies more, unless it makes a larger micro-batch fit.
    """
    runnable = [other for other in rejected if other.memory.fits and (other.layout.pp == 1 or chosen.layout.pp > 1)]
    fastest = max(layout.time.tokens_per_second for layout in (chosen, *runnable))
    near = [other for other in runnable if other.time.tokens_per_second * (1 + WORTH_MEASURING) >= fastest]
    keeps_all = chosen.layout.offload_optimizer == "none"

    def order(other: Evaluated) -> tuple[bool, float]:
        return keeps_all and other.layout.offload_optimizer != "none", -other.time.tokens_per_second

    return [chosen, *sorted(near, key=order)][:trials]


def with_other_micro_batch(
    best: Evaluated, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob
) -> Evaluated | None:
    """Return the layout with half or twice its micro-batch and the same global batch, the one predicted to be faster.

    Returns `None` if neither fits, or if the job sets the micro-batch.
    """
    layout, job, fitting = best.layout, replace(job, loss=best.loss), []
    if job.micro_batch_size:
        return None
    for size in (2 * layout.micro_batch_size, layout.micro_batch_size // 2):
        steps, rest = divmod(layout.micro_batch_size * layout.gradient_accumulation_steps, size) if size else (0, 0)
        if not steps or rest:
            continue
        other = replace(layout, micro_batch_size=size, gradient_accumulation_steps=steps)
        if legality_errors(model, other, job, hardware):
            continue
        memory = estimate_memory(other, model, hardware, job)
        time = estimate_step_time(other, model, hardware, job)
        fitting += [replace(best, layout=other, memory=memory, time=time, reason="")] if memory.fits else []
    return max(fitting, key=lambda other: other.time.tokens_per_second, default=None)


def cannot_win(timed_seconds: Sequence[float], *, steps: int, best_seconds: float | None) -> bool:
    """Return whether the median of `steps` steps will not be below the best one, whatever the remaining steps take.

    >>> cannot_win([1.2, 1.1], steps=5, best_seconds=1.0), cannot_win([1.2, 1.1, 1.3], steps=5, best_seconds=1.0)
    (False, True)
    """
    if best_seconds is None:
        return False
    return 2 * sum(seconds >= best_seconds for seconds in timed_seconds) > steps


def measured(trials: Iterable[Trial]) -> list[Trial]:
    """Return the completely measured trials, fastest first; of equally fast ones the first that ran."""
    complete = [trial for trial in trials if trial.outcome == "measured"]
    return sorted(complete, key=lambda trial: trial.step_seconds or 0.0)


def spread(timed_seconds: Sequence[float]) -> float:
    return (max(timed_seconds) - min(timed_seconds)) / median(timed_seconds)


def tuned_reason(best: Trial, trials: Sequence[Trial]) -> str:
    """Return why the best trial is kept: how much slower the others were, and how certain that is."""
    assert best.step_seconds is not None and best.spread is not None, "it was measured"
    others = [trial for trial in trials if trial is not best and trial.step_seconds is not None]
    sentences = []
    if others:
        # A trial that ended early was timed too, so that the next layout is not the slowest one.
        second = min(others, key=lambda trial: trial.step_seconds or 0.0)
        gain = (second.step_seconds or 0.0) / best.step_seconds - 1
        name = second.name
        if name == best.name:
            name = f"with micro-batch {second.layout.micro_batch_size}"
        sentences.append(f"{best.name} is measured {100 * gain:.1f} % faster than {name}.")
        if gain < best.spread:
            sentences.append(f"Its own steps vary by {100 * best.spread:.0f} %, so the two may be equally fast.")
    else:
        sentences.append(f"{best.name} is the only layout that was measured.")
    sentences.append(
        f"Measured {_seconds(best.step_seconds)} s per step in {best.steps} steps, "
        f"{_seconds(best.predicted_seconds)} s predicted."
    )
    if best.peak_allocated_bytes is not None:
        sentences.append(
            f"Measured {gigabytes(best.peak_allocated_bytes)} GB of tensors on the fullest rank, "
            f"{gigabytes(best.predicted_allocated_bytes)} GB predicted."
        )
    layout = best.layout
    recomputation = "" if layout.gradient_checkpointing else "no "
    sentences.append(
        f"Micro-batch {layout.micro_batch_size} x {layout.gradient_accumulation_steps}, "
        f"{recomputation}gradient checkpointing."
    )
    return " ".join(sentences)


def rejected_by_trial(trial: Trial, best: Trial) -> str:
    """Return why a measured layout was not kept."""
    if trial.step_seconds is not None and best.step_seconds is not None:
        slower = 100 * (trial.step_seconds / best.step_seconds - 1)
        name = trial.name
        if name == best.name:
            name += f" with micro-batch {trial.layout.micro_batch_size}"
        early = f", ended after {trial.steps} steps" if trial.outcome == "slower" else ""
        return (
            f"{name} is measured {slower:.1f} % slower: {_seconds(trial.step_seconds)} s per step, "
            f"{_seconds(trial.predicted_seconds)} s predicted{early}."
        )
    return f"{trial.name} was not measured: {trial.outcome}: {trial.detail}"


def _seconds(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
