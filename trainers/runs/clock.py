"""`StepClock`, the one clock of a training, and its readers on a rank: the log, `metrics.jsonl` and the live view.

`PlanCallback` (the measurement of a plan) and the trials of `tune` are clocks too.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ...ds_configs.plan.output import write_files
from ...ds_configs.plan.plan import Plan
from ...plugins.launching.messages import Figures, Progress, send
from ...plugins.metering import AcceleratorMeter, Meter, MeterPhase
from ..exact import StepEvents, make_exact
from .settings import METRICS_FILE

LATER_STEPS: MeterPhase = "other"
"""Phase of a meter that begins when the first step has ended."""


class StepClock(StepEvents, TrainerCallback):
    """Times the steps of a Trainer on this rank, without synchronization between logging steps.

    `steps` has the seconds of each step, from `on_step_begin` to `on_step_end`: without data loading, logging,
    evaluation and saving. A clock that follows a Trainer also adds its `figures` to every log with a loss, for the
    steps since the last one:

    - `step_seconds`, wall-clock time per step of the slowest rank, with data loading, without logging, evaluation and
      saving.
    - `peak_allocated_gb`, the peak that torch allocated for tensors since the clock was made.
    - `positions_per_second` counts what the model reads, padding included, as plans do. It is omitted where ranks share
      sequences.

    Ranks gather three numbers once per logged step.

    Args:
        plan: Its predictions are added to the figures.
        tokens_of: Returns the tokens of a number of steps; without it there are no tokens/s.
        meter: Counts memory; by default torch's caching allocator, or nothing on ranks without an accelerator.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        tokens_of: Callable[[int], int] | None = None,
        meter: Meter | None = None,
    ) -> None:
        import torch

        self.figures: dict[str, float] = {}
        """Of the last logged step."""
        self.first_step = 0
        """Steps of earlier runs."""
        self.meter = meter
        if meter is None and torch.cuda.is_available():
            self.meter = AcceleratorMeter()
            self.meter.reset_peaks()
        self.plan, self._tokens_of = plan, tokens_of
        self._trainer: Any = None
        self._begin_training()

    def follow(self, trainer: Any) -> None:
        """Add this callback to a Trainer, and its figures to the Trainer's log."""
        self._trainer = make_exact(trainer)
        trainer.add_callback(self)

    def around_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Count the positions of the batches that a step loads."""
        import torch

        for batch in batches:
            # Collators of some trainers return a list of samples.
            ids = batch.get("input_ids") if hasattr(batch, "get") else None
            self._positions += ids.numel() if isinstance(ids, torch.Tensor) else 0
            yield batch

    def log_values(self) -> dict[str, float]:
        return self.figures

    def peak_bytes(self) -> int | None:
        """Return the largest bytes of tensors since the clock was made; `None` if nothing counts them."""
        return None if self.meter is None else max(self.meter.reading().peaks.values())

    def tokens_per_second(self, step: int) -> float | None:
        """Return the speed since the second step, which varies less than that of the last logged steps."""
        if self._second_step is None or self._tokens_of is None:
            return None
        first, began = self._second_step
        return (self._tokens_of(step) - self._tokens_of(first)) / (time.monotonic() - began)

    def _begin_training(self) -> None:
        self.steps = Intervals()
        self._second_step: tuple[int, float] | None = None
        self._begin_log()

    def _begin_log(self) -> None:
        self._began = self._resumed = time.monotonic()
        self._paused, self._logged_steps, self._positions = 0.0, 0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Discard the steps of an earlier run, which an exception may have ended."""
        self._begin_training()
        self.first_step = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The first step compiles and allocates, so its time is not representative.
        if self._second_step is None and state.global_step > self.first_step:
            self._second_step = state.global_step, time.monotonic()
        self.steps.start(point())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step; if it is logged, gather the figures of all ranks."""
        self.steps.stop(point())
        self.steps.read()
        self._logged_steps += 1
        if self._second_step is None and self.meter is not None:
            self.meter.enter(LATER_STEPS)
        if self._trainer is not None and control.should_log:
            import torch

            # The host is ahead of the accelerator.
            self.steps.read(waits=True)
            seconds = (time.monotonic() - self._began - self._paused) / max(1, self._logged_steps)
            peak = self.peak_bytes()
            mine = [seconds, math.nan if peak is None else peak / 1e9, self._positions]
            numbers = torch.tensor([mine], dtype=torch.float32, device=self._trainer.args.device)
            ranks = self._trainer.accelerator.gather(numbers).tolist()
            slowest = max(seconds for seconds, _, _ in ranks)
            chosen, layout, step = self.plan.chosen, self.plan.chosen.layout, state.global_step
            self.figures = {"step_seconds": slowest, "planned_step_seconds": chosen.time.seconds}
            if self._tokens_of is not None and slowest > 0:
                tokens = self._tokens_of(step) - self._tokens_of(step - self._logged_steps)
                self.figures["tokens_per_second"] = tokens / (slowest * self._logged_steps)
                self.figures["planned_tokens_per_second"] = chosen.time.tokens_per_second
                positions = sum(positions for _, _, positions in ranks)
                if positions and layout.sp == layout.cp == layout.pp == 1:
                    # The ranks of a tensor-parallel group read the same samples.
                    self.figures["positions_per_second"] = positions / (slowest * self._logged_steps * layout.tp)
            peaks = [peak for _, peak, _ in ranks if not math.isnan(peak)]
            if peaks:
                self.figures["peak_allocated_gb"] = max(peaks)
                self.figures["planned_allocated_gb"] = chosen.memory.gpu.allocated_bytes / 1e9
            self._begin_log()
        self._resumed = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Exclude the time outside of training steps."""
        now = time.monotonic()
        self._paused += now - self._resumed
        self._resumed = now

    on_evaluate = on_save = on_log


class Intervals:
    """Seconds between pairs of points of a step, without synchronizing the host with the accelerator in between."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._started: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()

    def start(self, begin: Any) -> None:
        self._started = begin

    def stop(self, end: Any) -> None:
        """Record the end of what was started; nothing if nothing was."""
        if self._started is not None:
            self._pending.append((self._started, end))
            self._started = None

    def read(self, *, waits: bool = False) -> list[float]:
        """Return the seconds of the pairs that the accelerator has passed; of all pairs if it `waits` for them."""
        import torch

        if waits and torch.cuda.is_available():
            torch.cuda.synchronize()
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


def point() -> Any:
    """Return this point of the run: an event that the accelerator records, or the host's time without one."""
    import torch

    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class ProgressSender(TrainerCallback):
    """Sends the progress of every optimizer step, with the figures of a clock, to the launching process."""

    def __init__(self, clock: StepClock | None = None) -> None:
        self._clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        losses = [float(entry["loss"]) for entry in state.log_history[-4:] if "loss" in entry]
        figures = Figures(loss=losses[-1] if losses else None)
        if self._clock is not None:
            speed, last = self._clock.tokens_per_second(state.global_step), self._clock.figures
            positions = None
            if speed is not None and last.get("tokens_per_second") and "positions_per_second" in last:
                positions = speed * last["positions_per_second"] / last["tokens_per_second"]
            figures = Figures(
                loss=figures.loss,
                tokens_per_second=speed,
                positions_per_second=positions,
                peak_allocated_gb=last.get("peak_allocated_gb"),
            )
        send(Progress(what="step", done=state.global_step, total=state.max_steps, figures=figures))


class MetricsWriter(TrainerCallback):
    """Writes the logged steps to `metrics.jsonl`, and requests the log, and an evaluation, of the last step."""

    def __init__(self, output_dir: Path, *, evaluates_last: bool) -> None:
        self._output_dir, self._evaluates_last = output_dir, evaluates_last

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True
            control.should_evaluate = control.should_evaluate or self._evaluates_last

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # All steps are rewritten: a resumed run drops what was logged after its checkpoint.
        if state.is_world_process_zero:
            steps = [entry for entry in state.log_history if "loss" in entry]
            text = "".join(f"{json.dumps(entry)}\n" for entry in steps)
            write_files({METRICS_FILE: text}, self._output_dir, force=True)

    on_train_begin = on_log
