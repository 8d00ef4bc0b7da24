"""The rank's side of `shardwright launch`: prepare the process for the plan's layout, then run the script."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins import patches
from ...plugins.accelerate import repeated_samples, serve_scripts_on_cpu_ranks
from ...plugins.deepspeed.engine import refuse_run_effects
from ...plugins.launching.messages import note_on_first_rank
from ...plugins.transformers.training_arguments import accept_muon, deepspeed_configuration
from ...plugins.trl import train_as_one_process
from ..checkpoints import checked_checkpoint
from ..exact import make_exact
from ..parallel.trainer_for import (
    PlannedParallelism,
    attach_long_sequences,
    check_balance_of_batches,
    check_learned_positions,
    planned_parallelism,
)
from ..runs.out_of_memory import memory_errors
from ..runs.plan_callback import argument_differences, keep_planned_memory
from ..runs.ranks import check_upstream
from ..runs.settings import RankTask
from .settings import ScriptJob

_NOT_PREDICTED = "predicted memory and time do not apply to this run"
_REPEATED = (
    "Accelerate fills the last batch of each epoch with {} samples from its start, which count twice; "
    "shardwright.trainer_for excludes them from the loss"
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
            if args is not None and (errors := parallelism.class_errors(type(trainer), args)):
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
