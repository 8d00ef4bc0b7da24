"""Rules of preference and reinforcement learning tasks."""

from __future__ import annotations

from collections.abc import Iterator

from ..specs.errors import ConfigError
from ..specs.hardware import HardwareSpec
from ..specs.job import GROUPED_TASKS, TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from ..specs.tasks import TASKS

Errors = Iterator[ConfigError]


def second_models_follow_the_engine(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> Errors:
    """TRL shards second models under ZeRO-3 and FSDP2 and copies them to every rank under other engines.

    `prepare_deepspeed` and `prepare_fsdp` of trl 1.16.0, models/utils.py. A reference can also be the trained model
    without its adapters, or have been computed ahead for a fixed dataset. FSDP2 does not shard a reward model, and a
    task that generates loads its reference itself, which under FSDP2 only the first rank would have.
    """
    if TASKS[job.task].head == "model":
        return
    for second in job.second_models:
        is_fsdp2 = layout.engine == "fsdp2"
        sharded = layout.zero_stage == 3 or (is_fsdp2 and second.role != "reward")
        engine = "ZeRO-3 and FSDP2" if sharded else "this engine"
        placed = "sharded" if sharded else "replica"
        if is_fsdp2 and second.role == "reference" and job.task in GROUPED_TASKS:
            if second.planned_placement != "shared":
                rule = f"is not supported with a reference of task {job.task}, whose weights only the first rank has"
                yield ConfigError(where="strategy", value="fsdp2", rule=rule, fix="use ZeRO-3, adapters, or --beta 0")
            continue
        allowed = {placed, "layout" if second.trained else placed}
        if second.role == "reference":
            allowed.add("shared")
            if not TASKS[job.task].generates and not is_fsdp2:
                # Under FSDP2 TRL needs a reference to compute them, and keeps it.
                allowed.add("cached")
        if second.planned_placement not in allowed:
            rule = f"is not how TRL places a {second.role} under {engine}"
            others = [name for name in ("cached",) if name in allowed]
            fix = f"use {' or '.join([placed, *others])}"
            yield ConfigError(where=f"{second.role}_placement", value=second.planned_placement, rule=rule, fix=fix)


def groups_are_complete(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """A generation has complete groups of completions: `num_generations` divides it (trl 1.16.0, grpo_config.py)."""
    if job.task not in GROUPED_TASKS:
        return
    steps = job.steps_per_generation or layout.gradient_accumulation_steps
    completions = layout.micro_batch_size * layout.data_parallel_size * steps
    if completions % job.generations:
        rule = (
            f"must divide the {completions} completions of a generation: micro-batch {layout.micro_batch_size} * "
            f"data-parallel ranks {layout.data_parallel_size} * steps per generation {steps}"
        )
        fix = "use another --num-generations, --global-batch-size or --steps-per-generation"
        yield ConfigError(where="num_generations", value=job.generations, rule=rule, fix=fix)


def losses_read_whole_heads(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Tasks run no pipeline and no context parallelism: TRL's trainers have neither."""
    if TASKS[job.task].head == "model":
        return
    for axis in ("pp", "cp"):
        if axis in layout.axes:
            rule = f"is not supported with task {job.task}, whose trainer has none"
            yield ConfigError(where=axis, value=layout.axes[axis], rule=rule, fix=f"use {axis} = 1")
