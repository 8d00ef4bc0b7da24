"""`train` on every rank: build the Trainer for the plan's layout, evaluate before and after, save the model."""

from __future__ import annotations

from typing import Any

from ...ds_configs.specs.layout import Layout
from ...plugins.transformers.training_arguments import prepare_model_directory_save, save_model_directory
from ..counting.counts import Estimate
from ..parallel.trainer_for import planned_parallelism
from ..preferences.trainer import evaluated, task_trainer
from ..runs.ranks import (
    RankContext,
    TrainingTask,
    held_out_cross_entropy,
    logged,
    read_logged,
    result_fields,
    starting_weights,
    trained_model,
)
from .settings import TrainJob

BEFORE = "held_out_cross_entropy_before"
"""Name in the Trainer's log, which checkpoints contain, so that resumed runs have it."""


class TrainTask(TrainJob, TrainingTask):
    def build(self, context: RankContext) -> Any:
        prepare_model_directory_save(context.arguments)
        plan = context.plan
        if self.settings.task != "sft":
            return self._task_trainer(context)
        parallelism = planned_parallelism(plan)
        trainer = parallelism.make_trainer(
            model=trained_model(self.model, self.settings, context, for_stages=parallelism.is_pipeline),
            revision=self.settings.revision,
            **context.trainer_arguments(),
        )
        from transformers import TrainerCallback

        class EvaluateBeforeTraining(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if not state.global_step and (mean := held_out(trainer, plan.chosen.layout)) is not None:
                    trainer.log(logged(BEFORE, mean))

        trainer.add_callback(EvaluateBeforeTraining())
        return trainer

    def _task_trainer(self, context: RankContext) -> Any:
        from transformers import TrainerCallback

        trainer = task_trainer(self.model, self.settings, context, reward=self.settings.reward)

        class EvaluateBeforeTraining(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if not state.global_step:
                    trainer.evaluate()

        trainer.add_callback(EvaluateBeforeTraining())
        return trainer

    def metrics(self, trainer: Any, context: RankContext) -> dict[str, Any]:
        if self.settings.task != "sft":
            trainer.evaluate()
            evaluations = {"before": evaluated(trainer, first=True), "after": evaluated(trainer, first=False)}
            self._save(trainer)
            return result_fields({"before": None, "after": None}) | {"evaluations": evaluations}
        after = held_out(trainer, context.plan.chosen.layout)
        self._save(trainer)
        return result_fields({"before": read_logged(trainer.state, BEFORE), "after": after})

    def _save(self, trainer: Any) -> None:
        save_model_directory(
            trainer,
            self.output_dir,
            allow_nonfinite=self.settings.allow_nonfinite,
            starting=starting_weights(self.model, self.settings),
        )


def held_out(trainer: Any, layout: Layout) -> Estimate | None:
    """Return the cross-entropy of the held-out samples in nats per token; every rank must call it.

    The standard error is over samples and is known if every rank reads other samples. Sequence and pipeline
    parallelism evaluate with the Trainer. `None` under context parallelism, which cannot evaluate.
    """
    if layout.cp > 1:
        return None
    if layout.pp > 1 or layout.sp > 1:
        return Estimate(value=float(trainer.evaluate()["eval_loss"]), standard_error=None)
    mean = held_out_cross_entropy(trainer)
    return mean if layout.tp == 1 else Estimate(value=mean.value, standard_error=None)
