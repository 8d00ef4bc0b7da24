"""`distill`: check settings, models and data, plan, and run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError, collecting
from ....ds_configs.specs.settings import settings_of
from ....plugins.huggingface_hub import TOKENIZER_FILES
from ....plugins.planning import load_model_spec
from ....plugins.planning import plan as select_plan
from ....plugins.transformers.sound_model import refuse_other_formats
from ...data.chat import set_chat_template
from ...data.models import StartingModel, agreed_vocab_size, load_config, load_tokenizer, with_positions
from ...data.samples import Samples, packed_if_possible
from ...data.sources import local_place
from ...runs.inputs import (
    CONVERTED,
    chosen_hardware,
    is_without,
    launch_errors,
    named_samples,
    run_output_errors,
    trained_teacher,
    training_job,
)
from ...runs.run import PreparedTraining, run_training
from ...runs.settings import RunRequest
from .report import DistillationOutcome, DistillationResult, distillation_file_names
from .settings import DistillJob, DistillSettings, distill_settings_errors, distillation_config

logger = logging.getLogger(__name__)


def distill(
    teacher: str | None,
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
        teacher: Hub id or directory; weights are read from safetensors. With `teacher_url`, the name of a served model,
            or `None` for the only one.
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
        return {"revision": self.student} | ({"teacher_revision": self.teacher} if self.settings.runs_teacher else {})

    @property
    def own_file_names(self) -> tuple[str, ...]:
        return distillation_file_names(self.settings)

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
    settings: DistillSettings, teacher: str | None, student: str, request: RunRequest
) -> PreparedDistillation:
    """Check settings, models and data, report all errors together, and plan.

    `teacher` is the name of a served model, or `None`, with `settings.teacher_url`.

    Raises:
        UsageError: all errors together.
        RefusedInputError: files of a model are corrupt or unsafe.
        PlanDoesNotFitError: no layout fits.
    """
    errors = distill_settings_errors(settings)
    is_served = settings.teacher_url is not None
    sources = {
        "the teacher": None if is_served else teacher,
        "the student": student,
        "the teacher cache": settings.teacher_cache,
    }
    errors += run_output_errors(request, sources | {"the dataset": local_place(settings.dataset)})
    with collecting(errors):
        distillation_config(settings, None)
    hardware = loaded_student = loaded_teacher = tokenizer = samples = None
    vocab_size = 0
    with collecting(errors):
        hardware = chosen_hardware(settings)
        errors += [] if request.dry_run else launch_errors(hardware, request.place)
    with collecting(errors):
        loaded_student = load_model_spec(student, revision=settings.revision)
        refuse_other_formats(Path(student), where="student", fix=CONVERTED)
    if not is_served:
        with collecting(errors):
            if teacher is None:
                rule, fix = "is missing", "pass TEACHER STUDENT, or the address of a served teacher with --teacher-url"
                raise UsageError(ConfigError(where="teacher", rule=rule, fix=fix))
            loaded_teacher = trained_teacher(teacher, settings.teacher_revision)
    if loaded_student is not None and (loaded_teacher is not None or is_served):
        with collecting(errors):
            settings, tokenizer, vocab_size = _with_tokenizers(settings, None if is_served else teacher, student)
    if tokenizer is not None and settings.dataset:
        with collecting(errors):
            samples = named_samples(settings, tokenizer)
            if teacher is not None and settings.teacher_cache is not None and Path(settings.teacher_cache).is_dir():
                samples = _stored(samples, settings, teacher)
    if is_served and tokenizer is not None and samples is not None and not errors:
        teacher = _served_name(settings, teacher, tokenizer, vocab_size, samples)
    if errors:
        raise UsageError(errors)
    assert hardware and loaded_student and tokenizer and samples and teacher, "what failed left an error"
    # A server holds the teacher: of its sizes only the vocabulary counts here, which is the student's.
    spec = replace(loaded_student.spec, name=teacher) if loaded_teacher is None else loaded_teacher.spec
    own, other = loaded_student.spec.parameter_count, spec.parameter_count
    if own > other:
        logger.info(f"the student has {own:,} parameters and the teacher {other:,}: are they swapped?")
    if settings.on_policy and settings.prompt_tokens is None and samples.statistics.kind == "text":
        # Every token of plain text has a label, so the student completes the first half of a sample.
        settings = settings.model_copy(update={"prompt_tokens": settings.seq_len // 2})
    placement = settings.teacher_placement if settings.runs_teacher else "cached"
    job = training_job(settings, hardware, teacher=spec, teacher_placement=placement)
    plan = select_plan(loaded_student, hardware, job, notify=logger.info)
    settings = settings.with_optimizer(plan.job)
    if errors := settings.engine_errors(plan.chosen.layout.engine):
        raise UsageError(errors)
    models = [(loaded_student.config, plan.model.attention)]
    if settings.runs_teacher and loaded_teacher is not None:
        models.append((loaded_teacher.config, loaded_teacher.spec.attention))
    obstacle = None
    if settings.on_policy:
        obstacle = "the student completes the prompt of one conversation per row (--on-policy)"
    samples = packed_if_possible(samples, settings, plan, models, obstacle=obstacle)
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


def _with_tokenizers(settings: DistillSettings, teacher: str | None, student: str) -> tuple[DistillSettings, Any, int]:
    """Return settings with a supported sequence length, the student's tokenizer and the tokens that both have.

    Without a teacher, because a server has it, the tokens are the student's.
    """
    own = StartingModel(model=student, revision=settings.revision)
    config = load_config(own)
    width = config.get_text_config().vocab_size
    if teacher is None:
        tokenizer = load_tokenizer(own, width)
        set_chat_template(tokenizer, settings.chat_template)
        return with_positions(settings, config), tokenizer, int(max(tokenizer.get_vocab().values())) + 1
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


def _served_name(settings: DistillSettings, name: str | None, tokenizer: Any, vocab_size: int, samples: Samples) -> str:
    """Return the name of the served model, after requests that check it; raises as `ServedTeacher.check`."""
    from ..served_teacher import ServedTeacher

    assert settings.teacher_url is not None
    served = ServedTeacher(
        settings.teacher_url,
        model=name or "",
        vocab_size=vocab_size,
        top_k=settings.teacher_top_k,
        timeout_seconds=settings.teacher_timeout,
        allow_remote_http=settings.allow_remote_http,
    )
    texts = [tokenizer.decode(sample["input_ids"][:512]) for sample in (*samples.train[:2], *samples.evaluation[:2])]
    longest = settings.seq_len
    if settings.on_policy:
        prompt = settings.prompt_tokens or (longest // 2 if samples.statistics.kind == "text" else longest)
        longest = max(longest, prompt + settings.max_new_tokens)
    served.check(tokenizer, longest_tokens=longest, texts=texts, chosen=name)
    return served.model


def _stored(samples: Samples, settings: DistillSettings, teacher: str) -> Samples:
    """Check that a cache of this teacher has all training samples; keep the held-out samples that it has."""
    from ..teacher_cache import TeacherCache, key_errors, weights_identity

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
