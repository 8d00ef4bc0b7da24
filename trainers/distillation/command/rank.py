"""Rank task of `distill`: builds the Trainer and returns its metrics."""

from __future__ import annotations

from typing import Any

from ....plugins.transformers.training_arguments import prepare_model_directory_save, save_model_directory
from ...parallel.trainer_for import planned_parallelism
from ...runs.ranks import RankContext, TrainingTask, loaded_second_model, starting_weights, trained_model
from .settings import DistillJob, distillation_config


class DistillTask(DistillJob, TrainingTask):
    """Train a student with a teacher.

    With transformers 5.17.0, `Trainer.evaluate` before training starts an inference engine under DeepSpeed, which
    requires ZeRO-3. The student is therefore evaluated inside `train`, when everything is wrapped.
    """

    evaluates_last = True

    def build(self, context: RankContext) -> Any:
        from ..served_teacher import ServedTeacher
        from ..teacher_cache import CachedTeacherDataset, TeacherCache
        from ..trainer import DistillationTrainer

        prepare_model_directory_save(context.arguments)
        settings, common = self.settings, context.trainer_arguments()
        student = trained_model(self.student, settings, context)
        if settings.teacher_url is not None:
            teacher: Any = ServedTeacher(
                settings.teacher_url,
                model=self.teacher,
                vocab_size=self.vocab_size,
                top_k=settings.teacher_top_k,
                timeout_seconds=settings.teacher_timeout,
                allow_remote_http=settings.allow_remote_http,
            )
        elif settings.teacher_cache is None:
            teacher = loaded_second_model("teacher", self.teacher, settings.teacher_revision, self, context)
        else:
            teacher = TeacherCache.open(settings.teacher_cache)
            for name in ("train_dataset", "eval_dataset"):
                common[name] = CachedTeacherDataset(common[name], teacher)
        return planned_parallelism(context.plan).make_trainer(
            trainer_class=DistillationTrainer,
            model=student,
            teacher=teacher,
            teacher_placement=self.placements["teacher"],
            distillation=distillation_config(settings, self.vocab_size),
            **common,
        )

    def metrics(self, trainer: Any, context: RankContext) -> dict[str, Any]:
        """Save the student, and return the Trainer's first and last evaluation."""
        save_model_directory(
            trainer,
            self.output_dir,
            allow_nonfinite=self.settings.allow_nonfinite,
            starting=starting_weights(self.student, self.settings),
        )
        evaluations = [
            {name.removeprefix("eval_"): value for name, value in entry.items() if name.startswith("eval_")}
            for entry in trainer.state.log_history
            if any(name.startswith("eval_") for name in entry)
        ]
        return {"before": evaluations[0], "after": evaluations[-1]}
