"""Settings of a plan and of the estimate of its run, for `plan` and the planner page."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ..ds_configs.specs.job import LossImplementation, Method, ObjectiveName, Precision
from ..ds_configs.specs.settings import (
    HardwareSettings,
    KernelSettings,
    LayoutSettings,
    TeacherPlacementSettings,
    TrainingSettings,
)
from .settings import grouped


class JobSettings(KernelSettings, LayoutSettings, TeacherPlacementSettings, TrainingSettings, HardwareSettings):
    """Settings from which a plan is made."""

    group = "Training"

    seq_len: int | None = Field(
        None, description="Tokens of a sequence (16k = 16,384). Default: 4096, or the model's maximum"
    )
    num_processes: int | None = Field(None, ge=1, description="Accelerators, if --hardware names only their type")
    precision: Precision = Field(
        "bf16", description="Compute precision, with fp32 master weights; fp8 needs Ada or later"
    )
    method: Method = Field("full", description="Full training, LoRA, or QLoRA")
    loss: LossImplementation = Field(
        "auto", description="Loss computation; chunked never stores the logits of all tokens"
    )
    objective: ObjectiveName = Field("throughput", description="Select by tokens/s or free memory")
    teacher: str | None = Field(None, description="Frozen teacher model for distillation")

    def words(self, *, hardware_is_read: bool = False) -> dict[str, Any]:
        """Return the explicitly set values as keywords of `plan`, optionally without those about the hardware."""
        others = {"hardware"}
        if hardware_is_read:
            others |= {*HardwareSettings.model_fields, "num_processes"}
        known = set(JobSettings.model_fields) - others
        return {name: value for name, value in self.stated().items() if name in known}


@grouped
class PlanSettings(JobSettings):
    """Every setting of a plan and of the estimate of its run."""

    group = "Run"

    tokens: float | None = Field(
        None, gt=0, description="Tokens to train on (e.g. 1e11); adds total time and GPU hours"
    )
