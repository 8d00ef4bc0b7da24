"""`GuardCallback`: a run stops when its numbers are not finite, when it is asked to, and when a rank stands still.

In transformers 5.17.0 a loss that is not finite is replaced in the log by the mean of the others
(`logging_nan_inf_filter`), gradients are clipped to NaN and applied, and the model is saved. The gradient's norm
reaches no callback, so that `attach` listens to the two methods of the Trainer that know loss and norm. One small
all-reduce before each update lets all ranks decide alike, for signals too: JIT checkpoints of Transformers hang when
the signal reaches one rank alone.
"""

from __future__ import annotations

import math
import signal
from typing import Any

from transformers import TrainerCallback

from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from ...ds_configs.specs.settings import HANG_SECONDS, NONFINITE_STEPS, NonFiniteAction
from ...plugins.launching.notes import Notify, note_on_first_rank
from ...plugins.transformers.finite_weights import (
    gathered,
    nonfinite_gradients,
    nonfinite_weights,
    refuse_nonfinite_weights,
    shortened,
)
from .hang import HangWatch, watch_of_rank
from .signals import StoppedBySignalError, StopRequest

STOP_SECONDS = 600.0


class NonFiniteError(ShardwrightError):
    """A run whose loss or gradients were not finite for several steps in a row."""

    exit_code = 4


class GuardCallback(TrainerCallback):
    """Finite or stop, a whole checkpoint on SIGTERM and SIGINT, and an end to hangs, with any Trainer.

    Attach it before `CheckpointCallback`. A signal to any one rank lets all of them save a checkpoint after the step
    and raise `StoppedBySignalError` out of `Trainer.train`. While the numbers are not finite no checkpoint is saved.

    Args:
        nonfinite: `stop` after `nonfinite_steps`; `skip` leaves out the update of each such step, and stops as well
            when they come in a row.
        nonfinite_steps: Steps in a row after which the run stops.
        allow_nonfinite: Whether the model may hold such weights when training begins.
        hang_seconds: How long a rank may stand still; `None` for as long as it wants.
        stop_seconds: How long a rank may take to stop after a signal; then it ends without a checkpoint.
        notify: Receives remarks, on the first rank.

    >>> GuardCallback().attach(trainer)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        nonfinite: NonFiniteAction = "stop",
        nonfinite_steps: int = NONFINITE_STEPS,
        allow_nonfinite: bool = False,
        hang_seconds: float | None = HANG_SECONDS,
        stop_seconds: float = STOP_SECONDS,
        notify: Notify | None = None,
    ) -> None:
        self._action, self._limit, self._allow = nonfinite, nonfinite_steps, allow_nonfinite
        self._hang_seconds = hang_seconds
        self._notify = notify or note_on_first_rank
        self._request = StopRequest(stop_seconds)
        self._watch: HangWatch | None = None
        self._own_watch: HangWatch | None = None
        self._trainer: Any = None
        self._loss_is_bad: Any = None
        self._norm: Any = None
        self._in_a_row = 0
        self._first_seen = ""
        self._signal = 0

    def attach(self, trainer: Any) -> None:
        """Add this callback to a Trainer and listen to its losses and gradient norms.

        Raises:
            UsageError: steps are to be skipped under DeepSpeed, which has taken them before any callback is asked.
        """
        if self._action == "skip" and trainer.is_deepspeed_enabled:
            rule = "DeepSpeed updates the weights inside the backward pass"
            raise UsageError(Fault(where="nonfinite", value="skip", rule=rule, fix="use stop"))
        self._trainer = trainer
        train, step, norm = trainer.train, trainer.training_step, trainer._get_grad_norm

        def guarded_train(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            finally:
                self._release()

        def training_step(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            bad = ~loss.detach().isfinite().all()
            self._loss_is_bad = bad if self._loss_is_bad is None else self._loss_is_bad | bad
            return loss

        def get_grad_norm(*args: Any, **kwargs: Any) -> Any:
            self._norm = norm(*args, **kwargs)
            return self._norm

        trainer.train, trainer.training_step = guarded_train, training_step
        if not trainer.is_deepspeed_enabled:
            trainer._get_grad_norm = get_grad_norm
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Look at the weights, and take the signals over.

        Raises:
            UsageError: it was not attached.
            RefusedInputError: weights are not finite.
        """
        if self._trainer is None:
            fix = "write GuardCallback().attach(trainer) instead of callbacks=[GuardCallback()]"
            raise UsageError(Fault(where="GuardCallback", rule="knows no trainer", fix=fix))
        name = getattr(getattr(model, "config", None), "_name_or_path", "")
        what = f"the model that is to be trained ({name})" if name else "the model that is to be trained"
        refuse_nonfinite_weights(model, what=what, allowed=self._allow)
        self._in_a_row, self._signal = 0, 0
        self._request.install()
        self._watch = watch_of_rank()
        if self._watch is not None:
            self._watch.in_steps(True, "the start of training")
        elif self._hang_seconds is not None:
            self._own_watch = self._watch = HangWatch(self._hang_seconds, args.process_index)
            self._watch.in_steps(True, "the start of training")
            self._watch.start()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Agree with all ranks on signals and on whether the step is finite.

        Raises:
            NonFiniteError: it is not, for the last of the steps that may be so in a row.
        """
        if self._trainer.is_deepspeed_enabled:
            self._norm = self._trainer.model_wrapped.get_global_grad_norm()
        # With a loss scale in fp16 gradients overflow on purpose, and the optimizer passes such steps over.
        norm = None if args.mixed_precision == "fp16" else self._norm
        self._signal, bad = _agreed(self._request.number, self._loss_is_bad, norm, args.device)
        own_loss_is_bad, self._loss_is_bad = self._loss_is_bad, None
        if not bad:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        seen = self._seen(model, bool(own_loss_is_bad), state.global_step + 1)
        self._first_seen = seen if self._in_a_row == 1 else self._first_seen
        if self._in_a_row >= self._limit:
            what = f"{self._limit} steps in a row were not finite; the first: {self._first_seen}"
            raise NonFiniteError(f"{what}. Nothing was saved since; lower the learning rate or look at the data")
        if args.process_index == 0:
            self._notify(seen + ("; its update is left out" if self._action == "skip" else ""))
        if self._action == "skip":
            optimizer.zero_grad()

    def _seen(self, model: Any, loss_is_bad: bool, step: int) -> str:
        """Say what is not finite and where; every rank must call it."""
        names = nonfinite_gradients(model) or nonfinite_weights(model)
        found = gathered((loss_is_bad, names))
        losses = [str(rank) for rank, (bad, _) in enumerate(found) if bad]
        ranks = [str(rank) for rank, (_, held) in enumerate(found) if held]
        parts = [f"the loss on rank {', '.join(losses)}"] if losses else []
        if ranks:
            everywhere = sorted({name for _, held in found for name in held})
            parts.append(f"gradients or weights of {shortened(everywhere)} on rank {', '.join(ranks)}")
        return f"step {step}: not finite: {'; '.join(parts) or 'the norm of the gradients'}"

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Let a signal save and stop, and keep steps and weights that are not finite out of checkpoints.

        Raises:
            RefusedInputError: a checkpoint is due, and weights are not finite although losses and gradients are.
        """
        self._beat(f"step {state.global_step}")
        if self._in_a_row and self._action == "stop" and control.should_save:
            control.should_save = False
            if args.process_index == 0:
                self._notify(f"no checkpoint after step {state.global_step}, which was not finite")
        if self._signal:
            control.should_training_stop = True
            control.should_save = not self._in_a_row
        if control.should_save:
            refuse_nonfinite_weights(model, what=f"checkpoint-{state.global_step}", allowed=self._allow)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep a step that was not finite out of the checkpoint of an epoch."""
        if self._in_a_row and self._action == "stop":
            control.should_save = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the signals back.

        Raises:
            StoppedBySignalError: one of them ended the training.
        """
        self._release()
        if self._signal:
            name = signal.Signals(self._signal).name
            saved = "its last steps were not finite" if self._in_a_row else f"checkpoint-{state.global_step} holds it"
            text = f"stopped by {name} after step {state.global_step} of {state.max_steps}: {saved}"
            raise StoppedBySignalError(text, number=self._signal)

    def _release(self) -> None:
        """Give the signals back and watch no longer; also where an exception ends the training."""
        self._request.remove()
        if self._watch is not None:
            self._watch.in_steps(False, "the end of training")
        if self._own_watch is not None:
            self._own_watch.end()

    def _beat(self, where: str) -> None:
        if self._watch is not None:
            self._watch.beat(where)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the watch that the rank moves."""
        self._beat(f"the beginning of step {state.global_step + 1}")

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the watch that the rank moves."""
        self._beat(f"a micro-batch of step {state.global_step + 1}")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the watch that the rank moves."""
        self._beat("a batch of an evaluation")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the watch that the rank moves."""
        self._beat(f"the checkpoint of step {state.global_step}")


def _agreed(number: int, loss_is_bad: Any, norm: Any, device: Any) -> tuple[int, bool]:
    """Return the signal that any rank received, and whether loss or norm of any rank is not finite."""
    import torch
    import torch.distributed as distributed

    if norm is None:
        norm_is_bad = torch.zeros((), dtype=torch.bool, device=device)
    elif isinstance(norm, torch.Tensor):
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        norm_is_bad = ~whole.detach().isfinite().all().to(device)
    else:
        norm_is_bad = torch.tensor(not math.isfinite(norm), device=device)
    bad = norm_is_bad if loss_is_bad is None else norm_is_bad | loss_is_bad.to(device)
    told = torch.stack([torch.tensor(number, device=device), bad.long()])
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        distributed.all_reduce(told, op=distributed.ReduceOp.MAX)
    agreed_number, agreed_bad = told.tolist()
    return int(agreed_number), bool(agreed_bad)
