"""`tune`: measure the best predicted layouts in short real runs, and keep the fastest."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import Field

from ..ds_configs.plan.out_of_memory import FIRST_WORDS
from ..ds_configs.plan.output import disk_errors, output_errors, reserved
from ..ds_configs.plan.plan import Plan, trial_dict, tuned_plan
from ..ds_configs.plan.rendering import planned_training_arguments
from ..ds_configs.search.search import Evaluated
from ..ds_configs.search.tuning import (
    NOISY_SPREAD,
    WARM_UP_STEPS,
    Trial,
    TrialOutcome,
    cannot_win,
    layouts_to_measure,
    measured,
    spread,
    with_other_micro_batch,
)
from ..ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ..ds_configs.specs.tasks import TASKS
from ..ds_configs.step_time.learning import MeasuredStep, published_time
from ..plugins.launching.launch import LaunchFailedError
from ..plugins.launching.messages import Message, Progress, log_message
from ..plugins.metering import start_meter
from ..plugins.planning import CalibrationStore, detect_hardware, own_release
from ..plugins.transformers.loading import gathered
from ..plugins.transformers.training_arguments import BYTE_COUNT
from .preferences.trainer import generation_errors, task_errors
from .reports.runs import REPORT_FILE, write_html
from .runs.inputs import PLANNED_DEVICE_FIX, is_without, launch_errors
from .runs.plan_callback import PlanCallback, RunOutOfMemoryError, memory_errors
from .runs.ranks import rank_arguments, write_json
from .runs.run import launch_job, write_samples
from .runs.settings import RESULT_FILE, TRAIN_SAMPLES, RankTask
from .training.synthetic import synthetic_trainer, task_rows

logger = logging.getLogger(__name__)

_NO_OUTPUT: dict[str, Any] = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "load_best_model_at_end": False,
    "report_to": "none",
    "push_to_hub": False,
    "disable_tqdm": True,
}
"""Values of `TrainingArguments` for a run that only times steps."""
_IDLE_SECONDS = 300.0
"""Longest time in which a rank may neither compute nor end; DeepSpeed compiles operators while other ranks wait."""


class TrialTask(RankTask):
    """A few steps under one layout, on every rank."""

    task: Literal["tune"] = "tune"
    plan: str = Field(description="directory of the trial's plan")
    steps: int = Field(description="timed steps")
    best_seconds: float | None = Field(description="median step of the best trial so far; null before the first")

    @property
    def hang_seconds(self) -> float | None:
        return _IDLE_SECONDS

    def run(self, work: Path) -> None:
        """Train on this rank; the first one writes the step times and the largest peak of all ranks."""
        import torch
        from datasets import load_from_disk

        plan, trial = Plan.load(self.plan), self
        meter, metered = start_meter(), ExitStack()

        class TrialClock(PlanCallback):
            """Ends a training that cannot win: ranks wait for the accelerator at the end of each step, and agree."""

            slowest: list[float]

            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                super().on_train_begin(args, state, control, **kwargs)
                self.slowest = []

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                super().on_step_end(args, state, control, **kwargs)
                self.slowest.append(max(gathered(self.steps.read(waits=True)[-1])))
                timed = self.slowest[WARM_UP_STEPS:]
                if len(self.slowest) == WARM_UP_STEPS:
                    # Counting the tensors of CPU ranks slows every operator.
                    metered.close()
                elif cannot_win(timed, steps=trial.steps, best_seconds=trial.best_seconds):
                    control.should_training_stop = True

            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                peak = max(gathered(self.peak_bytes()))
                if args.process_index == 0:
                    result = {"step_seconds": self.slowest[WARM_UP_STEPS:], "peak_allocated_bytes": peak}
                    write_json(result, work / RESULT_FILE)

        with memory_errors(plan), metered:
            metered.enter_context(meter)
            clock = TrialClock(plan, meter=meter)
            job, steps = plan.job, WARM_UP_STEPS + self.steps
            settings = planned_training_arguments(plan) | _NO_OUTPUT
            settings |= {"output_dir": str(work / "output"), "max_steps": steps}
            arguments, engine = rank_arguments(settings, method=job.method, task=job.task)
            if arguments.world_size != plan.hardware.world_size:
                raise ShardwrightError(
                    f"{arguments.world_size} ranks started, but the plan has {plan.hardware.world_size}"
                )
            vocab_size = plan.model.dimensions.vocab_size

            class RandomTokens(torch.utils.data.Dataset[dict[str, Any]]):
                def __len__(self) -> int:
                    return steps * plan.chosen.layout.global_batch_size

                def __getitem__(self, index: int) -> dict[str, Any]:
                    draw = torch.Generator().manual_seed(index)
                    tokens_T = torch.randint(vocab_size, (job.seq_len_tokens,), generator=draw)
                    return {"input_ids": tokens_T, "labels": tokens_T}

            is_sft = job.task == "sft"
            samples = RandomTokens() if is_sft else load_from_disk(str(work / TRAIN_SAMPLES))
            # 4-bit weights are quantized while they are loaded, so that random ones do not exist. TRL and vLLM load
            # the reference and the weights that generate by their name.
            random_weights = is_sft and job.method != "qlora"
            trainer = synthetic_trainer(plan, arguments, engine, samples, random_weights=random_weights)
            trainer.add_callback(clock)
            trainer.train()
            # A rank that exits while others communicate makes gloo abort them.
            trainer.accelerator.wait_for_everyone()
            trainer.accelerator.end_training()


DEFAULT_TRIALS, DEFAULT_STEPS, TIME_LIMIT_MINUTES = 5, 5, 30.0
FEWEST_STEPS = 3
"""Fewer steps have no meaningful median and spread."""


def tune(
    plan: str | Path | Plan,
    *,
    trials: int = DEFAULT_TRIALS,
    steps: int = DEFAULT_STEPS,
    time_limit_minutes: float = TIME_LIMIT_MINUTES,
    output_dir: str | Path | None = None,
    force: bool = False,
    command: str = "",
) -> Plan:
    """Measure the best predicted layouts in short real runs, and return the plan of the fastest.

    Every trial runs on all ranks of the plan, with random weights and tokens. The result has each trial in `trials`,
    beside its prediction, and the reason. `output_dir` gets the plan's files and a report. The step times correct later
    plans for this kind of accelerator.

    Args:
        plan: A plan, or the directory that `shardwright plan` wrote.
        trials: Maximum number of layouts to measure; the plan's own layout is the first.
        steps: Timed steps of each trial, after two others.
        time_limit_minutes: No trial runs longer. One trial may take half of what remains, the last one all of it.
        output_dir: Directory for the result; `None` writes nothing.
        force: Whether to write into a directory with other files.
        command: Command line for the report.

    Raises:
        UsageError: a value is invalid, or this machine does not have the planned accelerators.
        ShardwrightError: no trial was measured; has the reason of each.

    >>> tune("plan").trials  # doctest: +SKIP
    """
    deadline = time.monotonic() + 60 * time_limit_minutes
    target = None if output_dir is None else Path(output_dir)
    errors = []
    if trials < 1:
        errors.append(ConfigError(where="trials", value=trials, rule="must be at least 1"))
    if steps < FEWEST_STEPS:
        rule = f"must be at least {FEWEST_STEPS}, for a median"
        errors.append(ConfigError(where="steps", value=steps, rule=rule))
    if not time_limit_minutes > 0:
        errors.append(ConfigError(where="time_limit", value=time_limit_minutes, rule="must be more than 0 minutes"))
    if errors:
        raise UsageError(errors)
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    hardware = plan.hardware
    if hardware.nodes > 1:
        rule, fix = "trials run on one machine", "tune a plan for one of them (--hardware local)"
        errors.append(ConfigError(where="hardware", value=hardware.name, rule=rule, fix=fix))
    elif unfit := launch_errors(hardware, device_fix=PLANNED_DEVICE_FIX):
        errors += unfit
    elif hardware.gpu != "CPU" and (here := detect_hardware().gpu) != hardware.gpu:
        rule, fix = f"this machine has {here}", "plan again with --hardware local"
        errors.append(ConfigError(where="hardware", value=hardware.name, rule=rule, fix=fix))
    if plan.job.images_per_sample:
        rule, fix = "is not measured: the samples of trials are text", "measure a short `shardwright train --max-steps`"
        errors.append(ConfigError(where="images_per_sample", value=plan.job.images_per_sample, rule=rule, fix=fix))
    if plan.job.task == "sft":
        for second in plan.job.second_models:
            rule = "is not loaded by trials"
            errors.append(ConfigError(where=second.role, value=second.spec.name, rule=rule, fix="plan without it"))
    else:
        job, name = plan.job, plan.model.name
        errors += [error for error in task_errors(job.task, reward=None) if error.where == "task"]
        errors += generation_errors(plan)
        if job.generation == "vllm-server":
            rule, fix = "needs a server, which trials do not start", "measure a short `shardwright train --max-steps`"
            errors.append(ConfigError(where="generation", value=job.generation, rule=rule, fix=fix))
        if (count := job.steps_per_generation) and count > plan.chosen.layout.gradient_accumulation_steps:
            rule = "gives steps with and without generation, of which trials have one time"
            fix = "plan without --steps-per-generation"
            errors.append(ConfigError(where="steps_per_generation", value=count, rule=rule, fix=fix))
        if plan.model.dimensions.vocab_size <= BYTE_COUNT:
            rule = f"must be more than {BYTE_COUNT}, for the tokens of trials"
            errors.append(ConfigError(where="vocab_size", value=plan.model.dimensions.vocab_size, rule=rule))
        if is_without(Path(name), ["*.safetensors"]):
            rule, fix = f"has no weights, from which task {job.task} starts", "plan for a trained model"
            errors.append(ConfigError(where="model", value=name, rule=rule, fix=fix))
    if plan.model.task != "causal_lm":
        rule, fix = "is no causal language model; trials train only these", "measure your script: shardwright launch"
        errors.append(ConfigError(where="model", value=plan.model.architecture, rule=rule, fix=fix))
    own_files = (REPORT_FILE, "ds_config.json", *plan.file_names)
    if target is not None:
        errors += output_errors(target, force=force, sources={"the model": plan.model.name}, own=own_files)
        errors = errors or disk_errors(target)
    if errors:
        raise UsageError(errors)
    plan = replace(plan, trials=())
    if target is None:
        return _measure_all(plan, trials, steps, deadline, time_limit_minutes)
    with reserved(target, force=force, own=own_files):
        tuned = replace(_measure_all(plan, trials, steps, deadline, time_limit_minutes), command=command)
        (target / "ds_config.json").unlink(missing_ok=True)
        tuned.write(target, force=True)
        write_html(target)
    return tuned


def _measure_all(plan: Plan, most: int, steps: int, deadline: float, limit_minutes: float) -> Plan:
    """Run the trials, and return the plan of the fastest layout."""
    layouts = layouts_to_measure(plan.chosen, plan.rejected, trials=most)
    trials: list[Trial] = []
    other: Evaluated | None = None
    # One more is appended below.
    for index, layout in enumerate(layouts):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            logger.info(f"the time limit is over after {index} of {len(layouts)} layouts")
            break
        best_seconds = min((done.step_seconds for done in measured(trials) if done.step_seconds), default=None)
        # A trial that hangs must leave time for the others.
        timeout = remaining if layout is layouts[-1] else remaining / 2
        try:
            trial = _run_trial(plan, layout, steps, best_seconds, timeout, f"layout {index + 1} of {len(layouts)}")
        except (KeyboardInterrupt, SystemExit):
            logger.info(f"stopped during layout {index + 1} of {len(layouts)}: no plan is written")
            raise
        logger.info(f"{trial.name}: {_result(trial)}")
        trials.append(trial)
        if index + 1 == len(layouts) < most and layout is not other and measured(trials):
            key = measured(trials)[0].key
            best = next(candidate for candidate in layouts if (candidate.layout, candidate.loss) == key)
            if other := with_other_micro_batch(best, plan.model, plan.hardware, plan.job):
                layouts.append(other)
                plan = replace(plan, rejected=(*plan.rejected, other))
        if trial.outcome != "measured" or trial.step_seconds is None:
            continue
        if TASKS[plan.job.task].generates:
            continue
        # The step time corrects later plans, which that of decoding would distort.
        content = json.dumps([plan.model.name, plan.model.revision, trial_dict(trial)], sort_keys=True)
        step = MeasuredStep(
            identifier=hashlib.sha256(content.encode()).hexdigest(),
            gpu=plan.hardware.gpu,
            engine=trial.layout.engine,
            model=plan.model.name,
            layout=trial.layout.label,
            ranks=plan.hardware.world_size,
            predicted_seconds=published_time(layout.time).seconds,
            measured_seconds=trial.step_seconds,
            flops_per_s=plan.hardware.flops_per_s,
            release=own_release(),
        )
        try:
            CalibrationStore().add(step)
        except ShardwrightError as error:
            logger.info(f"the step time does not correct later plans: {error}")
    complete = measured(trials)
    if not complete:
        reasons = "\n".join(f"{trial.name}: {_result(trial)}" for trial in trials)
        stopped = all(trial.outcome == "stopped" for trial in trials)
        limit = f"raise --time-limit above {limit_minutes:g} minutes, or " if stopped else ""
        raise ShardwrightError(
            f"no layout was measured: {limit}test the files with `shardwright rehearse`\n{reasons}".rstrip()
        )
    if (complete[0].spread or 0.0) > NOISY_SPREAD:
        share = f"{100 * (complete[0].spread or 0.0):.0f} %"
        logger.info(f"step times of the fastest layout vary by {share}: another job may use this machine")
    return tuned_plan(plan, tuple(trials))


def _run_trial(
    plan: Plan, candidate: Evaluated, steps: int, best_seconds: float | None, timeout_seconds: float, what: str
) -> Trial:
    """Launch the ranks of one layout; whatever happens to them is its result."""
    job = replace(plan.job, loss=candidate.loss)
    # All layouts of a plan have the second models where the chosen one has them.
    candidate = replace(candidate, placements=plan.chosen.placements)
    plan = replace(plan, job=job, chosen=candidate, rejected=())
    trial = Trial(
        layout=candidate.layout,
        loss=candidate.loss,
        outcome="failed",
        predicted_seconds=candidate.time.seconds,
        predicted_allocated_bytes=candidate.memory.gpu.allocated_bytes,
    )

    def on_message(message: Message) -> None:
        if isinstance(message, Progress):
            message = replace(message, what=f"{what}, {trial.name}: step")
        log_message(message)

    def ended(outcome: TrialOutcome, detail: str) -> Trial:
        return replace(trial, outcome=outcome, detail=detail, wall_seconds=time.monotonic() - started)

    log_message(Progress(what=f"{what}, {trial.name}: starting", done=0, total=WARM_UP_STEPS + steps))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardwright-trial-", ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        plan_directory = work / "plan"
        try:
            plan.write(plan_directory)
            if job.task != "sft":
                rows = task_rows(plan, (WARM_UP_STEPS + steps) * candidate.layout.global_batch_size)
                write_samples(rows, work / TRAIN_SAMPLES)
            task = TrialTask(plan=str(plan_directory), steps=steps, best_seconds=best_seconds)
            result = launch_job(
                task, plan, plan_directory, work, timeout_seconds=timeout_seconds, on_message=on_message
            )
        except LaunchFailedError as error:
            if error.exit_code == RunOutOfMemoryError.exit_code and FIRST_WORDS in str(error):
                return ended("out of memory", _first_line(error))
            if error.launcher_exit_code is None:
                return ended("stopped", f"did not end within {timeout_seconds:.0f} s")
            return ended("failed", _first_line(error))
        except (ShardwrightError, OSError, ValueError) as error:
            return ended("failed", _first_line(error))
    timed = result.get("step_seconds")
    if not timed:
        return ended("failed", f"the training ended within {WARM_UP_STEPS} steps; pass more data")
    return replace(
        trial,
        outcome="measured" if len(timed) >= steps else "slower",
        step_seconds=median(timed),
        spread=spread(timed),
        steps=len(timed),
        peak_allocated_bytes=result["peak_allocated_bytes"],
        wall_seconds=time.monotonic() - started,
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _result(trial: Trial) -> str:
    if trial.step_seconds is None:
        return f"{trial.outcome}: {trial.detail}"
    early = ", ended early because it is slower" if trial.outcome == "slower" else ""
    return f"{trial.step_seconds:.3g} s per step, {trial.predicted_seconds:.3g} s predicted{early}"
