"""Speed, memory and slowest rank of a running training, with the plan's predictions, for the log and the live view."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers import TrainerCallback

from ...ds_configs.plan.plan import Plan
from ...plugins import patches
from ..data.chat import IGNORED_LABEL


class StepFiguresCallback(TrainerCallback):
    """Adds the figures of the steps since the last logged one to every log with a loss.

    `step_seconds` is the wall-clock time per step of the slowest rank, with data loading, without logging, evaluation
    and saving. All ranks end a step together, because they exchange gradients, and begin it together, because they
    count the labels of all ranks (transformers 5.17, `get_batch_samples`). A slow rank therefore shows only in its own
    work: loading samples and the first forward pass of a step (`slowest_rank`, and `slowest_rank_ratio` to the median
    rank), without the first step of a training.
    Memory is the peak that torch allocated for tensors. Ranks gather five numbers once per logged step.
    `positions_per_second` counts what the model reads, padding included, as plans do, and `labelled_tokens_per_second`
    the tokens with a label; both are omitted where ranks share sequences.

    Args:
        plan: Adds its predictions to the figures.
        tokens_of: Returns the tokens of a number of steps; without it there are no tokens/s.
    """

    def __init__(self, plan: Plan | None = None, tokens_of: Callable[[int], int] | None = None) -> None:
        self.figures: dict[str, float] = {}
        self._plan, self._tokens_of = plan, tokens_of
        self._trainer: Any = None
        self._hook: Any = None
        self._is_first = True
        self._begin()

    def attach(self, trainer: Any) -> None:
        """Add this callback to a Trainer, and its figures to the Trainer's log."""
        trainer.add_callback(self)
        self._trainer = trainer

        def with_figures(log: Callable[..., None]) -> Callable[..., None]:
            # Logs of the summary or an evaluation belong to no step.
            return lambda logs, *arguments, **keywords: log(
                logs | (self.figures if "loss" in logs else {}), *arguments, **keywords
            )

        def timed(batches: Iterator[Any]) -> Iterator[Any]:
            while True:
                began = time.monotonic()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                finally:
                    self._loading += time.monotonic() - began
                self._count(batch)
                yield batch

        def with_timing(fetch: Callable[..., Any]) -> Callable[..., Any]:
            return lambda batches, *arguments, **keywords: fetch(timed(batches), *arguments, **keywords)

        patches.apply("figures-in-log", with_figures, on=trainer)
        patches.apply("timed-batches", with_timing, on=trainer)

    def _begin(self) -> None:
        self._began = self._resumed = time.monotonic()
        self._paused, self._loading, self._steps, self._since = 0.0, 0.0, 0, 0
        self._clock = StepClock()
        self._positions = 0
        self._labelled: list[Any] = []

    def _count(self, batch: Any) -> None:
        import torch

        ids: Any = None
        labels: Any = None
        # Collators of some trainers return a list of samples.
        if hasattr(batch, "get"):
            ids, labels = batch.get("input_ids"), batch.get("labels")
        if torch.is_tensor(ids) and torch.is_tensor(labels):
            self._positions += ids.numel()
            # Read later, without synchronizing. The first token of a row is never predicted.
            self._labelled.append((labels[..., 1:] != IGNORED_LABEL).sum())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs.get("model")
        if model is not None and hasattr(model, "register_forward_hook"):
            self._hook = model.register_forward_hook(lambda *_: self._clock.stop())
        self._begin()
        self._since = state.global_step
        self._is_first = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock of this rank's own work."""
        self._clock.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step; if it is logged, gather the figures of all ranks."""
        self._steps += 1
        if self._is_first:
            # It builds kernels and allocates memory.
            self._is_first, self._clock, self._loading = False, StepClock(), 0.0
        if control.should_log:
            self.figures = self._gather(state.global_step)
            self._begin()
            self._since = state.global_step
        self._resumed = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Exclude the time outside of training steps."""
        now = time.monotonic()
        self._paused += now - self._resumed
        self._resumed = now

    on_evaluate = on_save = on_log

    def _gather(self, step: int) -> dict[str, float]:
        import torch

        own = self._clock.read(waits=True)
        seconds = (time.monotonic() - self._began - self._paused) / max(1, self._steps)
        present = torch.cuda.is_available()
        peak = torch.cuda.max_memory_allocated() / 1e9 if present else math.nan
        alone = statistics.fmean(own) + self._loading / len(own) if own else math.nan
        labelled = sum(int(count) for count in self._labelled)
        mine = torch.tensor([[seconds, alone, peak, self._positions, labelled]], dtype=torch.float32)
        ranks = self._trainer.accelerator.gather(mine.to(self._trainer.args.device)).tolist()
        slowest = max(seconds for seconds, *_ in ranks)
        figures = {"step_seconds": slowest} | lag(own for _, own, *_ in ranks)
        if self._tokens_of is not None and slowest > 0:
            tokens = self._tokens_of(step) - self._tokens_of(self._since)
            figures["tokens_per_second"] = tokens / (slowest * self._steps)
            positions, labels = (sum(rank[index] for rank in ranks) for index in (3, 4))
            strategy = None if self._plan is None else self._plan.chosen.strategy
            if positions and strategy is not None and strategy.sp == strategy.cp == strategy.pp == 1:
                # The ranks of a tensor-parallel group read the same samples.
                seconds_of_one = slowest * self._steps * strategy.tp
                figures["positions_per_second"] = positions / seconds_of_one
                figures["labelled_tokens_per_second"] = labels / seconds_of_one
        peaks = [peak for _, _, peak, *_ in ranks if not math.isnan(peak)]
        if peaks:
            figures["peak_allocated_gb"] = max(peaks)
        if self._plan is not None:
            chosen = self._plan.chosen
            figures["planned_step_seconds"] = chosen.time.seconds
            if "tokens_per_second" in figures:
                figures["planned_tokens_per_second"] = chosen.time.tokens_per_second
            if peaks:
                figures["planned_allocated_gb"] = chosen.memory.gpu.allocated_bytes / 1e9
        return figures


def lag(own_seconds: Iterable[float]) -> dict[str, float]:
    """Return the slowest rank and its time relative to the median; empty for one rank.

    >>> lag([0.2, 0.2, 0.3])
    {'slowest_rank': 2, 'slowest_rank_ratio': 1.5}
    """
    seconds = list(own_seconds)
    if len(seconds) < 2 or any(map(math.isnan, seconds)):
        return {}
    slowest, middle = max(range(len(seconds)), key=seconds.__getitem__), statistics.median(seconds)
    return {"slowest_rank": slowest, "slowest_rank_ratio": round(seconds[slowest] / middle, 4)} if middle > 0 else {}


class StepClock:
    """Seconds between pairs of points of a step, without synchronizing the host with the accelerator in between.

    An accelerator records an event at each point, read once it has passed; without one, the host's clock counts.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._started: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()

    def start(self) -> None:
        self._started = _point()

    def stop(self) -> None:
        """Record the end of what was started; nothing if nothing was."""
        if self._started is not None:
            self._pending.append((self._started, _point()))
            self._started = None

    def read(self, *, waits: bool = False) -> list[float]:
        """Return the seconds of the pairs that the accelerator has passed; of all pairs if it `waits` for them."""
        if waits:
            await_device()
        while self._pending:
            first, last = self._pending[0]
            if isinstance(last, float):
                self._seconds.append(last - first)
            elif waits or last.query():
                self._seconds.append(first.elapsed_time(last) / 1e3)
            else:
                break
            self._pending.popleft()
        return self._seconds


def _point() -> Any:
    import torch

    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def await_device() -> None:
    """Wait until the accelerator, if any, is idle."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
