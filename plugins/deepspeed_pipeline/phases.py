"""Tells a meter what the stage of a pipeline is doing (seen with deepspeed 0.19.8, `runtime/pipe/engine.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..metering.byte_meter import Meter, MeterPhase
from ..metering.trainer_phases import WARM_UP_STEPS, meter_trainer

_PHASES: dict[str, MeterPhase] = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "ReduceGrads": "backward",
    "OptimizerStep": "step",
}
"""Instructions of a schedule, by the phase that they begin."""


def meter_pipeline_trainer(trainer: Any, meter: Meter, *, warm_up_steps: int = WARM_UP_STEPS) -> None:
    """Let `meter` follow the instructions of a `PipelineTrainer`'s schedule, and forget the first steps.

    Micro-batches interleave, so that a phase holds what the others of the step keep. Call it before `train()`.
    """
    meter_trainer(trainer, meter, warm_up_steps=warm_up_steps)
    # A schedule never calls it, and `PipelineTrainer` refuses an object that replaces it.
    vars(trainer).pop("compute_loss", None)
    training_step: Callable[..., Any] = trainer.training_step
    followed: list[Any] = []

    def metered_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(engine is other for other in followed):
            followed.append(engine)
            _follow(engine, meter)
        return training_step(engine, *args, **kwargs)

    trainer.training_step = metered_step


def _follow(engine: Any, meter: Meter) -> None:
    def entering(execute: Callable[..., Any], phase: MeterPhase) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            meter.enter(phase)
            return execute(self, *args, **kwargs)

        return run

    engine._INSTRUCTION_MAP = {
        instruction: entering(execute, _PHASES[instruction.__name__]) if instruction.__name__ in _PHASES else execute
        for instruction, execute in engine._INSTRUCTION_MAP.items()
    }
    loss_function: Callable[..., Any] = engine.module.loss_fn

    def metered_loss(*args: Any) -> Any:
        meter.enter("loss")
        return loss_function(*args)

    engine.module.loss_fn = metered_loss
