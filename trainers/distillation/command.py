"""`shardwright distill`: check settings, models and data, plan; train on every rank; the outcome."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError, collecting
from ...ds_configs.specs.settings import settings_of
from ...plugins.huggingface_hub import TOKENIZER_FILES
from ...plugins.planning import load_model_spec
from ...plugins.planning import plan as select_plan
from ...plugins.transformers.loading import refuse_other_formats
from ...plugins.transformers.training_arguments import prepare_model_directory_save, save_model_directory
from ..data.chat import set_chat_template
from ..data.models import StartingModel, agreed_vocab_size, load_config, load_tokenizer, with_positions
from ..data.samples import Samples, packed_if_possible
from ..data.sources import local_place
from ..parallel.planned import planned_parallelism
from ..runs.inputs import (
    CONVERTED,
    chosen_hardware,
    is_without,
    launch_errors,
    load_second_model_spec,
    named_samples,
    run_output_errors,
    training_job,
)
from ..runs.ranks import RankContext, TrainingTask, loaded_teacher, starting_weights, trained_model
from ..runs.run import (
    LaunchedOutcome,
    PreparedTraining,
    StepResult,
    losses,
    model_file_names,
    run_training,
)
from ..runs.settings import RunRequest
from .settings import DistillJob, DistillSettings, distill_settings_errors

SCHEMA_VERSION = 1
"""Version of `distill --format json`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationResult(StepResult):
    """Measurements of the ranks; the content of `result.json`."""

    before: Mapping[str, float]
    """Metrics of the student on the held-out samples before its first step."""
    after: Mapping[str, float]
    """The same after its last step."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DistillationOutcome(LaunchedOutcome):
    """Result of a distillation that succeeded."""

    settings: DistillSettings
    teacher: str
    student: str
    result: DistillationResult

    @property
    def _loss(self) -> str:
        return "student_cross_entropy" if "student_cross_entropy" in self.result.after else "loss"

    def measures(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return the results of the student before and after, and of the teacher."""
        before, after = self.result.before, self.result.after
        teacher = "teacher_cross_entropy"
        values = [
            losses(before[self._loss]),
            losses(after[self._loss]),
            losses(after[teacher]) if teacher in after else ("", ""),
        ]
        rows = list(zip(("cross-entropy, nats per token", "perplexity"), *values, strict=True))
        for key, name, shape, of_teacher in (
            ("kl_per_token", "KL(teacher | student), nats per token", "{:.4f}".format, "0"),
            ("top1_agreement", "same most likely token as the teacher", _share, "100 %"),
            ("speculative_acceptance", "expected speculative acceptance", _share, "100 %"),
        ):
            if key in after:
                rows.append((name, shape(before[key]), shape(after[key]), of_teacher))
        return ("", "student before", "student after", "teacher"), rows

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "teacher": self.teacher,
            "student": self.student,
            **self.where_and_what(),
            "before": dict(self.result.before),
            "after": dict(self.result.after),
            **self.speed(),
        }


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


class DistillTask(DistillJob, TrainingTask):
    """Train a student with a teacher.

    With transformers 5.17.0, `Trainer.evaluate` before training starts an inference engine under DeepSpeed, which
    requires ZeRO-3. The student is therefore evaluated inside `train`, when everything is wrapped.
    """

    evaluates_last = True

    def build(self, context: RankContext) -> Any:
        from .teacher_cache import CachedTeacherDataset, TeacherCache
        from .trainer import DistillationTrainer

        prepare_model_directory_save(context.arguments)
        settings, common = self.settings, context.trainer_arguments()
        student = trained_model(self.student, settings, context)
        if settings.teacher_cache is None:
            teacher: Any = loaded_teacher(self.teacher, settings.teacher_revision, self, context)
        else:
            teacher = TeacherCache.open(settings.teacher_cache)
            for name in ("train_dataset", "eval_dataset"):
                common[name] = CachedTeacherDataset(common[name], teacher)
        return planned_parallelism(context.plan).make_trainer(
            trainer_class=DistillationTrainer,
            model=student,
            teacher=teacher,
            teacher_placement=self.placements["teacher"],
            distillation=settings.distillation(self.vocab_size),
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


logger = logging.getLogger(__name__)


def distill(
    teacher: str,
    student: str,
    output_dir: str | Path,
    *,
    resume: bool = False,
    force: bool = False,
    **settings: Any,
) -> DistillationOutcome:
    """Distill a teacher into a student: plan, launch ranks, evaluate before and after, save with a model card.

    Nothing is printed on stdout; messages and progress are logged. Example:
    ``shardwright.distill("teacher", "student", "distilled", dataset="python-help", max_steps=100).result.after``

    Args:
        teacher: Hub id or directory; weights are read from safetensors.
        student: Hub id or directory, or a `config.json` for random weights.
        output_dir: Directory for the student, with plan and report.
        resume: Resume from the last checkpoint in `output_dir`.
        force: Write into a directory that is not empty.
        settings: Fields of `DistillSettings`, which are the flags of `shardwright distill`.

    Returns:
        All measurements; `to_dict()` is what `--format json` prints.

    Raises:
        UsageError: all errors of the settings together.
        RefusedInputError: files of a model are corrupt or unsafe.
        DoesNotFitError: no layout fits.
        ShardwrightError: a rank failed; names the rank and its error.
    """
    request = RunRequest(output_dir=Path(output_dir), resume=resume, force=force)
    with redirect_stdout(sys.stderr):
        return run_training(prepare_distillation(settings_of(DistillSettings, settings), teacher, student, request))


@dataclass(frozen=True, kw_only=True)
class PreparedDistillation(PreparedTraining[DistillationOutcome]):
    """A checked distillation, ready to launch; nothing has been written."""

    settings: DistillSettings
    teacher: str
    student: str
    vocab_size: int
    """Tokens that both tokenizers have."""

    kind = "distill"

    @property
    def models(self) -> dict[str, str]:
        runs_teacher = self.settings.teacher_cache is None
        return {"revision": self.student} | ({"teacher_revision": self.teacher} if runs_teacher else {})

    @property
    def own_file_names(self) -> tuple[str, ...]:
        return model_file_names(self.settings)

    @property
    def own_arguments(self) -> dict[str, Any]:
        """Keys of `TrainingArguments` that evaluate the student before its first step."""
        return {"eval_on_start": True}

    def job(self, common: Mapping[str, Any], work: Path) -> DistillJob:
        cache = self.settings.teacher_cache
        own: dict[str, Any] = {"teacher": self.teacher, "student": self.student, "vocab_size": self.vocab_size}
        if cache:
            own["settings"] = common["settings"].model_copy(update={"teacher_cache": str(Path(cache).absolute())})
        return DistillJob(**{**common, **own})

    def outcome(self, result: Mapping[str, Any], common: Mapping[str, Any]) -> DistillationOutcome:
        measured = DistillationResult(**result)
        return DistillationOutcome(teacher=self.teacher, student=self.student, result=measured, **common)


def prepare_distillation(
    settings: DistillSettings, teacher: str, student: str, request: RunRequest
) -> PreparedDistillation:
    """Check settings, models and data, report all errors together, and plan.

    Raises:
        UsageError: all errors together.
        RefusedInputError: files of a model are corrupt or unsafe.
        PlanDoesNotFitError: no layout fits.
    """
    errors = distill_settings_errors(settings)
    sources = {"the teacher": teacher, "the student": student, "the teacher cache": settings.teacher_cache}
    errors += run_output_errors(request, sources | {"the dataset": local_place(settings.dataset)})
    with collecting(errors):
        settings.distillation(None)
    hardware = loaded_student = loaded_teacher = tokenizer = samples = None
    vocab_size = 0
    with collecting(errors):
        hardware = chosen_hardware(settings)
        errors += [] if request.dry_run else launch_errors(hardware, request.place)
    with collecting(errors):
        loaded_student = load_model_spec(student, revision=settings.revision)
        refuse_other_formats(Path(student), where="student", fix=CONVERTED)
    with collecting(errors):
        loaded_teacher = load_second_model_spec("teacher", teacher, revision=settings.teacher_revision)
    if loaded_student is not None and loaded_teacher is not None:
        with collecting(errors):
            settings, tokenizer, vocab_size = _with_tokenizers(settings, teacher, student)
    if tokenizer is not None and settings.dataset:
        with collecting(errors):
            samples = named_samples(settings, tokenizer)
            if settings.teacher_cache is not None and Path(settings.teacher_cache).is_dir():
                samples = _stored(samples, settings, teacher)
    if errors:
        raise UsageError(errors)
    assert hardware and loaded_student and loaded_teacher and tokenizer and samples, "what failed left an error"
    own, other = loaded_student.spec.parameter_count, loaded_teacher.spec.parameter_count
    if own > other:
        logger.info(f"the student has {own:,} parameters and the teacher {other:,}: are they swapped?")
    placement = settings.teacher_placement if settings.teacher_cache is None else "cached"
    job = training_job(settings, hardware, teacher=loaded_teacher.spec, teacher_placement=placement)
    plan = select_plan(loaded_student, hardware, job)
    settings = settings.with_optimizer(plan.job)
    models = [(loaded_student.config, plan.model.attention)]
    if settings.teacher_cache is None:
        models.append((loaded_teacher.config, loaded_teacher.spec.attention))
    samples = packed_if_possible(samples, settings, plan, models)
    return PreparedDistillation(
        request=request,
        settings=settings,
        teacher=teacher,
        student=student,
        plan=plan,
        samples=samples,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
    )


def _with_tokenizers(settings: DistillSettings, teacher: str, student: str) -> tuple[DistillSettings, Any, int]:
    """Return settings with a supported sequence length, the student's tokenizer and the tokens that both have."""
    own = StartingModel(model=student, revision=settings.revision)
    config = load_config(own)
    width = config.get_text_config().vocab_size
    other = StartingModel(model=teacher, revision=settings.teacher_revision)
    teacher_config = load_config(other)
    fitting = with_positions(settings, config, teacher_config)
    taught = load_tokenizer(other, teacher_config.get_text_config().vocab_size)
    if is_without(Path(student), TOKENIZER_FILES) and not is_without(Path(teacher), TOKENIZER_FILES):
        largest = max(taught.get_vocab().values())
        if largest >= width:
            rule = f"the student has no tokenizer, and the teacher's has ids up to {largest}"
            fix = "use a student with a larger vocabulary or its own tokenizer"
            raise UsageError(ConfigError(where="student: vocab_size", value=width, rule=rule, fix=fix))
        # A student without a tokenizer gets the teacher's.
        tokenizer = taught
    else:
        tokenizer = load_tokenizer(own, width)
    set_chat_template(tokenizer, settings.chat_template)
    return fitting, tokenizer, agreed_vocab_size(tokenizer, taught, roles=("student", "teacher"))


def _stored(samples: Samples, settings: DistillSettings, teacher: str) -> Samples:
    """Check that a cache of this teacher has all training samples; keep the held-out samples that it has."""
    from .teacher_cache import TeacherCache, key_errors, weights_identity

    where = f"teacher_cache {settings.teacher_cache}"
    cache = TeacherCache.open(settings.teacher_cache or "")
    config = load_config(StartingModel(model=teacher, revision=settings.teacher_revision))
    expected = replace(cache.key, weights=weights_identity(teacher, settings.teacher_revision, config))
    if errors := key_errors(cache.key, expected, where):
        raise RefusedInputError(errors)
    if settings.temperature not in cache.key.temperatures:
        stored = ", ".join(f"{temperature:g}" for temperature in cache.key.temperatures)
        rule = f"has temperatures {stored}, not {settings.temperature:g}"
        errors.append(ConfigError(where=where, rule=rule, fix="use one of them, or cache again with --temperature"))
    missing = sum(sample["input_ids"] not in cache for sample in samples.train)
    known = [sample for sample in samples.evaluation if sample["input_ids"] in cache]
    fix = "cache the same dataset with the same --seq-len, --chat-template, --seed and --evaluation-fraction"
    if missing:
        rule = f"lacks {missing} of {len(samples.train)} training samples"
        errors.append(ConfigError(where=where, rule=rule, fix=fix))
    elif not known:
        rule = "has none of the held-out samples, so the student could not be compared with its teacher"
        errors.append(ConfigError(where=where, rule=rule, fix=fix))
    if errors:
        raise UsageError(errors)
    statistics = replace(samples.statistics, evaluation_samples=len(known))
    return replace(samples, evaluation=known, statistics=statistics)
