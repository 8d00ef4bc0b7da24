"""Speed, memory and lag of a running training, beside what its plan predicted, for its log and for who watches it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from ...ds_configs.plan.plan import Plan


class StepFiguresCallback(TrainerCallback):
    """Figures of the steps since the last logged one, which every log with a loss gets as further values.

    `step_seconds` is wall-clock time for each step, with data loading, without logging, evaluation and saving, of the
    slowest rank. All ranks of a step end it together, as they exchange gradients; what tells a rank that lags is how
    long it takes until its first forward pass is done (`slowest_rank`, and `slowest_rank_ratio` to the median rank).
    Memory is what torch has allocated for tensors at most. Ranks meet once in a logged step, to gather three numbers.

    Args:
        plan: Whose predictions stand beside the figures; nothing without.
        tokens_of: Returns the tokens of so many steps of the training; without it no tokens/s are told.
    """

    def __init__(self, plan: Plan | None = None, tokens_of: Callable[[int], int] | None = None) -> None:
        self.figures: dict[str, float] = {}
        self._plan, self._tokens_of = plan, tokens_of
        self._trainer: Any = None
        self._hook: Any = None
        self._begin()

    def attach(self, trainer: Any) -> None:
        """Add this callback to a Trainer, whose log gets the figures from now on."""
        trainer.add_callback(self)
        self._trainer = trainer
        log = trainer.log

        def log_with_figures(logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
            # A log of the summary or an evaluation has no step of its own.
            found = self.figures if "loss" in logs else {}
            log({**logs, **found}, *arguments, **keywords)

        trainer.log = log_with_figures

    def _begin(self) -> None:
        self._began = self._resumed = time.monotonic()
        self._paused, self._steps, self._since = 0.0, 0, 0
        self._clocks: list[Callable[[], float]] = []
        self._stop: Callable[[], Callable[[], float]] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listen to the model's forward pass, and begin to count."""
        self._since = state.global_step
        model = kwargs.get("model")
        if model is not None and hasattr(model, "register_forward_hook"):
            self._hook = model.register_forward_hook(self._forward_done)
        self._begin_stretch(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step; where it is logged, gather the figures of all ranks."""
        self._steps += 1
        if control.should_log:
            _await_device()
            self.figures = self._gathered(state.global_step)
            self._begin_stretch(state.global_step)
        self._resumed = time.monotonic()
        self._stop = _clock()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out what was no training."""
        self._pause()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out what was no training."""
        self._pause()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out what was no training."""
        self._pause()

    def _pause(self) -> None:
        now = time.monotonic()
        self._paused += now - self._resumed
        self._resumed = now
        self._stop = _clock()

    def _begin_stretch(self, step: int) -> None:
        self._begin()
        self._since = step
        self._stop = _clock()

    def _forward_done(self, *_: Any) -> None:
        """Take the time of the first forward pass of a step: what a rank does before it meets the others."""
        if self._stop is not None:
            self._clocks.append(self._stop())
            self._stop = None

    def _gathered(self, step: int) -> dict[str, float]:
        import torch

        seconds = (time.monotonic() - self._began - self._paused) / max(1, self._steps)
        own = [clock() for clock in self._clocks]
        present = torch.cuda.is_available()
        peak = torch.cuda.max_memory_allocated() / 1e9 if present else math.nan
        mine = torch.tensor([[seconds, statistics.fmean(own) if own else math.nan, peak]], dtype=torch.float32)
        ranks = self._trainer.accelerator.gather(mine.to(self._trainer.args.device)).tolist()
        return self._named(ranks, step)

    def _named(self, ranks: list[list[float]], step: int) -> dict[str, float]:
        slowest = max(seconds for seconds, _, _ in ranks)
        found = {"step_seconds": slowest} | lag(own for _, own, _ in ranks)
        if self._tokens_of is not None and slowest > 0:
            tokens = self._tokens_of(step) - self._tokens_of(self._since)
            found["tokens_per_second"] = tokens / (slowest * self._steps)
        peaks = [peak for _, _, peak in ranks if not math.isnan(peak)]
        if peaks:
            found["peak_allocated_gb"] = max(peaks)
        if self._plan is not None:
            chosen = self._plan.chosen
            found["planned_step_seconds"] = chosen.time.seconds
            if "tokens_per_second" in found:
                found["planned_tokens_per_second"] = chosen.time.tokens_per_second
            if peaks:
                found["planned_allocated_gb"] = chosen.memory.gpu.allocated_bytes / 1e9
        return found


def lag(own_seconds: Any) -> dict[str, float]:
    """Return the rank that takes longest for itself, and how many times the median that is; nothing for one rank.

    >>> lag([0.2, 0.2, 0.3])
    {'slowest_rank': 2, 'slowest_rank_ratio': 1.5}
    """
    seconds = list(own_seconds)
    if len(seconds) < 2 or any(math.isnan(each) for each in seconds):
        return {}
    slowest, middle = max(range(len(seconds)), key=seconds.__getitem__), statistics.median(seconds)
    return {"slowest_rank": slowest, "slowest_rank_ratio": round(seconds[slowest] / middle, 4)} if middle > 0 else {}


def _clock() -> Callable[[], Callable[[], float]]:
    """Start a clock; what is returned stops it and returns what reads it later, so that no device is waited for."""
    import torch

    if not torch.cuda.is_available():
        began = time.monotonic()

        def stop() -> Callable[[], float]:
            seconds = time.monotonic() - began
            return lambda: seconds

        return stop
    first = torch.cuda.Event(enable_timing=True)
    first.record()

    def stop_on_device() -> Callable[[], float]:
        last = torch.cuda.Event(enable_timing=True)
        last.record()
        return lambda: float(first.elapsed_time(last)) / 1e3

    return stop_on_device


def _await_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
