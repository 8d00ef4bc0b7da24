"""Checks of a distillation before anything is launched or written: all that can be wrong, told together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....ds_configs.specs.errors import Fault, UsageError, collecting
from ....plugins.launching.notes import Notify
from ....plugins.planning.from_names import plan_job
from ....plugins.planning.models import LoadedModel, load_model_spec
from ...data.models import TOKENIZER_FILES, StartingModel, load_config, load_tokenizer, with_positions
from ...data.samples import Samples
from ...data.sources import local_place
from ...runs.inputs import (
    chosen_hardware,
    evenly_held_out,
    launch_faults,
    named_samples,
    trained_teacher,
    training_job,
)
from ...runs.run import PreparedTraining
from ...runs.settings import is_without, run_output_faults
from .run_files import TEACHER_TOKENIZER, DistillSettings, WorkerJob, distill_settings_faults, distillation_config
from .run_report import DistillationOutcome, DistillationResult, distillation_file_names, distillation_files


@dataclass(frozen=True, kw_only=True)
class PreparedDistillation(PreparedTraining[DistillationOutcome]):
    """A distillation that can be launched; nothing was written for it."""

    settings: DistillSettings
    """What was asked for."""
    teacher: str
    """Hub id or directory of the teacher."""
    student: str
    """Hub id, directory or `config.json` of the student."""
    teacher_tokenizer: Any
    """The teacher's tokenizer; `tokenizer` is the student's."""
    vocab_size: int | None
    """Tokens that both tokenizers have; `None` across tokenizers."""

    kind = "distill"
    worker = f"{__package__}.worker"

    @property
    def models(self) -> dict[str, str]:
        """Models that ranks load weights of, by the setting that holds the revision of each."""
        return {"revision": self.student} | ({} if self.settings.teacher_cache else {"teacher_revision": self.teacher})

    @property
    def own_file_names(self) -> tuple[str, ...]:
        """Files that a run writes, beside the plan's, the model's weights and checkpoints."""
        return distillation_file_names(self.settings)

    @property
    def own_arguments(self) -> dict[str, Any]:
        """Keys of `TrainingArguments` by which the student is measured before its first step."""
        return {"eval_on_start": True}

    def job(self, common: Mapping[str, Any], work: Path, *, resume: bool, notify: Notify) -> WorkerJob:
        """Leave the teacher's tokenizer, and return what the ranks are told."""
        self.teacher_tokenizer.save_pretrained(str(work / TEACHER_TOKENIZER))
        cache = self.settings.teacher_cache
        own: dict[str, Any] = {"teacher": self.teacher, "student": self.student, "vocab_size": self.vocab_size}
        if cache:
            own["settings"] = common["settings"].model_copy(update={"teacher_cache": str(Path(cache).absolute())})
        return WorkerJob(**{**common, **own})

    def report(
        self, result: Mapping[str, Any], common: Mapping[str, Any]
    ) -> tuple[DistillationOutcome, dict[str, str | bytes]]:
        """Return the outcome and the files that report it."""
        found = DistillationOutcome(
            teacher=self.teacher, student=self.student, result=DistillationResult(**result), **common
        )
        return found, distillation_files(found)


def prepare_distillation(
    settings: DistillSettings, teacher: str, student: str, output_dir: Path, *, notify: Notify, **how: Any
) -> PreparedDistillation:
    """Read everything that can be wrong, report all faults together, and plan.

    Args:
        settings: What to do.
        teacher: Hub id or directory.
        student: Hub id, directory, or `config.json` for random weights.
        output_dir: Where results will go.
        notify: Receives remarks.
        how: `dry_run`, `force` and `resume`; `place` of this machine, where it is one of several.

    Raises:
        UsageError: all faults together.
        RefusedInputError: files of a model are corrupt or unsafe.
        PlanDoesNotFitError: no layout fits.
    """
    dry_run, place = (how.get(name) for name in ("dry_run", "place"))
    faults = distill_settings_faults(settings)
    sources = {"the teacher": teacher, "the student": student, "the teacher cache": settings.teacher_cache}
    faults += run_output_faults(output_dir, how, sources | {"the dataset": local_place(settings.dataset)})
    with collecting(faults):
        distillation_config(settings, None)
    hardware = loaded_student = loaded_teacher = tokenizers = samples = None
    with collecting(faults):
        hardware = chosen_hardware(settings)
        faults += [] if dry_run else launch_faults(hardware, place)
    with collecting(faults):
        loaded_student = load_model_spec(student, revision=settings.revision)
    with collecting(faults):
        loaded_teacher = trained_teacher(teacher, settings.teacher_revision)
    if loaded_student is not None and loaded_teacher is not None:
        with collecting(faults):
            settings, tokenizers = _with_tokenizers(settings, teacher, student)
    if tokenizers is not None and settings.dataset:
        with collecting(faults):
            samples = named_samples(settings, tokenizers[0])
            if settings.teacher_cache is not None and Path(settings.teacher_cache).is_dir():
                samples = _stored(samples, settings, teacher, tokenizers)
    if faults:
        raise UsageError(faults)
    assert hardware and loaded_student and loaded_teacher and tokenizers and samples, "what failed left a fault"
    _warn_of_sizes(loaded_student, loaded_teacher, notify)
    placement = "cached" if settings.teacher_cache else settings.teacher_placement
    job = training_job(settings, hardware, teacher=loaded_teacher.spec, teacher_placement=placement)
    plan = plan_job(loaded_student, hardware, job, notify=notify)
    if faults := settings.engine_faults(plan.chosen.strategy.engine):
        raise UsageError(faults)
    return PreparedDistillation(
        place=place,
        settings=_with_prompts(settings, samples),
        teacher=teacher,
        student=student,
        plan=plan,
        samples=evenly_held_out(samples, plan, settings),
        tokenizer=tokenizers[0],
        teacher_tokenizer=tokenizers[1],
        vocab_size=tokenizers[2],
    )


def _with_tokenizers(
    settings: DistillSettings, teacher: str, student: str
) -> tuple[DistillSettings, tuple[Any, Any, int | None]]:
    """Return the settings with samples that fit; the tokenizers of student and teacher, and how many tokens both have.

    A student without one gets the teacher's.
    """
    own = StartingModel(model=student, revision=settings.revision)
    other = StartingModel(model=teacher, revision=settings.teacher_revision)
    config, teacher_config = load_config(own), load_config(other)
    # Across tokenizers the teacher reads the same text in tokens of its own, more or fewer.
    fitting = with_positions(settings, config, *(() if settings.cross_tokenizer else (teacher_config,)))
    width = config.get_text_config().vocab_size
    taught = load_tokenizer(other, teacher_config.get_text_config().vocab_size)
    if is_without(Path(student), TOKENIZER_FILES) and not is_without(Path(teacher), TOKENIZER_FILES):
        largest = max(taught.get_vocab().values())
        if largest >= width:
            rule = f"the student has no tokenizer, and the teacher's has ids up to {largest}"
            fix = "give the student a larger vocabulary or a tokenizer of its own"
            raise UsageError(Fault(where="student: vocab_size", value=width, rule=rule, fix=fix))
        tokenizer = taught
    else:
        tokenizer = load_tokenizer(own, width)
    if settings.cross_tokenizer:
        return fitting, (tokenizer, taught, None)
    from ...data.tokenizer_agreement import agreed_vocab_size

    return fitting, (tokenizer, taught, agreed_vocab_size(tokenizer, taught))


def _stored(samples: Samples, settings: DistillSettings, teacher: str, tokenizers: tuple[Any, Any, Any]) -> Samples:
    """Check that a cache is this teacher's and knows what is trained on; keep the held-out samples that it knows."""
    from ..cache.cache_writer import template_hash, tokenizer_hash, weights_identity
    from ..cache.teacher_cache import TeacherCache, read_manifest

    directory = Path(settings.teacher_cache or "")
    where = f"teacher_cache {directory}"
    key, _ = read_manifest(directory)
    config = load_config(StartingModel(model=teacher, revision=settings.teacher_revision))
    expected = replace(
        key,
        weights=weights_identity(teacher, settings.teacher_revision, config),
        tokenizer=tokenizer_hash(tokenizers[1]),
        template=template_hash(tokenizers[0], used=samples.statistics.kind == "messages"),
    )
    cache = TeacherCache.open(directory, expected)
    layout, faults = cache.key.layout, []
    if settings.temperature not in layout.temperatures:
        rule = (
            f"holds temperatures {', '.join(f'{one:g}' for one in layout.temperatures)}, not {settings.temperature:g}"
        )
        faults.append(Fault(where=where, rule=rule, fix="use one of them, or cache again with --temperature"))
    missing = sum(sample["input_ids"] not in cache for sample in samples.train)
    if missing:
        rule = f"lacks {missing} of {len(samples.train)} training samples"
        fix = "cache the same dataset with the same --seq-len"
        faults.append(Fault(where=where, rule=rule, fix=fix))
    if faults:
        raise UsageError(faults)
    known = [sample for sample in samples.evaluation if sample["input_ids"] in cache]
    if not known:
        rule = "holds none of the held-out samples, so the student could not be compared with its teacher"
        raise UsageError(Fault(where=where, rule=rule, fix="cache the dataset again, held-out samples included"))
    return replace(samples, evaluation=known)


def _with_prompts(settings: DistillSettings, samples: Samples) -> DistillSettings:
    """Every token of plain text has a label, so the student goes on from the first half of a sample."""
    if not settings.on_policy or settings.prompt_tokens is not None or samples.statistics.kind != "text":
        return settings
    return settings.model_copy(update={"prompt_tokens": settings.seq_len // 2})


def _warn_of_sizes(student: LoadedModel, teacher: LoadedModel, notify: Notify) -> None:
    own, taught_by = student.spec.parameter_count, teacher.spec.parameter_count
    if own > taught_by:
        notify(f"the student has {own:,} parameters and the teacher {taught_by:,}: are they swapped?")
