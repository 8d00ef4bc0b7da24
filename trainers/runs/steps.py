"""Training engine by its environment, and the loss of each of its optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...plugins.accelerate.cpu_ranks import Engine, engine_from_environment


def chosen_engine(settings: dict[str, Any]) -> Engine:
    """Return the engine that the settings or else the launcher's environment select."""
    if settings.get("deepspeed"):
        return "deepspeed"
    return "fsdp2" if settings.get("fsdp") else engine_from_environment()


class StepLosses:
    """Keeps the loss of every optimizer step, which the Trainer's log averages over ``logging_steps``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._training_step: Callable[..., Any] = trainer.training_step
        self._losses: list[Any] = []
        self._accumulated: Any = 0.0
        trainer.training_step = self._recording_step

    def _recording_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = self._training_step(*args, **kwargs)
        self._accumulated = self._accumulated + loss.detach().float()
        if self._trainer.accelerator.sync_gradients:
            self._losses.append(self._accumulated)
            self._accumulated = 0.0
        return loss

    def mean_over_ranks(self) -> list[float]:
        """Return one loss per optimizer step, in order, none for a finished run; every rank must call it."""
        import torch

        if not self._losses:
            return []
        losses: list[float] = self._trainer.accelerator.reduce(torch.stack(self._losses), "mean").tolist()
        return losses
