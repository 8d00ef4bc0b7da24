"""Settings of a plan and of the estimate of its run, for `plan` and the planner page."""

from __future__ import annotations

from pydantic import Field

from ..ds_configs.plan.plan import Plan
from ..ds_configs.search.run_estimates import RunCost, run_cost
from ..ds_configs.specs.errors import ConfigError
from ..ds_configs.specs.job import JobSettings
from ..ds_configs.specs.settings import Settings
from .settings import grouped


class RunQuestions(Settings):
    """Extent and price of a whole run."""

    group = "Run"

    tokens: float | None = Field(
        None, gt=0, description="Tokens to train on (e.g. 1e11); adds total time and GPU hours"
    )
    gpu_hour_price: float | None = Field(None, gt=0, description="Price of one accelerator per hour")


def question_errors(questions: RunQuestions) -> list[ConfigError]:
    """Return an error for a price without the tokens that it depends on."""
    price = questions.gpu_hour_price
    if price is None or questions.tokens is not None:
        return []
    return [ConfigError(where="gpu_hour_price", value=price, rule="needs tokens", fix="pass --tokens too")]


def run_estimate(plan: Plan, questions: RunQuestions) -> RunCost | None:
    """Return time and price of the run; `None` without a number of tokens."""
    if questions.tokens is None:
        return None
    price = questions.gpu_hour_price
    return run_cost(plan.chosen.time, plan.hardware, tokens=questions.tokens, gpu_hour_price=price)


@grouped
class PlanSettings(RunQuestions, JobSettings):
    """Every setting of a plan and of the estimate of its run."""

    group = "Run"
