"""`StepInputs`: what every part of a step's time depends on."""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from .model_work import Device, ModelWork
from .rates import GpuConstants, Software


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """Inputs of every part of a step."""

    layout: Layout
    model: ModelSpec
    hardware: HardwareSpec
    job: TrainingJob
    software: Software
    constants: GpuConstants
    device: Device
    work: ModelWork
    tokens: float
    """Of a micro-batch on a rank, with sequences split by sequence and context parallelism."""
