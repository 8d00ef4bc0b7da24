"""Runs on every rank of `shardwright train`: trains under the plan's layout, evaluates before and after, and saves.

accelerate launch --config_file plan/accelerate.yaml -m shardwright.trainers.training.worker job.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.strategy import Strategy
from ...plugins.transformers.training_arguments import prepare_model_directory_save, save_model_directory
from ..data.chat import IGNORED_LABEL
from ..evaluation.estimates import Estimate
from ..parallel.trainer_for import planned_parallelism
from ..runs.held_out import held_out_cross_entropy, logged, read_logged, result_fields
from ..runs.ranks import (
    collator,
    end_rank,
    rank_arguments,
    read_samples,
    run_rank,
    step_facts,
    train_recorded,
    trained_model,
)
from ..runs.settings import PLAN_DIRECTORY, TOKENIZER
from .division import divided_training
from .settings import TrainJob

BEFORE = "held_out_cross_entropy_before"
"""Name in the Trainer's log, which checkpoints keep: a resumed run has it from its first part."""


def train_on_rank(job: TrainJob, work: Path) -> None:
    """Build everything in the order that ZeRO-3 needs (arguments before weights), train, evaluate and save."""
    from transformers import AutoTokenizer

    arguments, engine, resumed = rank_arguments(job)
    prepare_model_directory_save(arguments)
    plan = Plan.load(Path(job.output_dir) / PLAN_DIRECTORY)
    parallelism = planned_parallelism(plan)
    tokenizer = AutoTokenizer.from_pretrained(str(work / TOKENIZER), trust_remote_code=False)
    samples = read_samples(work)
    if job.machines > 1:
        job, samples[0] = divided_training(job, samples[0], arguments)
    trainer = parallelism.make_trainer(
        model=trained_model(job.model, job.settings, arguments, engine, for_stages=parallelism.is_pipeline),
        revision=job.settings.revision,
        args=arguments,
        train_dataset=samples[0],
        eval_dataset=samples[1],
        data_collator=collator(tokenizer),
        processing_class=tokenizer,
    )
    strategy = plan.chosen.strategy
    trainer.add_callback(_before_training(trainer, strategy))
    recorder = train_recorded(trainer, job, resumed, evaluates_last=False)
    after = held_out(trainer, strategy)
    save_model_directory(trainer, job.output_dir, allow_nonfinite=job.settings.allow_nonfinite)
    end_rank(trainer, lambda peak: _result(trainer, recorder, job, peak, after), work)


def held_out(trainer: Any, strategy: Strategy) -> Estimate | None:
    """Return the cross-entropy of the held-out samples in nats a token; every rank must call it.

    Its error is over samples, and known where every rank reads samples of its own. Stages of a pipeline add up all
    predicted tokens themselves. `None` under context parallelism, where nothing can be
    evaluated.
    """
    if strategy.cp > 1:
        return None
    if strategy.pp > 1:
        return Estimate(value=float(trainer.evaluate()["eval_loss"]), standard_error=None)
    if strategy.sp > 1:
        return Estimate(value=_by_label_count(trainer), standard_error=None)
    found = held_out_cross_entropy(trainer)
    return found if strategy.tp == 1 else Estimate(value=found.value, standard_error=None)


def _by_label_count(trainer: Any) -> float:
    """Return the mean over all labelled tokens from evaluations of samples with equally many, whose mean is exact."""
    samples = trainer.eval_dataset
    groups: dict[int, list[int]] = {}
    for index, labels in enumerate(samples["labels"]):
        groups.setdefault(sum(label != IGNORED_LABEL for label in labels[1:]), []).append(index)
    total = sum(
        trainer.evaluate(samples.select(indices))["eval_loss"] * count * len(indices)
        for count, indices in sorted(groups.items())
    )
    return float(total / sum(count * len(indices) for count, indices in groups.items()))


def _before_training(trainer: Any, strategy: Strategy) -> Any:
    """Return a callback that logs how good the model is before its first step."""
    from transformers import TrainerCallback

    class BeforeTraining(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not state.global_step and (found := held_out(trainer, strategy)) is not None:
                trainer.log(logged(BEFORE, found))

    return BeforeTraining()


def _result(trainer: Any, recorder: Any, job: TrainJob, peak: int | None, after: Estimate | None) -> dict[str, Any]:
    measured = result_fields({"before": read_logged(trainer.state, BEFORE), "after": after})
    return {**measured, "peak_bytes": peak} | step_facts(trainer, recorder, job)


if __name__ == "__main__":
    run_rank(TrainJob, train_on_rank)
