"""A training that is watched and whose checkpoints are whole, as every command runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..checkpoints.selection import Selection


def train_guarded(trainer: Any, *, resume: str | bool | Selection | None, **guards: Any) -> None:
    """Train with `GuardCallback` and `CheckpointCallback`, behind all other callbacks; every rank must call it.

    Args:
        trainer: Any Trainer, with all of its other callbacks.
        resume: A checkpoint, true for the newest whole one, or one that was read; `None` begins at step 0.
        **guards: Arguments of `GuardCallback`.

    Raises:
        UsageError: the run differs from the one that saved the checkpoint in what cannot be carried over.
        RefusedInputError: the checkpoint is not whole, or weights of the model are not finite.
        NonFiniteError: losses or gradients were not finite for several steps.
        StoppedBySignalError: the run was asked to stop, and has saved a checkpoint.
    """
    from ..checkpoints.callback import CheckpointCallback
    from ..guards.callback import GuardCallback

    GuardCallback(**guards).attach(trainer)
    checkpoints = CheckpointCallback()
    checkpoints.attach(trainer)
    trainer.train(resume_from_checkpoint=checkpoints.asked(resume))
