"""`trainer_for`: the Trainer of a user's script under any layout that a plan can select."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...plugins.accelerate import configure_cpu_ranks
from ...plugins.transformers.training_arguments import training_arguments
from ..counting.own_losses import OwnLoss
from ..parallel.trainer_for import planned_parallelism
from ..runs.plan_callback import PlanCallback
from ..runs.ranks import check_upstream, chosen_engine


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
    callback = PlanCallback(plan)
    trainer = planned_parallelism(loaded).make_trainer(
        model=model, args=args, revision=revision, trainer_class=trainer_class, own_loss=own_loss, **settings
    )
    callback.attach(trainer)
    return trainer
