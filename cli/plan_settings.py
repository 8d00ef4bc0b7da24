"""Settings of a plan, and questions about the whole run with their answers, for `plan` and the planner page."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import Field

from ..ds_configs.plan.plan import Plan
from ..ds_configs.search.candidates import SearchContext
from ..ds_configs.search.run_estimates import (
    checkpoint_interval_seconds,
    lost_to_failures,
    parse_duration,
    plain_batch_sizes,
    run_cost,
    smallest_for_deadline,
)
from ..ds_configs.search.search import search
from ..ds_configs.specs.errors import ConfigError, UsageError, collecting
from ..ds_configs.specs.hardware import HardwareSpec
from ..ds_configs.specs.job import LossImplementation, Method, ObjectiveName, Precision
from ..ds_configs.specs.settings import (
    HardwareSettings,
    KernelSettings,
    LayoutSettings,
    Settings,
    TeacherPlacementSettings,
    TrainingSettings,
)
from ..ds_configs.step_time.estimate import StepTime
from ..ds_configs.step_time.learning import learned_factors, scaled_time
from .settings import grouped


class RunQuestions(Settings):
    """Questions about a whole run."""

    group = "Run"

    tokens: float | None = Field(None, gt=0, description="Tokens to train on (e.g. 1e11); adds total time and cost")
    deadline: str | None = Field(
        None, description="Deadline for these tokens (e.g. 5d); reports the accelerators needed"
    )
    gpu_hour_price: float | None = Field(None, gt=0, description="Price of one accelerator per hour")
    save_seconds: float | None = Field(
        None, gt=0, description="Seconds to save a checkpoint; reports how often to save"
    )
    mtbf_hours: float | None = Field(
        None, gt=0, description="Mean hours between failures. Default: 50,000 / number of accelerators"
    )


def question_errors(questions: RunQuestions) -> list[ConfigError]:
    """Return an error for each question without the setting that it depends on, and for an invalid duration."""
    errors = [
        ConfigError(
            where=name,
            value=getattr(questions, name),
            rule=f"needs {other}",
            fix=f"pass --{other.replace('_', '-')} too",
        )
        for name, other in (("deadline", "tokens"), ("gpu_hour_price", "tokens"), ("mtbf_hours", "save_seconds"))
        if getattr(questions, name) is not None and getattr(questions, other) is None
    ]
    if questions.deadline is not None:
        with collecting(errors):
            parse_duration(questions.deadline)
    return errors


def answers(plan: Plan, questions: RunQuestions) -> dict[str, Any]:
    """Return the answers to the questions, as JSON values.

    Raises:
        ShardwrightError: no cluster meets the deadline.
    """
    values: dict[str, Any] = {}
    batch, job = plan.job.global_batch_size, plan.job
    has_requested_axes = any((size or 1) > 1 for size in job.axis_sizes.values())
    if batch is not None and plan.chosen.strategy.axes and not has_requested_axes:
        # The requested batch may be impossible with plain data parallelism.
        micro = job.micro_batch_size or 1
        sizes = plain_batch_sizes(global_batch_size=batch, ranks=plan.hardware.world_size, micro_batch_size=micro)
        if sizes and batch not in sizes:
            values["plain_batch_sizes"] = list(sizes)
    if questions.tokens is not None:
        cost = run_cost(
            plan.chosen.time, plan.hardware, tokens=questions.tokens, gpu_hour_price=questions.gpu_hour_price
        )
        values["run"] = asdict(cost) | {"text": str(cost)}
        if questions.deadline is not None:

            def solve(cluster: HardwareSpec) -> StepTime | None:
                try:
                    chosen = search(
                        SearchContext(model=plan.model, hardware=cluster, job=plan.job), compare=False
                    ).chosen
                except UsageError:
                    # These ranks do not divide the batch.
                    return None
                # Measured runs correct every cluster alike.
                return None if chosen is None else scaled_time(chosen.time, learned_factors(plan.chosen.time))

            seconds, price = parse_duration(questions.deadline), questions.gpu_hour_price
            answer = smallest_for_deadline(
                plan.hardware, solve, tokens=questions.tokens, deadline_seconds=seconds, gpu_hour_price=price
            )
            values["deadline"] = {
                "seconds": seconds,
                "hardware": answer.hardware.name,
                "gpus": answer.hardware.world_size,
                "run": asdict(answer.cost) | {"text": str(answer.cost)},
            }
    if questions.save_seconds is not None:
        size = plan.hardware.world_size
        times = {"save_seconds": questions.save_seconds, "world_size": size, "mtbf_hours": questions.mtbf_hours}
        interval = checkpoint_interval_seconds(**times)  # type: ignore[arg-type]
        values["checkpoints"] = {
            "interval_seconds": interval,
            "interval_steps": max(1, round(interval / plan.chosen.time.seconds)),
            "lost_share": lost_to_failures(**times),  # type: ignore[arg-type]
        }
    return values


def shown_answers(values: dict[str, Any]) -> list[str]:
    """Return the answers as lines for people."""
    lines = []
    if "plain_batch_sizes" in values:
        sizes = " or ".join(map(str, values["plain_batch_sizes"]))
        lines.append(f"A global batch of {sizes} would run with plain data parallelism.")
    if "run" in values:
        lines.append(f"The run: {values['run']['text']}.")
    if "deadline" in values:
        lines.append(f"For the deadline: {values['deadline']['hardware']}, where {values['deadline']['run']['text']}.")
    if "checkpoints" in values:
        saved = values["checkpoints"]
        minutes, steps = saved["interval_seconds"] / 60, saved["interval_steps"]
        lines.append(
            f"Save every {minutes:.0f} minutes, {steps:,} steps (Young, Daly): saving and failures cost "
            f"{saved['lost_share']:.1%} of the time."
        )
    return lines


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
    objective: ObjectiveName = Field(
        "throughput", description="Select by tokens/s, tokens per GPU hour, or free memory"
    )
    teacher: str | None = Field(None, description="Frozen teacher model for distillation")

    def words(self, *, hardware_is_read: bool = False) -> dict[str, Any]:
        """Return the explicitly set values as keywords of `plan`, optionally without those about the hardware."""
        others = {"hardware"}
        if hardware_is_read:
            others |= {*HardwareSettings.model_fields, "num_processes"}
        known = set(JobSettings.model_fields) - others
        return {name: value for name, value in self.stated().items() if name in known}


@grouped
class PlanSettings(RunQuestions, JobSettings):
    """Every setting of a plan, and questions about its run."""

    group = "Run"
