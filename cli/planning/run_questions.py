"""Answers of `plan` beside a layout: length, price and energy of a run, the cluster for a deadline, when to save."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import Field

from ...ds_configs.plan.plan import Plan
from ...ds_configs.search.choice import search
from ...ds_configs.search.questions import (
    DeadlineAnswer,
    checkpoint_interval_seconds,
    lost_to_failures,
    parse_duration,
    plain_batch_sizes,
    run_cost,
    smallest_for_deadline,
)
from ...ds_configs.specs.errors import Fault, UsageError
from ...ds_configs.specs.hardware import HardwareSpec
from ...ds_configs.specs.settings import Settings
from ...ds_configs.step_time.estimate import StepTime


class RunQuestions(Settings):
    """Questions about a whole run."""

    group = "Run"

    tokens: float | None = Field(
        None, gt=0, description="Tokens to train on, such as 1e11: how long, and what it takes"
    )
    deadline: str | None = Field(
        None, description="Time for these tokens, such as 5d: how many of these accelerators it takes"
    )
    gpu_hour_price: float | None = Field(None, gt=0, description="Price of one accelerator for an hour")
    save_seconds: float | None = Field(None, gt=0, description="Time to save a checkpoint: how often to save one")
    mtbf_hours: float | None = Field(
        None, gt=0, description="Mean hours between failures of the whole run. Default: 50,000 over the accelerators"
    )


def question_faults(asked: RunQuestions) -> None:
    """Check questions before anything is planned.

    Raises:
        UsageError: a question lacks what it depends on, or a duration cannot be read; all faults together.
    """
    faults = [
        Fault(
            where=name, value=getattr(asked, name), rule=f"needs {other}", fix=f"give --{other.replace('_', '-')} too"
        )
        for name, other in (("deadline", "tokens"), ("gpu_hour_price", "tokens"), ("mtbf_hours", "save_seconds"))
        if getattr(asked, name) is not None and getattr(asked, other) is None
    ]
    if asked.deadline is not None:
        try:
            parse_duration(asked.deadline)
        except UsageError as error:
            faults += error.faults
    if faults:
        raise UsageError(faults)


def answers(plan: Plan, asked: RunQuestions) -> dict[str, Any]:
    """Return the answers to the questions that were asked, as JSON values.

    Raises:
        ShardwrightError: no cluster meets the deadline.
    """
    found: dict[str, Any] = {}
    batch = _plain_batches(plan)
    if batch:
        found["plain_batch_sizes"] = list(batch)
    if asked.tokens is not None:
        cost = run_cost(plan.chosen.time, plan.hardware, tokens=asked.tokens, gpu_hour_price=asked.gpu_hour_price)
        found["run"] = asdict(cost) | {"text": str(cost)}
        if asked.deadline is not None:
            answer = _deadline(plan, asked, asked.tokens)
            found["deadline"] = {
                "seconds": parse_duration(asked.deadline),
                "hardware": answer.hardware.name,
                "gpus": answer.hardware.world_size,
                "run": asdict(answer.cost) | {"text": str(answer.cost)},
            }
    if asked.save_seconds is not None:
        size = plan.hardware.world_size
        times = {"save_seconds": asked.save_seconds, "world_size": size, "mtbf_hours": asked.mtbf_hours}
        interval = checkpoint_interval_seconds(**times)  # type: ignore[arg-type]
        found["checkpoints"] = {
            "interval_seconds": interval,
            "interval_steps": max(1, round(interval / plan.chosen.time.seconds)),
            "lost_share": lost_to_failures(**times),  # type: ignore[arg-type]
        }
    return found


def _deadline(plan: Plan, asked: RunQuestions, tokens: float) -> DeadlineAnswer:
    assert asked.deadline is not None

    def solve(cluster: HardwareSpec) -> StepTime | None:
        try:
            chosen = search(plan.model, cluster, plan.job).chosen
        except UsageError:
            # A batch that these ranks do not divide.
            return None
        return None if chosen is None else chosen.time

    return smallest_for_deadline(
        plan.hardware,
        solve,
        tokens=tokens,
        deadline_seconds=parse_duration(asked.deadline),
        gpu_hour_price=asked.gpu_hour_price,
    )


def _plain_batches(plan: Plan) -> tuple[int, ...]:
    """Return the nearest batches that plain data parallelism divides, where the asked one is none."""
    batch, job = plan.job.global_batch_size, plan.job
    if batch is None or not plan.chosen.strategy.axes or any((size or 1) > 1 for size in job.axis_sizes.values()):
        return ()
    micro = job.micro_batch_size or 1
    found = plain_batch_sizes(global_batch_size=batch, ranks=plan.hardware.world_size, micro_batch_size=micro)
    return () if batch in found else found


def shown_answers(found: dict[str, Any]) -> list[str]:
    """Return the answers as lines for people."""
    lines = []
    if "plain_batch_sizes" in found:
        sizes = " or ".join(map(str, found["plain_batch_sizes"]))
        lines.append(f"A global batch of {sizes} would run under plain data parallelism.")
    if "run" in found:
        lines.append(f"The run: {found['run']['text']}.")
    if "deadline" in found:
        lines.append(f"For the deadline: {found['deadline']['hardware']}, where {found['deadline']['run']['text']}.")
    if "checkpoints" in found:
        saved = found["checkpoints"]
        minutes, steps = saved["interval_seconds"] / 60, saved["interval_steps"]
        lines.append(
            f"Save every {minutes:.0f} minutes, {steps:,} steps (Young, Daly): saving and failures cost "
            f"{saved['lost_share']:.1%} of the time."
        )
    return lines
