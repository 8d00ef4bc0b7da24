"""`train` on every rank: build the Trainer for the plan's layout, evaluate before and after, save the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.layout import Layout
from ...plugins.transformers.training_arguments import prepare_model_directory_save, save_model_directory
from ..counting.estimates import Estimate
from ..data.samples import DividedSamples
from ..parallel.trainer_for import planned_parallelism
from ..runs.ranks import (
    RankContext,
    TrainingTask,
    held_out_cross_entropy,
    logged,
    open_rank,
    read_logged,
    result_fields,
    starting_weights,
    trained_model,
)
from ..runs.settings import PLAN_DIRECTORY
from ..runs.share import Share
from .settings import TrainJob

if TYPE_CHECKING:
    from datasets import Dataset

BEFORE = "held_out_cross_entropy_before"
"""Name in the Trainer's log, which checkpoints contain, so that resumed runs have it."""


class TrainTask(TrainJob, TrainingTask):
    """Training under the plan's layout."""

    def run(self, work: Path) -> None:
        """Train as every task; first combine the samples of several machines."""
        task, context = self, open_rank(self, work)
        if self.machines > 1:
            task, train_samples = divided_training(self, context.samples[0], context.arguments)
            context = replace(context, samples=(train_samples, context.samples[1]))
        task.train(context)

    def build(self, context: RankContext) -> Any:
        """Return a Trainer for the plan's layout that evaluates before its first step."""
        prepare_model_directory_save(context.arguments)
        plan = self._plan()
        parallelism = planned_parallelism(plan)
        trainer = parallelism.make_trainer(
            model=trained_model(
                self.model, self.settings, context, for_stages=parallelism.is_pipeline, adapter=self.adapter
            ),
            revision=self.settings.revision,
            **context.trainer_arguments(),
        )
        from transformers import TrainerCallback

        class EvaluateBeforeTraining(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if not state.global_step and (mean := held_out(trainer, plan.chosen.strategy)) is not None:
                    trainer.log(logged(BEFORE, mean))

        trainer.add_callback(EvaluateBeforeTraining())
        return trainer

    def metrics(self, trainer: Any, context: RankContext) -> dict[str, Any]:
        """Evaluate, save, and return the cross-entropy before and after."""
        after = held_out(trainer, self._plan().chosen.strategy)
        save_model_directory(
            trainer,
            self.output_dir,
            allow_nonfinite=self.settings.allow_nonfinite,
            starting=starting_weights(self.model, self.settings),
        )
        return result_fields({"before": read_logged(trainer.state, BEFORE), "after": after})

    def _plan(self) -> Plan:
        return Plan.load(Path(self.output_dir) / PLAN_DIRECTORY)


def held_out(trainer: Any, strategy: Layout) -> Estimate | None:
    """Return the cross-entropy of the held-out samples in nats per token; every rank must call it.

    The standard error is over samples and is known if every rank reads other samples. Sequence and pipeline
    parallelism evaluate with the Trainer. `None` under context parallelism, which cannot evaluate.
    """
    if strategy.cp > 1:
        return None
    if strategy.pp > 1 or strategy.sp > 1:
        return Estimate(value=float(trainer.evaluate()["eval_loss"]), standard_error=None)
    mean = held_out_cross_entropy(trainer)
    return mean if strategy.tp == 1 else Estimate(value=mean.value, standard_error=None)


def divided_training(job: TrainTask, own_samples: Dataset, arguments: Any) -> tuple[TrainTask, DividedSamples]:
    """Return the job with the counts of all machines, and the samples to train on; every rank must call it.

    Each machine shuffles its samples with the data seed, unless the user wants them in order.
    """
    rank, world_size = arguments.process_index, arguments.world_size
    ranks = world_size // job.machines
    counts_by_rank = Share(rank=rank, ranks=world_size).by_rank((job.train_samples, job.train_tokens))
    samples, tokens = (sum(counts) for counts in zip(*counts_by_rank[::ranks], strict=True))
    if job.settings.arg.get("train_sampling_strategy") != "sequential":
        seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
        own_samples = own_samples.shuffle(seed=seed, keep_in_memory=True)
    divided = DividedSamples(
        own_samples=own_samples,
        machine=rank // ranks,
        machines=job.machines,
        ranks_per_machine=ranks,
        batch_size=arguments.per_device_train_batch_size,
        count=samples,
    )
    return job.model_copy(update={"train_samples": samples, "train_tokens": tokens}), divided
