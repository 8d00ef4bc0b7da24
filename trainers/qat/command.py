"""`shardwright qat`: check settings, plan and calibrate; train on every rank; the outcome."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ...ds_configs.quantization.layers import LinearLayer, scheme_warnings
from ...ds_configs.quantization.scheme import QuantizationScheme
from ...ds_configs.specs.errors import UsageError, collecting
from ...ds_configs.specs.settings import settings_of
from ...plugins.planning import load_model_spec
from ...plugins.planning import plan as select_plan
from ...plugins.transformers.loading import refuse_nonfinite_weights
from ...plugins.transformers.meta_model import QuantizationSource, build_meta_model, open_source
from ..data.chat import set_chat_template
from ..data.models import StartingModel, load_config, load_tokenizer, with_positions
from ..data.samples import packed_if_possible
from ..data.sources import local_place
from ..parallel.planned import planned_parallelism
from ..runs.inputs import (
    chosen_hardware,
    last_checkpoint,
    launch_errors,
    named_samples,
    optimizer_steps,
    run_output_errors,
    training_job,
)
from ..runs.ranks import (
    RankContext,
    TrainingTask,
    held_out_cross_entropy,
    loaded_teacher,
    read_logged,
    trained_model,
)
from ..runs.run import LaunchedOutcome, PreparedTraining, StepResult, losses, run_training
from ..runs.settings import METRICS_FILE, REPORT_FILE, RunRequest
from ..verify import PROBE_ROWS, PROBE_TOKENS
from .settings import (
    LabelLoss,
    QATConfig,
    QATJob,
    QATOptions,
    QATSettings,
    qat_settings_errors,
)

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from .attach import Attachment

SCHEMA_VERSION = 1
"""Version of `qat --format json`."""
FILES = (
    *(REPORT_FILE, METRICS_FILE),
    *("config.json", "model.safetensors", "tokenizer.json", "qat_report.json"),
)
"""Files that a run writes into its output directory, in addition to the plan's."""
_STAGES = {
    "dense": "before, in full precision",
    "rounded": "before, rounded to the nearest",
    "trained": "trained, as exported",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class QATResult(StepResult):
    """Measurements of the ranks; the content of `result.json`."""

    dense: float | None
    """Cross-entropy on the held-out samples before the first step, in full precision, in nats per token."""
    rounded: float | None
    """The same of the untrained model, rounded to the nearest; `None` if ranges were estimated during training."""
    trained: float
    """The same of the trained model with the quantized values of its checkpoint."""
    weight_difference: float | None
    """Largest difference between a weight of the trained model and that of the checkpoint; `None`: not compared."""
    logit_difference: float | None
    """Likewise between logits, the checkpoint being loaded in a fresh process."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class QATOutcome(LaunchedOutcome):
    """Result of a quantization-aware training that succeeded."""

    settings: QATSettings
    model: str
    """Hub id or directory that training started from."""
    scheme: QuantizationScheme
    """Formats of the checkpoint."""
    layers: int
    """Number of quantized matrices."""
    result: QATResult

    def measures(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return the results of the trained model, and before training rounded and in full precision."""
        rows = []
        for stage, name in reversed(_STAGES.items()):
            rows.append((name, *losses(getattr(self.result, stage))))
        return ("", "cross-entropy, nats per token", "perplexity"), rows

    def to_dict(self) -> dict[str, Any]:
        result = self.result
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "teacher": None if self.settings.teacher is None else self.model,
            "scheme": asdict(self.scheme) | {"format": self.scheme.format},
            "quantized_layers": self.layers,
            **self.where_and_what(),
            "cross_entropy": {stage: getattr(result, stage) for stage in _STAGES},
            "weight_difference": result.weight_difference,
            "logit_difference": result.logit_difference,
            **self.speed(),
        }


DENSE, ROUNDED = "dense_cross_entropy", "rounded_cross_entropy"
"""Entries of the Trainer's log, which checkpoints contain, so that a resumed run reads those of its first part."""


class QATTask(QATJob, TrainingTask):
    """Quantization-aware training of a model."""

    def build(self, context: RankContext) -> Any:
        """Create a Trainer that rounds the model, and evaluates it before the first step."""
        from transformers import TrainerCallback

        from .attach import attachment_of
        from .callback import QATCallback

        model = trained_model(self.model, self.settings, context, reads_weights=True)
        options = {name: getattr(self.settings, name) for name in QATOptions.model_fields}
        callback = QATCallback(stored_dtype=self.stored_dtype, **options)
        common = context.trainer_arguments() | {"callbacks": [callback]}
        if self.settings.teacher is not None:
            from ..distillation.trainer import DistillationTrainer

            common |= {
                "trainer_class": DistillationTrainer,
                "teacher": loaded_teacher(self.model, self.settings.revision, self, context),
                "teacher_placement": self.placements["teacher"],
                "distillation": self.settings.distillation(self.vocab_size),
            }
        trainer = planned_parallelism(context.plan).make_trainer(model=model, **common)

        class StartingPoint(TrainerCallback):
            """Evaluates the model before its first step, in full precision and rounded.

            It must come after `QATCallback`. With ranges that are observed during training there is no rounded
            evaluation.
            """

            def on_train_begin(
                self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
            ) -> None:
                if state.global_step:
                    return
                attachment = attachment_of(trainer.model)
                assert attachment is not None, "QATCallback came first"
                with _evaluated(attachment, rounded=False):
                    entries = {DENSE: held_out_cross_entropy(trainer)}
                if not attachment.ranges:
                    with _evaluated(attachment, rounded=True):
                        entries[ROUNDED] = held_out_cross_entropy(trainer)
                trainer.log(entries)

        trainer.add_callback(StartingPoint())
        return trainer

    def metrics(self, trainer: Any, context: RankContext) -> dict[str, Any]:
        """Evaluate, write the checkpoint, and return cross-entropies and differences of the checkpoint."""
        from .callback import QATCallback

        refuse_nonfinite_weights(trainer.model, what="the trained model", allowed=self.settings.allow_nonfinite)
        trained, held_out = held_out_cross_entropy(trainer), context.samples[1]
        probe = [
            list(sample["input_ids"][:PROBE_TOKENS])
            for sample in held_out.select(range(min(PROBE_ROWS, len(held_out))))
        ]
        callbacks = trainer.callback_handler.callbacks
        callback = next(callback for callback in callbacks if isinstance(callback, QATCallback))
        exported = callback.export(
            trainer,
            self.output_dir,
            tokenizer=context.tokenizer,
            source=self.source_directory,
            probe=probe,
            force=True,
        )
        dense, rounded = read_logged(trainer.state, DENSE), read_logged(trainer.state, ROUNDED)
        return {
            "dense": dense,
            "rounded": rounded,
            "trained": trained,
            "weight_difference": exported.largest_weight_difference,
            "logit_difference": exported.largest_logit_difference,
        }


@contextmanager
def _evaluated(attachment: Attachment, *, rounded: bool) -> Iterator[None]:
    """Compute in full precision, or as if the model were quantized now, by rounding to nearest."""
    state = attachment.state
    enabled, rule = state.enabled, state.rule
    state.enabled, state.rule = rounded, "minmax" if rule == "learned" else rule
    try:
        yield
    finally:
        state.enabled, state.rule = enabled, rule


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
    kind = "qat"
    own_file_names = FILES

    @property
    def models(self) -> dict[str, str]:
        return {"revision": self.source.name}

    @property
    def least_bytes(self) -> int:
        """Lower bound of the checkpoint's size: four bits per weight."""
        return super().least_bytes // 4

    def job(self, common: Mapping[str, Any], work: Path) -> QATJob:
        return QATJob(
            model=self.source.name,
            source_directory=str(self.source.directory.absolute()),
            stored_dtype=self.source.dtype,
            vocab_size=max(self.tokenizer.get_vocab().values()) + 1,
            **common,
        )

    def outcome(self, result: Mapping[str, Any], common: Mapping[str, Any]) -> QATOutcome:
        return QATOutcome(
            model=self.source.name,
            scheme=self.config.rounded_scheme,
            layers=len(self.layers),
            result=QATResult(**result),
            **common,
        )


def prepare_qat(settings: QATSettings, model: str, request: RunRequest) -> PreparedQAT:
    """Check settings, model and dataset, report all errors together, and plan.

    Raises:
        UsageError: all errors together.
        RefusedInputError: files of a model are corrupt, unsafe or already quantized.
        PlanDoesNotFitError: no layout fits.
    """
    from .attach import attach
    from .callback import resume_errors, step_errors

    errors = qat_settings_errors(settings)
    errors += run_output_errors(request, {"the model": model, "the dataset": local_place(settings.dataset)})
    hardware = source = config = attachment = tokenizer = samples = None
    with collecting(errors):
        config = settings.config()
    if settings.teacher is not None and settings.loss not in get_args(LabelLoss):
        with collecting(errors):
            settings.distillation(None)
    with collecting(errors):
        hardware = chosen_hardware(settings)
        errors += [] if request.dry_run else launch_errors(hardware, request.place)
    with collecting(errors):
        source = open_source(model, revision=settings.revision)
    if source is not None and config is not None:
        with collecting(errors):
            config = settings.config(stored_dtype=source.dtype)
            # Attach to the model without its weights: the ranks would fail where this fails.
            meta = build_meta_model(source.config, source=source.name)
            attachment = attach(meta, config)
            last = last_checkpoint(request.output_dir) if request.resume else None
            errors += [] if last is None else resume_errors(attachment, last, demands_record=True)
    if source is not None:
        with collecting(errors):
            starting = StartingModel(model=model, revision=settings.revision)
            starting_config = load_config(starting)
            settings = with_positions(settings, starting_config)
            tokenizer = load_tokenizer(starting, starting_config.get_text_config().vocab_size)
            set_chat_template(tokenizer, settings.chat_template)
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
    if settings.teacher is not None:
        placement = {"teacher": own.spec, "teacher_placement": settings.teacher_placement}
    plan = select_plan(own, hardware, training_job(settings, hardware, **placement))
    settings = settings.with_optimizer(plan.job)
    # Some errors depend on the layout and the number of steps.
    layout, packed = plan.chosen.layout, samples
    with collecting(errors):
        packed = packed_if_possible(packed, settings, plan, [(own.config, plan.model.attention)])
    errors += step_errors(attachment, optimizer_steps(settings, layout, len(packed.train)))
    if errors:
        raise UsageError(errors)
    return PreparedQAT(
        request=request,
        settings=settings,
        source=source,
        config=config,
        layers=attachment.layers,
        plan=plan,
        samples=packed,
        tokenizer=tokenizer,
    )
