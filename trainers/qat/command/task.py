"""`qat`: checks its settings, plans and calibrates, and defines its job and report."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ....ds_configs.quantization.layers import LinearLayer, scheme_warnings
from ....ds_configs.specs.errors import UsageError, collecting
from ....ds_configs.specs.settings import settings_of
from ....plugins.peft import add_lora
from ....plugins.planning import load_model_spec
from ....plugins.planning import plan as select_plan
from ....plugins.transformers.meta_model import build_meta_model
from ....plugins.transformers.quantized_model import QuantizationSource, open_source
from ...data.chat import set_chat_template
from ...data.models import StartingModel, agreed_vocab_size, load_config, load_tokenizer, with_positions
from ...data.samples import packed_if_possible
from ...data.sources import local_place
from ...runs.inputs import (
    chosen_hardware,
    last_checkpoint,
    launch_errors,
    named_samples,
    optimizer_steps,
    run_output_errors,
    trained_teacher,
    training_job,
)
from ...runs.run import PreparedTraining, run_training
from ...runs.settings import RunRequest
from ..rounding.config import QATConfig
from .report import FILES, QATOutcome, QATResult
from .settings import (
    SELF,
    LabelLoss,
    QATJob,
    QATSettings,
    qat_settings_errors,
    teacher_distance_config,
    teacher_of,
)

logger = logging.getLogger(__name__)


def qat(
    model: str, output_dir: str | Path, *, resume: bool = False, force: bool = False, **settings: Any
) -> QATOutcome:
    """Train a model with the numbers of its quantized checkpoint, and write exactly these numbers.

    Nothing is printed on stdout; warnings and progress are logged. Example:
    ``shardwright.qat("model", "trained-w4", scheme="W4A16", dataset="python-help").result.trained``

    Args:
        model: Hub id or directory; weights are read from safetensors.
        output_dir: Directory of the checkpoint, with plan and report.
        resume: Continue from the last checkpoint in `output_dir`.
        force: Write into a directory that contains other files.
        settings: Fields of `QATSettings`, which are the flags of `shardwright qat`.

    Returns:
        All measurements; `to_dict()` is the output of `--format json`.

    Raises:
        UsageError: all errors in the settings.
        RefusedInputError: files of a model are corrupt, unsafe or already quantized.
        DoesNotFitError: no layout fits.
        ShardwrightError: a rank failed; the message names it and the cause.
    """
    request = RunRequest(output_dir=Path(output_dir), resume=resume, force=force)
    with redirect_stdout(sys.stderr):
        return run_training(prepare_qat(settings_of(QATSettings, settings), model, request))


@dataclass(frozen=True, kw_only=True)
class PreparedQAT(PreparedTraining[QATOutcome]):
    """A quantization-aware training that is ready to launch; nothing has been written for it."""

    settings: QATSettings
    source: QuantizationSource
    """Files of the model."""
    config: QATConfig
    layers: tuple[LinearLayer, ...]
    """Rounded matrices."""
    teacher: str | None
    """Hub id or directory of the teacher; `None` without one."""
    vocab_size: int | None
    """Tokens that model and teacher share; `None` without a teacher."""
    kind = "qat"
    own_file_names = FILES

    @property
    def models(self) -> dict[str, str]:
        return {"revision": self.source.name} | (
            {} if self.teacher is None or self.settings.teacher == SELF else {"teacher_revision": self.teacher}
        )

    @property
    def least_bytes(self) -> int:
        """Lower bound of the checkpoint's size: four bits per weight."""
        return super().least_bytes // 4

    def job(self, common: Mapping[str, Any], work: Path) -> QATJob:
        return QATJob(
            model=self.source.name,
            source_directory=str(self.source.directory.absolute()),
            stored_dtype=self.source.dtype,
            teacher=self.teacher,
            vocab_size=self.vocab_size,
            **common,
        )

    def outcome(self, result: Mapping[str, Any], common: Mapping[str, Any]) -> QATOutcome:
        return QATOutcome(
            model=self.source.name,
            teacher=self.teacher,
            scheme=self.config.rounded_scheme,
            layers=len(self.layers),
            result=QATResult(**result),
            **common,
        )


def prepare_qat(settings: QATSettings, model: str, request: RunRequest) -> PreparedQAT:
    """Check settings, model and dataset, report all errors together, and plan.

    Args:
        settings: All settings.
        model: Hub id or directory.
        request: Output directory, resumption and machines.

    Raises:
        UsageError: all errors together.
        RefusedInputError: files of a model are corrupt, unsafe or already quantized.
        PlanDoesNotFitError: no layout fits.
    """
    from ..callback import resume_errors, step_errors
    from ..rounding.attach import attach

    errors, named = qat_settings_errors(settings), teacher_of(settings, model)
    sources = {"the model": model, "the teacher": None if settings.teacher == SELF else settings.teacher}
    sources["the dataset"] = local_place(settings.dataset)
    errors += run_output_errors(request, sources)
    hardware = source = config = attachment = tokenizer = vocab_size = samples = teacher = None
    with collecting(errors):
        config = settings.config()
    if settings.teacher is not None and settings.loss not in get_args(LabelLoss):
        with collecting(errors):
            teacher_distance_config(settings, None)
    with collecting(errors):
        hardware = chosen_hardware(settings)
        errors += [] if request.dry_run else launch_errors(hardware, request.place)
    with collecting(errors):
        if named is not None:
            teacher = trained_teacher(*named)
    with collecting(errors):
        source = open_source(model, revision=settings.revision)
    if source is not None and config is not None:
        with collecting(errors):
            config = settings.config(stored_dtype=source.dtype)
            # Attach to the model without its weights: the ranks would fail where this fails.
            meta = build_meta_model(source.config, source=source.name)
            if settings.method == "lora":
                meta = add_lora(meta, **settings.lora_options(), fp32_adapters=True)
            attachment = attach(meta, config)
            last = last_checkpoint(request.output_dir) if request.resume else None
            errors += [] if last is None else resume_errors(attachment, last, demands_record=True)
    if source is not None:
        with collecting(errors):
            # A sequence length that fits, and the vocabulary that model and teacher share.
            starting = [StartingModel(model=model, revision=settings.revision)]
            starting += [] if named is None else [StartingModel(model=named[0], revision=named[1])]
            configs = [load_config(each) for each in starting]
            settings = with_positions(settings, *configs)
            tokenizer, *others = (
                load_tokenizer(each, own.get_text_config().vocab_size)
                for each, own in zip(starting, configs, strict=True)
            )
            set_chat_template(tokenizer, settings.chat_template)
            if others:
                vocab_size = agreed_vocab_size(tokenizer, others[0], roles=("student", "teacher"))
    if tokenizer is not None and settings.dataset:
        with collecting(errors):
            samples = named_samples(settings, tokenizer)
    if errors:
        raise UsageError(errors)
    assert hardware and source and config and attachment and tokenizer is not None and samples, "failures raise errors"
    for warning in scheme_warnings(attachment.scheme, attachment.layers):
        logger.info(warning)
    own = load_model_spec(model, revision=settings.revision)
    placement: dict[str, Any] = {"loss": "chunked"} if settings.loss == "chunked" else {}
    if teacher is not None:
        placement = {"teacher": teacher.spec, "teacher_placement": settings.teacher_placement}
    plan = select_plan(own, hardware, training_job(settings, hardware, **placement), notify=logger.info)
    settings = settings.with_optimizer(plan.job)
    # Some errors depend on the layout and the number of steps.
    layout, packed = plan.chosen.layout, samples
    models = [(own.config, plan.model.attention)]
    if teacher is not None and teacher.config != own.config:
        models.append((teacher.config, teacher.spec.attention))
    with collecting(errors):
        packed = packed_if_possible(packed, settings, plan, models)
    errors += step_errors(attachment, optimizer_steps(settings, layout, len(packed.train)))
    errors += settings.engine_errors(layout.engine)
    if errors:
        raise UsageError(errors)
    return PreparedQAT(
        request=request,
        settings=settings,
        source=source,
        config=config,
        layers=attachment.layers,
        teacher=None if named is None else named[0],
        plan=plan,
        samples=packed,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
    )
