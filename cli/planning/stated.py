"""Settings of a plan as people state them, and the plan that they make: what `plan` and the page share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.hardware import HardwareSpec
from ...ds_configs.specs.job import LossImplementation, Method, ObjectiveName, Precision
from ...ds_configs.specs.settings import (
    HardwareSettings,
    LayoutSettings,
    TeacherPlacementSettings,
    TrainingSettings,
)
from ..settings import grouped
from .run_questions import RunQuestions

if TYPE_CHECKING:
    from ...plugins.planning.models import LoadedModel


@grouped
class PlanSettings(RunQuestions, LayoutSettings, TeacherPlacementSettings, TrainingSettings, HardwareSettings):
    """Every setting of a plan."""

    group = "Training"

    seq_len: int | None = Field(
        None, description="Tokens of one training sequence; without it 4096, or what the model has positions for"
    )
    num_processes: int | None = Field(None, ge=1, description="Accelerators, when the hardware names only their kind")
    precision: Precision = Field("bf16", description="Compute precision; bf16 and fp16 keep fp32 master weights")
    method: Method = Field("full", description="Full training, LoRA, or QLoRA")
    loss: LossImplementation = Field(
        "auto", description="chunked never materialises the logits of all tokens; auto where that is faster"
    )
    objective: ObjectiveName = Field(
        "throughput", description="What the plan is chosen for: tokens/s, tokens for each GPU hour, or free memory"
    )
    teacher: str | None = Field(None, description="A frozen second model for distillation")


def plan_stated(
    model: str | LoadedModel,
    hardware: str | HardwareSpec,
    settings: PlanSettings,
    *,
    notify: Callable[[str], None],
    calibration: bool = True,
    trace_activations: bool = False,
    offers: bool = True,
    loaded: Mapping[str, Any] = MappingProxyType({}),
) -> Plan:
    """Return the plan for a model on some hardware with the settings that somebody stated.

    Args:
        model: As `plan` takes it.
        hardware: Likewise; a specification already holds what settings of hardware state.
        settings: The others; what was not stated is left to `plan`.
        notify: Gets remarks while planning.
        calibration: Whether stored runs of this user narrow the memory interval.
        trace_activations: Whether a model without stored coefficients is traced.
        offers: Whether changes of the training's numbers are searched for what would be faster.
        loaded: Settings in the place of those that name something to be read, such as a teacher.

    Raises:
        UsageError: a name, value or combination cannot be used.
        RefusedInputError: the model's files are corrupt, absurd or unsafe.
        PlanDoesNotFitError: no layout fits.
    """
    from ...plugins.planning.from_names import plan

    others = {"hardware", *RunQuestions.model_fields}
    if isinstance(hardware, HardwareSpec):
        others |= {*HardwareSettings.model_fields, "num_processes"}
    known = set(PlanSettings.model_fields) - others
    stated = {name: value for name, value in settings.stated().items() if name in known}
    return plan(
        model,
        hardware,
        calibration="user" if calibration else None,
        trace_activations=trace_activations,
        offers=offers,
        notify=notify,
        **(stated | dict(loaded)),
    )
