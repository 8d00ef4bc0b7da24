"""Speed, memory and lag of a running training, beside what its plan predicted, for its log and for who watches it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from transformers import TrainerCallback

from ...ds_configs.plan.plan import Plan


class StepFiguresCallback(TrainerCallback):
    """Figures of the steps since the last logged one, which every log with a loss gets as further values.

    `step_seconds` is wall-clock time for each step, with data loading, without logging, evaluation and saving, of the
    slowest rank. All ranks of a step end it together, as they exchange gradients, and begin it together, as they count
    the labels of all (transformers 5.17, `get_batch_samples`). What tells a rank that lags is what it does alone: to
    load its samples, and the first forward pass of a step (`slowest_rank`, and `slowest_rank_ratio` to the median
    rank). The first step of a training does not count there.
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
        self._is_first = True
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
        fetch = trainer.get_batch_samples

        def timed_fetch(batches: Iterator[Any], *arguments: Any, **keywords: Any) -> Any:
            return fetch(self._timed(batches), *arguments, **keywords)

        trainer.get_batch_samples = timed_fetch

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield what an iterator does, and count how long it takes."""
        while True:
            began = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._loading += time.monotonic() - began
            yield batch

    def _begin(self) -> None:
        self._began = self._resumed = time.monotonic()
        self._paused, self._steps, self._since = 0.0, 0, 0
        self._loading = 0.0
        self._clocks: list[Callable[[], float]] = []
        self._stop: Callable[[], Callable[[], float]] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listen to the model's forward pass, and begin to count."""
        model = kwargs.get("model")
        if model is not None and hasattr(model, "register_forward_hook"):
            self._hook = model.register_forward_hook(self._forward_done)
        self._begin()
        self._since = state.global_step
        self._is_first = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock of what this rank does alone."""
        self._stop = _clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step; where it is logged, gather the figures of all ranks."""
        self._steps += 1
        if self._is_first:
            # Its kernels are built, and its memory is found.
            self._is_first, self._clocks, self._loading = False, [], 0.0
        if control.should_log:
            _await_device()
            self.figures = self._gathered(state.global_step)
            self._begin()
            self._since = state.global_step
        self._resumed = time.monotonic()

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

    def _forward_done(self, *_: Any) -> None:
        """Take the time of the first forward pass of a step."""
        if self._stop is not None:
            self._clocks.append(self._stop())
            self._stop = None

    def _gathered(self, step: int) -> dict[str, float]:
        import torch

        seconds = (time.monotonic() - self._began - self._paused) / max(1, self._steps)
        own = [clock() for clock in self._clocks]
        present = torch.cuda.is_available()
        peak = torch.cuda.max_memory_allocated() / 1e9 if present else math.nan
        alone = statistics.fmean(own) + self._loading / len(own) if own else math.nan
        mine = torch.tensor([[seconds, alone, peak]], dtype=torch.float32)
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
