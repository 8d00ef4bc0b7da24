"""Settings of a plan and of the estimate of its run, for `plan` and the planner page."""

from __future__ import annotations

from pydantic import Field

from ..ds_configs.specs.job import JobSettings
from .settings import grouped


@grouped
class PlanSettings(JobSettings):
    """Every setting of a plan and of the estimate of its run."""

    group = "Run"

    tokens: float | None = Field(
        None, gt=0, description="Tokens to train on (e.g. 1e11); adds total time and GPU hours"
    )
