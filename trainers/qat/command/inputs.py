"""Checks of a quantization-aware training before it is launched or writes anything, told together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....ds_configs.plan.plan import Plan
from ....ds_configs.quantization.layers import LinearLayer, scheme_remarks
from ....ds_configs.quantization.mixtures import mixture_remarks
from ....ds_configs.specs.errors import Fault, UsageError, collecting
from ....plugins.launching.notes import Notify
from ....plugins.peft.lora import add_lora
from ....plugins.planning.from_names import plan_job
from ....plugins.planning.models import load_model_spec
from ....plugins.transformers.meta_model import build_meta_model
from ....plugins.transformers.quantization_source import QuantizationSource, open_source
from ...data.models import StartingModel, load_config, load_tokenizer, with_positions
from ...data.samples import Samples
from ...data.sources import local_place
from ...runs.checkpoints import last_checkpoint
from ...runs.inputs import (
    chosen_hardware,
    evenly_held_out,
    launch_faults,
    named_samples,
    optimizer_steps,
    trained_teacher,
    training_job,
)
from ...runs.run import PreparedTraining
from ...runs.settings import run_output_faults
from ..rounding.config import QATConfig
from .request import (
    RANGES_FILE,
    SELF,
    QATJob,
    QATSettings,
    calibration_faults,
    qat_config,
    qat_settings_faults,
    teacher_distance_config,
    teacher_of,
)
from .run_report import QATOutcome, QATResult, qat_file_names, qat_files

if TYPE_CHECKING:
    from ..rounding.attachment import Attachment


@dataclass(frozen=True, kw_only=True)
class PreparedQAT(PreparedTraining[QATOutcome]):
    """A quantization-aware training that can be launched; nothing was written for it."""

    settings: QATSettings
    """What was asked for."""
    source: QuantizationSource
    """The model's files."""
    config: QATConfig
    """The numbers that are trained."""
    layers: tuple[LinearLayer, ...]
    """Matrices that are rounded."""
    teacher: str | None
    """Hub id or directory of the teacher; `None` without one."""
    vocab_size: int | None
    """Tokens that model and teacher have."""
    needs_calibration: bool
    """Whether ranges must be found before training."""

    kind = "qat"
    worker = f"{__package__}.worker"

    @property
    def models(self) -> dict[str, str]:
        """Models that ranks load weights of, by the setting that holds the revision of each."""
        return {"revision": self.source.name} | (
            {} if self.teacher is None or self.settings.teacher == SELF else {"teacher_revision": self.teacher}
        )

    @property
    def least_bytes(self) -> int:
        """Bytes that the checkpoint will take at least: half of one for each weight, as four bits take."""
        return super().least_bytes // 4

    @property
    def own_file_names(self) -> tuple[str, ...]:
        """Files that a run writes, beside the plan's, the model's weights and checkpoints."""
        return qat_file_names(self.settings)

    def job(self, common: Mapping[str, Any], work: Path, *, resume: bool, notify: Notify) -> QATJob:
        """Find the ranges that the ranks begin with, and return what the ranks are told."""
        # A checkpoint holds the ranges that its training began with.
        calibrates = self.needs_calibration and not resume
        if calibrates:
            from .calibration import calibrate

            calibrate(self, work / RANGES_FILE, notify)
        return QATJob(
            model=self.source.name,
            source_directory=str(self.source.directory.absolute()),
            stored_dtype=self.source.dtype,
            teacher=self.teacher,
            vocab_size=self.vocab_size,
            calibrated=calibrates,
            **common,
        )

    def report(self, result: Mapping[str, Any], common: Mapping[str, Any]) -> tuple[QATOutcome, dict[str, str | bytes]]:
        """Return the outcome and the files that report it."""
        found = QATOutcome(
            model=self.source.name,
            teacher=self.teacher,
            scheme=self.config.rounded_scheme,
            layers=len(self.layers),
            result=QATResult(**result),
            **common,
        )
        return found, qat_files(found)


def prepare_qat(settings: QATSettings, model: str, output_dir: Path, *, notify: Notify, **how: Any) -> PreparedQAT:
    """Read everything that can be wrong, report all faults together, and plan.

    Args:
        settings: What to do.
        model: Hub id or directory.
        output_dir: Where results will go.
        notify: Receives remarks.
        how: `dry_run`, `force` and `resume`; `place` of this machine, where it is one of several.

    Raises:
        UsageError: all faults together.
        RefusedInputError: files of a model are corrupt, unsafe or quantized already.
        PlanDoesNotFitError: no layout fits.
    """
    dry_run, resume, place = (how.get(name) for name in ("dry_run", "resume", "place"))
    faults = qat_settings_faults(settings)
    faults += run_output_faults(output_dir, how, _sources(settings, model))
    hardware = source = config = attachment = words = samples = teacher = None
    with collecting(faults):
        config = qat_config(settings)
        faults += calibration_faults(settings, config)
    with collecting(faults):
        teacher_distance_config(settings, None)
    with collecting(faults):
        hardware = chosen_hardware(settings)
        faults += [] if dry_run else launch_faults(hardware, place)
    with collecting(faults):
        teacher = _teacher(settings, model)
    with collecting(faults):
        source = open_source(model, revision=settings.revision)
    if source is not None and config is not None:
        with collecting(faults):
            config = qat_config(settings, stored_dtype=source.dtype)
            attachment = _attached(source, settings, config)
            faults += _checkpoint_faults(attachment, output_dir) if resume else []
    if source is not None:
        with collecting(faults):
            settings, words = _with_tokenizer(settings, model)
    if words is not None and settings.dataset:
        with collecting(faults):
            samples = named_samples(settings, words[0])
    if faults:
        raise UsageError(faults)
    assert hardware and source and config and attachment and words and samples, "what failed left a fault"
    shown = attachment.scheme, attachment.layers
    for remark in (*scheme_remarks(*shown), *mixture_remarks(*shown)):
        notify(remark)
    named = teacher_of(settings, model)
    job = training_job(settings, hardware, **(teacher or {}))
    plan = plan_job(load_model_spec(model, revision=settings.revision), hardware, job, notify=notify)
    _check_plan(plan, settings, attachment, samples)
    return PreparedQAT(
        place=place,
        settings=settings,
        source=source,
        config=config,
        layers=attachment.layers,
        teacher=None if named is None else named[0],
        plan=plan,
        samples=evenly_held_out(samples, plan, settings),
        tokenizer=words[0],
        vocab_size=words[1],
        needs_calibration=bool(attachment.ranges) and not config.observes,
    )


def _sources(settings: QATSettings, model: str) -> dict[str, str | None]:
    teacher = None if settings.teacher == SELF else settings.teacher
    return {"the model": model, "the teacher": teacher, "the dataset": local_place(settings.dataset)}


def _teacher(settings: QATSettings, model: str) -> dict[str, Any] | None:
    """Return the fields of a planned job that belong to a teacher."""
    named = teacher_of(settings, model)
    if named is None:
        return None
    return {"teacher": trained_teacher(*named).spec, "teacher_placement": settings.teacher_placement}


def _attached(source: QuantizationSource, settings: QATSettings, config: QATConfig) -> Attachment:
    """Attach to the model without its weights: every rank will do the same, and fail where this fails.

    Raises:
        UsageError: the scheme does not fit the model.
    """
    from ..rounding.attach import attach

    meta = build_meta_model(source.config, source=source.name)
    if settings.method == "lora":
        meta = add_lora(meta, rank=settings.lora_rank, targets=settings.lora_targets, fp32_adapters=True)
    return attach(meta, config)


def _checkpoint_faults(attachment: Attachment, output_dir: Path) -> list[Fault]:
    from ..checkpoint_record import resume_faults

    last = last_checkpoint(output_dir)
    return [] if last is None else resume_faults(attachment, last, demands_record=True)


def _with_tokenizer(settings: QATSettings, model: str) -> tuple[QATSettings, tuple[Any, int | None]]:
    """Return the settings with samples that fit, and the tokenizer with how many tokens model and teacher share."""
    from ...data.tokenizer_agreement import agreed_vocab_size

    own = StartingModel(model=model, revision=settings.revision)
    config = load_config(own)
    named = teacher_of(settings, model)
    other = None if named is None else StartingModel(model=named[0], revision=named[1])
    teacher_config = None if other is None else load_config(other)
    fitting = with_positions(settings, config, *(() if teacher_config is None else (teacher_config,)))
    tokenizer = load_tokenizer(own, config.get_text_config().vocab_size)
    if other is None or teacher_config is None:
        return fitting, (tokenizer, None)
    taught = load_tokenizer(other, teacher_config.get_text_config().vocab_size)
    return fitting, (tokenizer, agreed_vocab_size(tokenizer, taught))


def _check_plan(plan: Plan, settings: QATSettings, attachment: Attachment, samples: Samples) -> None:
    """Refuse what only shows once the layout and the number of steps are known.

    Raises:
        UsageError: all faults together.
    """
    from ..training_checks import step_faults

    steps = optimizer_steps(settings, plan.chosen.strategy, len(samples.train))
    faults = step_faults(attachment, steps) + settings.engine_faults(plan.chosen.strategy.engine)
    if faults:
        raise UsageError(faults)
