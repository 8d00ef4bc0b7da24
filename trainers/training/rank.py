"""Ranks of `train` and `launch`, and `trainer_for`: prepare the process and the Trainer for the layout of the plan."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.layout import Layout
from ...ds_configs.specs.tasks import TASKS
from ...plugins import patches
from ...plugins.accelerate import configure_cpu_ranks, repeated_samples, serve_scripts_on_cpu_ranks
from ...plugins.deepspeed.engine import refuse_run_effects
from ...plugins.launching.messages import note_on_first_rank
from ...plugins.transformers.training_arguments import (
    accept_muon,
    deepspeed_configuration,
    prepare_model_directory_save,
    save_model_directory,
    training_arguments,
)
from ...plugins.trl import task_of, train_as_one_process
from ..checkpoints import checked_checkpoint
from ..counting.counts import OwnLoss
from ..exact import make_exact
from ..parallel.planned import (
    PlannedParallelism,
    attach_long_sequences,
    check_balance_of_batches,
    check_learned_positions,
    planned_parallelism,
)
from ..preferences.trainer import evaluated, limited_reward, task_trainer
from ..runs.plan_callback import PlanCallback, argument_differences, keep_planned_memory, memory_errors
from ..runs.ranks import (
    RankContext,
    TrainingTask,
    check_upstream,
    chosen_engine,
    held_out_cross_entropy,
    read_logged,
    starting_weights,
    trained_model,
)
from ..runs.settings import RankTask
from .settings import ScriptJob, TrainJob

BEFORE = "held_out_cross_entropy_before"
"""Name in the Trainer's log, which checkpoints contain, so that resumed runs have it."""


class TrainTask(TrainJob, TrainingTask):
    def build(self, context: RankContext) -> Any:
        from transformers import TrainerCallback

        prepare_model_directory_save(context.arguments)
        plan, is_sft = context.plan, self.settings.task == "sft"
        if is_sft:
            parallelism = planned_parallelism(plan)
            trainer = parallelism.make_trainer(
                model=trained_model(self.model, self.settings, context, for_stages=parallelism.is_pipeline),
                revision=self.settings.revision,
                **context.trainer_arguments(),
            )
        else:
            train_dataset, eval_dataset = context.samples
            trainer = task_trainer(
                plan,
                context.arguments,
                context.engine,
                name=self.model,
                revision=self.settings.revision,
                reward=limited_reward(self.settings.reward, self.settings.hang_seconds),
                model=trained_model(self.model, self.settings, context, score_head=plan.job.task == "reward"),
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=context.tokenizer,
            )

        class EvaluateBeforeTraining(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step:
                    return
                if not is_sft:
                    trainer.evaluate()
                elif (loss := held_out(trainer, plan.chosen.layout)) is not None:
                    trainer.log({BEFORE: loss})

        trainer.add_callback(EvaluateBeforeTraining())
        return trainer

    def metrics(self, trainer: Any, context: RankContext) -> dict[str, Any]:
        if self.settings.task != "sft":
            trainer.evaluate()
            evaluations = {"before": evaluated(trainer, first=True), "after": evaluated(trainer, first=False)}
            self._save(trainer)
            return {"before": None, "after": None, "evaluations": evaluations}
        after = held_out(trainer, context.plan.chosen.layout)
        self._save(trainer)
        return {"before": read_logged(trainer.state, BEFORE), "after": after}

    def _save(self, trainer: Any) -> None:
        save_model_directory(
            trainer,
            self.output_dir,
            allow_nonfinite=self.settings.allow_nonfinite,
            starting=starting_weights(self.model, self.settings),
        )


def held_out(trainer: Any, layout: Layout) -> float | None:
    """Return the cross-entropy of the held-out samples in nats per token; every rank must call it.

    Sequence and pipeline parallelism evaluate with the Trainer. `None` under context parallelism, which cannot
    evaluate.
    """
    if layout.cp > 1:
        return None
    if layout.pp > 1 or layout.sp > 1:
        return float(trainer.evaluate()["eval_loss"])
    return held_out_cross_entropy(trainer)


_NOT_PREDICTED = "predicted memory and time do not apply to this run"
_REPEATED = (
    "Accelerate fills the last batch of each epoch by repeating its first {} samples, so these count twice; "
    "shardwright.trainer_for excludes the repeated ones from the loss"
)
_LOADS_ON_FIRST_RANK = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
"""With these variables only the first rank loads weights."""
_REFERENCE_WITHOUT_WEIGHTS = (
    "under FSDP2 TRL 1.16.0 shards the reference of a DPOTrainer without the weights that only the first rank loaded, "
    "so that losses are wrong; start the script with os.environ['FSDP_CPU_RAM_EFFICIENT_LOADING'] = 'false'"
)


def run_script(plan: Plan, script: str, arguments: Sequence[str], callbacks: Sequence[Any]) -> None:
    """Run a script as `__main__`, as `python SCRIPT ARGUMENTS` would, with a plan's axes and callbacks in Trainers."""
    serve_scripts_on_cpu_ranks()
    patches.apply("script-callbacks", lambda defaults: [*defaults, *callbacks])
    carry_axes(plan)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).absolute().parent)
    runpy.run_path(script, run_name="__main__")


def comparison(plan: Plan) -> type:
    """Return a callback that makes a Trainer recompute as planned, and reports where it differs from the plan."""
    from transformers import TrainerCallback

    class Comparison(TrainerCallback):
        def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            refuse_run_effects(args)
            if kwargs.get("optimizer") is not None and deepspeed_configuration(args) is not None:
                rule = "is silently replaced by the optimizer of optim under DeepSpeed"
                fix = "use shardwright.trainer_for(plan, Trainer, ..., optimizers=...), or set optim"
                raise UsageError(
                    ConfigError(where="optimizers", value=type(kwargs["optimizer"]).__name__, rule=rule, fix=fix)
                )

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model = kwargs.get("model")
            lines = argument_differences(plan, args, model, ranks=args.world_size)
            try:
                keep_planned_memory(plan, args, model)
            except UsageError as error:
                lines += [f"{each.where} {each.rule}" for each in error.errors]
            for line in lines:
                note_on_first_rank(f"{line}: {_NOT_PREDICTED}")
            if repeated := repeated_samples(kwargs.get("train_dataloader")):
                note_on_first_rank(_REPEATED.format(repeated))
            loads_on_first = all(os.environ.get(name, "").lower() in ("true", "1") for name in _LOADS_ON_FIRST_RANK)
            if type(args).__name__ == "DPOConfig" and loads_on_first:
                note_on_first_rank(_REFERENCE_WITHOUT_WEIGHTS)

    return Comparison


def other_task_errors(plan: Plan, args: Any) -> list[ConfigError]:
    """Return an error if arguments of TRL are for another task than the plan's.

    Other arguments, and a plan without a task, are only reported: the plan predicts another run.
    """
    task, planned, kind = task_of(args), plan.job.task, type(args).__name__
    if task == planned or plan.job.imitated is not None:
        return []
    if task is None:
        if planned == "sft":
            return []
        note_on_first_rank(f"{kind} is no configuration of TRL, and the plan is for {planned}: {_NOT_PREDICTED}")
        return []
    fix = f"plan with --task {task}" if task in TASKS else "use a script of that task"
    if planned == "sft":
        note_on_first_rank(f"{kind} is of task {task}, and the plan is for sft ({fix}): {_NOT_PREDICTED}")
        return []
    rule = f"is of task {task}, and the plan is for {planned}"
    return [ConfigError(where="args", value=kind, rule=rule, fix=fix)]


def carry_axes(plan: Plan) -> None:
    """Attach the plan's parallelism, tiles, offloading and optimizer to every Trainer of a script without its own.

    Sequence, expert and tensor parallelism are attached; a pipeline or context parallelism is rejected, and so are
    trainer classes and losses that the layout would train differently from one process. A Trainer that computes its own
    loss from logits keeps it, with a note.
    """
    from ...plugins.transformers.optimizers import prepare_optimizer

    layout = plan.chosen.layout
    accept_muon()
    parallelism = planned_parallelism(plan)
    own_calls: list[str] = []

    def record_calls(kind: type, name: str) -> None:
        method: Any = getattr(kind, name)

        def recording(self: Any, *args: Any, **settings: Any) -> Any:
            own_calls.append(name)
            return method(self, *args, **settings)

        setattr(kind, name, recording)

    for callback in parallelism.callbacks:
        record_calls(type(callback), "prepare")
    record_calls(PlannedParallelism, "make_trainer")

    def carrying(make: Callable[..., None]) -> Callable[..., None]:
        def made(trainer: Any, model: Any = None, args: Any = None, *rest: Any, **settings: Any) -> None:
            make_exact(trainer).checked_checkpoint = checked_checkpoint
            if own_calls:
                make(trainer, model, args, *rest, **settings)
                return
            if parallelism.is_pipeline or parallelism.layout.cp > 1:
                rule = "uses a stock Trainer, which supports no pipeline and no context parallelism"
                fix = "use shardwright.trainer_for(plan, model=..., args=...), or plan without these axes"
                raise UsageError(ConfigError(where="script", value=sys.argv[0], rule=rule, fix=fix))
            errors = other_task_errors(plan, args)
            if args is not None and (errors := errors + parallelism.class_errors(type(trainer), args)):
                raise UsageError(errors)
            for callback in parallelism.callbacks:
                callback.prepare(args, model)
            make(trainer, model, args, *rest, **settings)
            check_balance_of_batches(trainer)
            check_learned_positions(trainer)
            train_as_one_process(trainer, layout.tp)
            for callback in parallelism.callbacks:
                callback.attach(trainer)
            try:
                attach_long_sequences(trainer, layout, plan.job)
            except UsageError as error:
                for each in error.errors:
                    note_on_first_rank(f"{each.where} {each.rule}: {_NOT_PREDICTED}")
            prepare_optimizer(trainer)
            own_calls.clear()

        return made

    patches.apply("script-axes", carrying)


class ScriptTask(ScriptJob, RankTask):
    def run(self, work: Path) -> None:
        plan = Plan.load(self.plan)
        check_upstream(plan.chosen.layout.engine)
        with memory_errors(plan):
            run_script(plan, self.script, self.arguments, [comparison(plan)])


def trainer_for(
    plan: Plan | str | Path,
    trainer_class: Any = None,
    *,
    model: Any = None,
    args: Any,
    revision: str | None = None,
    own_loss: OwnLoss | None = None,
    **settings: Any,
) -> Any:
    """Return a Trainer with everything attached that the plan's layout needs, and with `PlanCallback`.

    Sequence, context, expert and tensor parallelism are callbacks of the stock Trainer or of your subclass. A pipeline
    is run by `PipelineTrainer`, which replaces the stock Trainer but no subclass. Start the script with the plan's
    files, for example ``accelerate launch --config_file plan/accelerate.yaml script.py``.

    Example: ``shardwright.trainer_for("plan", model=model, args=plan.training_arguments("out"), train_dataset=rows)``

    Args:
        plan: A plan, or the directory that `shardwright plan` wrote.
        trainer_class: A Trainer; `None` for the stock one.
        model: The model; for a pipeline also the directory or Hub id of a checkpoint, from which every rank reads only
            its stage. `None` with `model_init`.
        args: `TrainingArguments`, or their keywords as returned by `Plan.training_arguments`, which are completed for
            CPU ranks.
        revision: Of a Hub id.
        own_loss: What your `compute_loss` or `compute_loss_func` returns for a batch: a `"mean"` over labels, a
            `"sample_mean"`, or a `"sum"` (also one divided by `num_items_in_batch`). `None` reads the attribute
            `own_loss` of the class, or else measures it with the first batch.
        settings: Further arguments of the Trainer. Each works as in one process, including your optimizer and scheduler
            (`optimizers`), or is rejected. Those that only your class knows are passed on with a warning.

    Raises:
        UsageError: model, arguments and layout cannot be combined; all errors of an axis together.
    """
    from transformers import Trainer

    loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
    if isinstance(args, Mapping):
        keywords = dict(args)
        args = training_arguments(keywords, configure_cpu_ranks(chosen_engine(keywords)))
    check_upstream(loaded.chosen.layout.engine)
    if trainer_class is Trainer:
        trainer_class = None
    if errors := other_task_errors(loaded, args):
        raise UsageError(errors)
    callback = PlanCallback(plan)
    trainer = planned_parallelism(loaded).make_trainer(
        model=model, args=args, revision=revision, trainer_class=trainer_class, own_loss=own_loss, **settings
    )
    callback.attach(trainer)
    return trainer
