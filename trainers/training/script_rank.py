"""Runs on every rank of `shardwright launch`: makes the process ready for the plan's layout, then runs the script.

accelerate launch --config_file plan/accelerate.yaml -m shardwright.trainers.training.script_rank PLAN SCRIPT ARGUMENTS
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import Fault, UsageError
from ...plugins.accelerate.cpu_ranks import serve_scripts_on_cpu_ranks
from ...plugins.accelerate.repeated_samples import repeated_samples
from ...plugins.bitsandbytes.checkpoint import quiet_optional_kernels
from ...plugins.launching.elastic import recorded
from ...plugins.launching.notes import note_on_first_rank
from ..parallel.trainer_for import PlannedParallelism, planned_parallelism
from ..runs.differences import argument_differences

_TRAINERS: list[Any] = []
"""Arguments of the trainers that the script made, which speak for the engines below them."""
_REPEATED = (
    "Accelerate fills the last batch of each epoch with {} samples of its beginning, which count twice; "
    "shardwright.trainer_for leaves them out of the loss"
)
_REFERENCE_WITHOUT_WEIGHTS = (
    "under FSDP2 TRL 1.16.0 shards the reference of a DPOTrainer without the weights that only the first rank loaded, "
    "and the losses are wrong; begin the script with os.environ['FSDP_CPU_RAM_EFFICIENT_LOADING'] = 'false'"
)


def _loads_on_first_rank() -> bool:
    names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    return all(os.environ.get(name, "").lower() in ("true", "1") for name in names)


def run_script(script: str, arguments: list[str]) -> None:
    """Run a script as `__main__`, as `python SCRIPT ARGUMENTS` would."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).absolute().parent)
    runpy.run_path(script, run_name="__main__")


def follow_trainers(plan: Plan) -> None:
    """Let every Trainer that a script makes say where it leaves the plan."""
    from transformers import TrainerCallback
    from transformers import trainer as trainer_module

    class Comparison(TrainerCallback):
        def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _TRAINERS.append(args)

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for line in argument_differences(plan, args, kwargs.get("model"), ranks=args.world_size):
                note_on_first_rank(f"{line}: the predicted memory and time are not this run's")
            if repeated := repeated_samples(kwargs.get("train_dataloader")):
                note_on_first_rank(_REPEATED.format(repeated))
            if type(args).__name__ == "DPOConfig" and _loads_on_first_rank():
                note_on_first_rank(_REFERENCE_WITHOUT_WEIGHTS)

    trainer_module.DEFAULT_CALLBACKS.append(Comparison)


def carry_axes(plan: Plan) -> None:
    """Let every Trainer that a script makes carry the plan's axes, unless the script sees to that itself.

    Sequence, expert and tensor parallelism are attached; what a stock Trainer cannot carry is refused when it is made.
    """
    if not plan.chosen.strategy.axes:
        return
    from transformers import Trainer

    parallelism = planned_parallelism(plan)
    own: list[str] = []
    for callback in parallelism.callbacks:
        _remember_calls(type(callback), "prepare", own)
    _remember_calls(PlannedParallelism, "make_trainer", own)
    make: Any = Trainer.__init__

    def made(trainer: Any, model: Any = None, args: Any = None, *rest: Any, **settings: Any) -> None:
        if own:
            make(trainer, model, args, *rest, **settings)
            return
        if parallelism.is_pipeline or parallelism.context_parallel_size > 1:
            rule = "divides layers or contexts, which a stock Trainer does not"
            fix = "make the trainer with shardwright.trainer_for(plan, model=..., args=...), or plan without this axis"
            raise UsageError(Fault(where="script", value=sys.argv[0], rule=rule, fix=fix))
        for callback in parallelism.callbacks:
            callback.prepare(args, model)
        make(trainer, model, args, *rest, **settings)
        for callback in parallelism.callbacks:
            callback.attach(trainer)
        own.clear()

    Trainer.__init__ = made


def _remember_calls(kind: type, name: str, calls: list[str]) -> None:
    """Note each call of a method before it runs."""
    method: Any = getattr(kind, name)

    def noted(self: Any, *args: Any, **settings: Any) -> Any:
        calls.append(name)
        return method(self, *args, **settings)

    setattr(kind, name, noted)


def _follow_engines(plan: Plan) -> None:
    """Let `deepspeed.initialize` say where the engine of a loop of one's own leaves the plan."""
    import deepspeed

    strategy, initialize = plan.chosen.strategy, deepspeed.initialize

    def initialized(*args: Any, **settings: Any) -> Any:
        made = initialize(*args, **settings)
        engine = made[0]
        if _TRAINERS:
            return made
        facts = {
            "train_micro_batch_size_per_gpu": (engine.train_micro_batch_size_per_gpu(), strategy.micro_batch_size),
            "gradient_accumulation_steps": (
                engine.gradient_accumulation_steps(),
                strategy.gradient_accumulation_steps,
            ),
            "zero_optimization.stage": (engine.zero_optimization_stage(), strategy.zero_stage),
        }
        for name, (ran, planned) in facts.items():
            if ran != planned:
                note_on_first_rank(f"{name} is {ran}, the plan says {planned}: its memory and time are not this run's")
        return made

    deepspeed.initialize = initialized


def _run() -> None:
    directory, script, *arguments = sys.argv[1:]
    plan = Plan.load(directory)
    quiet_optional_kernels()
    serve_scripts_on_cpu_ranks()
    follow_trainers(plan)
    carry_axes(plan)
    if plan.chosen.strategy.engine == "deepspeed" and "LOCAL_RANK" in os.environ:
        _follow_engines(plan)
    run_script(script, arguments)


if __name__ == "__main__":
    recorded(_run)()
