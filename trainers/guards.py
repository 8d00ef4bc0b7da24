"""Trainer callback that stops a run on non-finite numbers, on SIGTERM or SIGINT, and when a rank hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
from transformers import TrainerCallback

from ..ds_configs.specs.errors import ShardwrightError
from ..ds_configs.specs.settings import HANG_SECONDS, NONFINITE_STEPS
from ..plugins.launching.elastic import write_collectives
from ..plugins.launching.messages import note_on_first_rank
from ..plugins.transformers.loading import (
    gathered,
    nonfinite_gradients,
    nonfinite_weights,
    refuse_nonfinite_weights,
    shortened,
)
from ..plugins.transformers.training_arguments import check_first_of_its_kind
from .exact import StepEvents, check_attached, make_exact

if TYPE_CHECKING:
    import torch
    from transformers import Trainer

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_REQUEST_SECONDS = 2.0
"""Signals within this time after the first belong to the same request to stop."""
STOP_SECONDS = 600.0
_OTHERS_SECONDS = 2.0
"""Time for the other ranks to print their stacks: a launcher ends them as soon as one rank has ended."""
_BUSY_SHARE = 0.02
"""Share of a processor above which a rank is busy; the polling of communication libraries needs less."""
_of_rank: HangWatch | None = None


@contextmanager
def watched(seconds: float | None) -> Iterator[None]:
    """Watch this rank for hangs inside the block; `None` does not watch."""
    global _of_rank
    if seconds is None:
        yield
        return
    _of_rank = HangWatch(seconds, int(os.environ.get("RANK", "0")))
    _of_rank.start()
    try:
        yield
    finally:
        _of_rank.end()
        _of_rank = None


class HangWatch:
    """End the process if `beat` is not called for some seconds."""

    def __init__(self, seconds: float, rank: int) -> None:
        self._seconds, self._rank = seconds, rank
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._in_steps = False
        self._busy = time.process_time()
        self.beat("its start")

    def in_steps(self, on: bool, where: str) -> None:
        """Count only `beat` as progress from now on; with `on` false, count processor time too."""
        self.beat(where)
        self._in_steps = on

    def beat(self, where: str) -> None:
        """Record progress of the rank, and where it is."""
        self._last, self._where = time.monotonic(), where

    def start(self) -> None:
        """Start the thread that watches."""
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        pause = min(1.0, self._seconds / 4)
        while not self._ended.wait(pause):
            before, self._busy = self._busy, time.process_time()
            if not self._in_steps and self._busy - before > _BUSY_SHARE * pause:
                self._last = time.monotonic()
            if time.monotonic() - self._last > self._seconds:
                try:
                    still = f"rank {self._rank} made no progress for {self._seconds:g} s, since {self._where}"
                    print(f"{still}; the stacks of its threads:", file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(sys.stderr, all_threads=True)
                    sys.stderr.flush()
                    write_collectives()
                    # A rank that a signal has stopped can neither print its stacks nor end.
                    launcher = psutil.Process().parent() if "TORCHELASTIC_RUN_ID" in os.environ else None
                    for process in [] if launcher is None else launcher.children():
                        with contextlib.suppress(psutil.Error):
                            if process.status() == psutil.STATUS_STOPPED:
                                text = f"process {process.pid} was stopped by a signal; killing it"
                                print(text, file=sys.stderr, flush=True)
                                process.kill()
                    time.sleep(_OTHERS_SECONDS)
                finally:
                    # In a notebook, stderr may have no file to dump stacks to.
                    os._exit(1)


class StoppedBySignalError(ShardwrightError):
    """A run that ended early because a rank or its launcher got a signal; `exit_code` is 128 + its number."""

    def __init__(self, message: str, *, number: int) -> None:
        super().__init__(message)
        self.number = number
        self.exit_code = 128 + number

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(StoppedBySignalError, number=self.number), (str(self),)


class StopRequest:
    """Record the first signal of this process between `install` and `remove`.

    Args:
        seconds: Longest time that the process may continue after it; then the process ends, saved or not.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._received = 0.0
        self._before: dict[int, Any] = {}
        self._limit: threading.Timer | None = None
        self._process = 0
        self.number = 0
        """The signal; 0 without one."""

    def install(self) -> None:
        """Install the handlers; only in the main thread, because Python allows none in others."""
        if threading.current_thread() is threading.main_thread() and not self._before:
            self._process, self.number = os.getpid(), 0
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}

    def remove(self) -> None:
        """Restore the earlier handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._limit is not None:
            self._limit.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A worker of a data loader that was forked from the rank.
            os._exit(128 + number)
        if not self.number:
            self.number, self._received = number, time.monotonic()
            self._limit = threading.Timer(self._seconds, os._exit, (128 + number,))
            self._limit.daemon = True
            self._limit.start()
        elif time.monotonic() - self._received > SAME_REQUEST_SECONDS:
            os._exit(128 + number)


class NonFiniteError(ShardwrightError):
    """A run whose loss or gradients were not finite for several consecutive steps."""

    exit_code = 4


class GuardCallback(StepEvents, TrainerCallback):
    """Stop any Trainer on non-finite numbers, hangs and signals, with a complete checkpoint on SIGTERM and SIGINT.

    Attach it before `CheckpointCallback`. After a signal to any rank, all ranks save a checkpoint at the end of the
    step, and `Trainer.train` raises `StoppedBySignalError`. While numbers are not finite, no checkpoint is saved.

    Args:
        nonfinite_steps: Consecutive non-finite steps after which the run stops.
        allow_nonfinite: Whether weights may be non-finite when training begins.
        hang_seconds: Longest time without progress of a rank; `None` for no limit.
        stop_seconds: Longest time that a rank may take to stop after a signal; then it ends without a checkpoint.

    >>> GuardCallback().attach(trainer)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        nonfinite_steps: int = NONFINITE_STEPS,
        allow_nonfinite: bool = False,
        hang_seconds: float | None = HANG_SECONDS,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self._limit, self._allow = nonfinite_steps, allow_nonfinite
        self._hang_seconds = hang_seconds
        self._request = StopRequest(stop_seconds)
        self._watch: HangWatch | None = None
        self._owns_watch = False
        self._trainer: Any = None
        self._loss_is_bad: torch.Tensor | None = None
        self._norm: torch.Tensor | float | None = None
        self._in_a_row = 0
        self._first_seen = ""
        self._signal = 0

    def attach(self, trainer: Trainer) -> None:
        """Add this callback to a Trainer.

        Raises:
            UsageError: the Trainer has such a callback already.
        """
        check_first_of_its_kind(self, trainer)
        self._trainer = trainer
        make_exact(trainer).add_callback(self)

    @contextmanager
    def around_training(self) -> Iterator[None]:
        """Stop watching when the training run ends, also by an exception."""
        try:
            yield
        finally:
            self._release()

    def on_loss(self, loss: torch.Tensor) -> None:
        """Remember that a loss is not finite, without waiting for the device."""
        bad = ~loss.detach().isfinite().all()
        self._loss_is_bad = bad if self._loss_is_bad is None else self._loss_is_bad | bad

    def on_gradient_norm(self, norm: Any) -> None:
        """Keep the norm; DeepSpeed's engine has its own."""
        if self._trainer is not None and not self._trainer.is_deepspeed_enabled:
            self._norm = norm

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Check the weights, install the signal handlers and start to watch for hangs.

        Raises:
            UsageError: the callback was not attached.
            RefusedInputError: weights are not finite.
        """
        check_attached(self, self._trainer)
        name = getattr(getattr(model, "config", None), "_name_or_path", "")
        what = f"the model to train ({name})" if name else "the model to train"
        refuse_nonfinite_weights(model, what=what, allowed=self._allow)
        self._in_a_row, self._signal = 0, 0
        self._request.install()
        self._watch, self._owns_watch = _of_rank, _of_rank is None
        if self._watch is None and self._hang_seconds is not None:
            self._watch = HangWatch(self._hang_seconds, args.process_index)
            self._watch.start()
        if self._watch is not None:
            self._watch.in_steps(True, "the start of training")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Agree with all ranks on signals and on whether the step is finite.

        Raises:
            NonFiniteError: too many consecutive steps are not finite.
        """
        import torch
        import torch.distributed as distributed

        if self._trainer.is_deepspeed_enabled:
            self._norm = self._trainer.model_wrapped.get_global_grad_norm()
        # With the loss scale of fp16, gradients may overflow, and the optimizer skips such steps.
        norm = None if args.mixed_precision == "fp16" else self._norm
        if norm is None:
            norm_is_bad = torch.zeros((), dtype=torch.bool, device=args.device)
        elif isinstance(norm, torch.Tensor):
            whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            norm_is_bad = ~whole.detach().isfinite().all().to(args.device)
        else:
            norm_is_bad = torch.tensor(not math.isfinite(norm), device=args.device)
        is_bad = norm_is_bad if self._loss_is_bad is None else norm_is_bad | self._loss_is_bad.to(args.device)
        flags = torch.stack([torch.tensor(self._request.number, device=args.device), is_bad.long()])
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            distributed.all_reduce(flags, op=distributed.ReduceOp.MAX)
        self._signal, bad = flags.tolist()
        own_loss_is_bad, self._loss_is_bad = self._loss_is_bad, None
        if not bad:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        names = nonfinite_gradients(model) or nonfinite_weights(model)
        by_rank = gathered((bool(own_loss_is_bad), names))
        losses = [str(rank) for rank, (loss_is_bad, _) in enumerate(by_rank) if loss_is_bad]
        ranks = [str(rank) for rank, (_, broken) in enumerate(by_rank) if broken]
        parts = [f"the loss on rank {', '.join(losses)}"] if losses else []
        if ranks:
            everywhere = sorted({name for _, broken in by_rank for name in broken})
            parts.append(f"gradients or weights of {shortened(everywhere)} on rank {', '.join(ranks)}")
        step = state.global_step + 1
        seen = f"step {step}: not finite: {'; '.join(parts) or 'the norm of the gradients'}"
        self._first_seen = seen if self._in_a_row == 1 else self._first_seen
        if self._in_a_row >= self._limit:
            what = f"{self._limit} consecutive steps were not finite; the first: {self._first_seen}"
            raise NonFiniteError(f"{what}. No checkpoint was saved since; lower the learning rate or check the data")
        if args.process_index == 0:
            note_on_first_rank(seen)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Save and stop after a signal, and save no checkpoint of non-finite steps and weights.

        Raises:
            RefusedInputError: a checkpoint is due, and weights are not finite although losses and gradients are.
        """
        self._beat(f"step {state.global_step}")
        if self._in_a_row and control.should_save:
            control.should_save = False
            if args.process_index == 0:
                note_on_first_rank(f"no checkpoint is saved after step {state.global_step}, which was not finite")
        if self._signal:
            control.should_training_stop = True
            control.should_save = not self._in_a_row
        if control.should_save:
            refuse_nonfinite_weights(model, what=f"checkpoint-{state.global_step}", allowed=self._allow)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save no checkpoint of an epoch whose last step was not finite."""
        if self._in_a_row:
            control.should_save = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the signal handlers.

        Raises:
            StoppedBySignalError: a signal ended the run.
        """
        self._release()
        if self._signal:
            name = signal.Signals(self._signal).name
            saved = "its last steps were not finite" if self._in_a_row else f"saved as checkpoint-{state.global_step}"
            text = f"stopped by {name} after step {state.global_step} of {state.max_steps}: {saved}"
            raise StoppedBySignalError(text, number=self._signal)

    def _release(self) -> None:
        """Restore the signal handlers and stop watching, also when an exception ends the training."""
        self._request.remove()
        if self._watch is not None:
            self._watch.in_steps(False, "the end of training")
            if self._owns_watch:
                self._watch.end()

    def _beat(self, where: str) -> None:
        if self._watch is not None:
            self._watch.beat(where)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._beat(f"the beginning of step {state.global_step + 1}")

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._beat(f"a micro-batch of step {state.global_step + 1}")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._beat("a batch of an evaluation")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._beat(f"the checkpoint of step {state.global_step}")
