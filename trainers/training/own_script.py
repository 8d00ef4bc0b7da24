"""`trainer_for`: the Trainer of a user's own script under any layout that a plan can choose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...plugins.accelerate.cpu_ranks import configure_cpu_ranks
from ...plugins.transformers.training_arguments import training_arguments
from ..parallel.trainer_for import planned_parallelism
from ..runs.plan_callback import PlanCallback
from ..runs.steps import chosen_engine


def trainer_for(
    plan: Plan | str | Path,
    trainer_class: Any = None,
    *,
    model: Any,
    args: Any,
    revision: str | None = None,
    **settings: Any,
) -> Any:
    """Return a Trainer with everything that the plan's layout needs attached, and what the run used beside the plan.

    Sequence, context, expert and tensor parallelism are callbacks of the stock Trainer or of your subclass; a pipeline
    is run by `PipelineTrainer`, which takes the place of the stock one alone. The script is started by the plan's
    files, such as with ``accelerate launch --config_file plan/accelerate.yaml script.py``.

    Example: ``shardwright.trainer_for("plan", model=model, args=plan.training_arguments("out"), train_dataset=rows)``

    Args:
        plan: A plan, or the directory that `shardwright plan` wrote.
        trainer_class: A Trainer; `None` for the stock one.
        model: The model; for a pipeline also the directory or Hub id of a checkpoint, of which every rank reads its
            stage alone.
        args: `TrainingArguments`; or their keywords, as `Plan.training_arguments` returns them, which are then
            completed by what CPU ranks need.
        revision: Of a Hub id.
        settings: Further arguments of the Trainer.

    Raises:
        UsageError: model, arguments and layout do not go together; all faults of an axis together.
    """
    from transformers import Trainer

    made = plan if isinstance(plan, Plan) else Plan.load(plan)
    if isinstance(args, Mapping):
        stated = dict(args)
        args = training_arguments(stated, configure_cpu_ranks(chosen_engine(stated)))
    if trainer_class is Trainer:
        trainer_class = None
    callback = PlanCallback(plan)
    parallelism = planned_parallelism(made)
    trainer = parallelism.make_trainer(
        model=model, args=args, revision=revision, trainer_class=trainer_class, **settings
    )
    callback.attach(trainer)
    return trainer
