"""Runs on every rank of `shardwright distill`: teaches the student, evaluates it before and after, and saves it.

    accelerate launch --config_file plan/accelerate.yaml \\
        -m shardwright.trainers.distillation.command.worker job.json

Seen with transformers 5.17.0: before training, `Trainer.evaluate` under DeepSpeed starts an inference engine, which
needs ZeRO-3; the student is therefore evaluated inside `train`, once everything is wrapped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....plugins.transformers.training_arguments import prepare_model_directory_save, save_model_directory
from ...parallel.trainer_for import PlannedParallelism
from ...runs.ranks import (
    collator,
    end_rank,
    placed_teacher,
    rank_arguments,
    read_samples,
    run_rank,
    step_facts,
    train_recorded,
    trained_model,
)
from ...runs.settings import TOKENIZER
from .run_files import TEACHER_TOKENIZER, WorkerJob, distillation_config


def teach(job: WorkerJob, work: Path) -> None:
    """Build everything in the order that ZeRO-3 needs (arguments before weights), train, evaluate and save."""
    from transformers import AutoTokenizer

    arguments, engine, resumed = rank_arguments(job)
    prepare_model_directory_save(arguments)
    tokenizer = AutoTokenizer.from_pretrained(str(work / TOKENIZER), trust_remote_code=False)
    student = trained_model(job.student, job.settings, arguments, engine)
    trainer = _trainer(job, work, arguments, student, _teacher(job, arguments, engine), tokenizer)
    recorder = train_recorded(trainer, job, resumed, evaluates_last=True)
    save_model_directory(trainer, job.output_dir, allow_nonfinite=job.settings.allow_nonfinite)
    end_rank(trainer, lambda peak: _result(trainer, recorder, peak, job), work)


def _teacher(job: WorkerJob, arguments: Any, engine: Any) -> Any:
    if job.settings.teacher_cache is not None:
        from ..cache.teacher_cache import TeacherCache

        return TeacherCache.open(job.settings.teacher_cache)
    return placed_teacher(job.teacher, job.settings.teacher_revision, job, arguments, engine)


def _trainer(job: WorkerJob, work: Path, arguments: Any, student: Any, teacher: Any, tokenizer: Any) -> Any:
    from ..trainer import DistillationTrainer

    samples = read_samples(work)
    if job.settings.teacher_cache is not None:
        from ..cache.teacher_cache import CachedTeacherDataset

        samples = [CachedTeacherDataset(side, teacher) for side in samples]
    return PlannedParallelism().make_trainer(
        trainer_class=DistillationTrainer,
        model=student,
        teacher=teacher,
        teacher_placement=job.placement,
        distillation=distillation_config(job.settings, job.vocab_size),
        args=arguments,
        train_dataset=samples[0],
        eval_dataset=samples[1],
        data_collator=collator(tokenizer),
        processing_class=tokenizer,
        teacher_tokenizer=_teacher_tokenizer(job, work),
    )


def _teacher_tokenizer(job: WorkerJob, work: Path) -> Any:
    if not job.settings.cross_tokenizer:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(work / TEACHER_TOKENIZER), trust_remote_code=False)


def _result(trainer: Any, recorder: Any, peak: int | None, job: WorkerJob) -> dict[str, Any]:
    evaluations = [
        {name.removeprefix("eval_"): value for name, value in entry.items() if name.startswith("eval_")}
        for entry in trainer.state.log_history
        if any(name.startswith("eval_") for name in entry)
    ]
    facts = {"before": evaluations[0], "after": evaluations[-1], "peak_bytes": peak}
    return facts | step_facts(trainer, recorder, job)


if __name__ == "__main__":
    run_rank(WorkerJob, teach)
