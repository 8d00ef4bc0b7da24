"""Checks of a training before anything is launched or written: all that can be wrong, told together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...ds_configs.plan.files import edited_files
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import Fault, UsageError, collecting
from ...ds_configs.specs.hardware import HardwareSpec
from ...ds_configs.specs.settings import not_covered
from ...plugins.launching.notes import Notify
from ...plugins.planning.from_names import plan_job
from ...plugins.planning.models import LoadedModel, load_model_spec
from ..data.models import StartingModel, load_config, load_tokenizer, with_positions
from ..data.samples import Samples
from ..data.sources import local_place
from ..runs.inputs import (
    chosen_hardware,
    evaluation_batch_size,
    evenly_held_out,
    launch_faults,
    named_samples,
    training_job,
)
from ..runs.run import PreparedTraining
from ..runs.settings import run_output_faults
from .division import divided_job_fields, part_of, read_line, streamed_count
from .report import TrainOutcome, TrainResult, train_file_names, train_files
from .settings import TrainJob, TrainSettings, planned_argument_faults, train_settings_faults


@dataclass(frozen=True, kw_only=True)
class PreparedTrain(PreparedTraining[TrainOutcome]):
    """A training that can be launched; nothing was written for it."""

    settings: TrainSettings
    """What was asked for; with a plan of the user, what that plan was made for."""
    model: str
    """Hub id, directory or `config.json`."""

    kind = "train"
    worker = f"{__package__}.worker"

    @property
    def models(self) -> dict[str, str]:
        """Models that ranks load weights of, by the setting that holds the revision of each."""
        return {"revision": self.model}

    @property
    def own_file_names(self) -> tuple[str, ...]:
        """Files that a run writes, beside the plan's, the model's weights and checkpoints."""
        return train_file_names(self.settings)

    @property
    def own_arguments(self) -> dict[str, Any]:
        """Keys of `TrainingArguments` that the user states, and the order of samples that each machine draws itself."""
        return self.settings.arg | ({"train_sampling_strategy": "sequential"} if self._is_divided else {})

    @property
    def _is_divided(self) -> bool:
        return self.samples.statistics.machines > 1

    def job(self, common: Mapping[str, Any], work: Path, *, resume: bool, notify: Notify) -> TrainJob:
        """Return what the ranks are told."""
        model = str(Path(self.model).absolute()) if Path(self.model).exists() else self.model
        divided: dict[str, Any] = {}
        if self._is_divided:
            divided = divided_job_fields(self.samples.statistics, self.settings, self.plan)
        return TrainJob(**{**common, "model": model, **divided})

    def report(
        self, result: Mapping[str, Any], common: Mapping[str, Any]
    ) -> tuple[TrainOutcome, dict[str, str | bytes]]:
        """Return the outcome and the files that report it."""
        found = TrainOutcome(model=self.model, result=TrainResult(**result), **common)
        return found, train_files(found)


def prepare_train(
    settings: TrainSettings, model: str, output_dir: Path, *, notify: Notify, **how: Any
) -> PreparedTrain:
    """Read everything that can be wrong, report all faults together, and plan.

    Args:
        settings: What to do.
        model: Hub id, directory, or `config.json` for random weights.
        output_dir: Where results will go.
        notify: Receives remarks.
        how: `dry_run`, `force` and `resume`; `place` of this machine, where it is one of several.

    Raises:
        UsageError: all faults together.
        RefusedInputError: files of a model are corrupt or unsafe.
        PlanDoesNotFitError: no layout fits.
    """
    dry_run, place = (how.get(name) for name in ("dry_run", "place"))
    faults = train_settings_faults(settings)
    sources = {"the model": model, "the plan": settings.plan, "the dataset": local_place(settings.dataset)}
    faults += run_output_faults(output_dir, how, sources)
    given = loaded = hardware = tokenizer = samples = None
    if settings.plan is not None:
        with collecting(faults):
            given = Plan.load(settings.plan)
            faults += _edited_faults(given, settings.plan)
            settings = _as_planned(settings, given, model)
    if given is not None or settings.plan is None:
        with collecting(faults):
            hardware = chosen_hardware(settings) if given is None else given.hardware
            faults += [] if dry_run else launch_faults(hardware, place)
    with collecting(faults):
        loaded = load_model_spec(model, revision=settings.revision)
        faults += [] if given is None else _other_model_faults(given, loaded)
    if loaded is not None:
        with collecting(faults):
            settings, tokenizer = _with_tokenizer(settings, model)
    plan, divides = given, settings.streaming and place is not None
    if plan is None and divides and not faults:
        # Which part a machine reads depends on the layout.
        with collecting(faults):
            plan = _planned(settings, loaded, hardware, notify)
    if tokenizer is not None and hardware is not None and settings.dataset and not (divides and plan is None):
        with collecting(faults):
            part, count = part_of(settings, plan, place, notify), streamed_count(settings, plan, hardware)
            samples = named_samples(settings, tokenizer, train_samples=count and count // part.count, part=part)
    if faults:
        raise UsageError(faults)
    assert tokenizer and samples, "what failed left a fault"
    plan = plan or _planned(settings, loaded, hardware, notify)
    kept = _evenly_held_out(samples, plan, settings, notify)
    found = {"settings": settings, "plan": plan, "samples": kept, "tokenizer": tokenizer, "place": place}
    return PreparedTrain(model=model, **found)


def _planned(
    settings: TrainSettings, loaded: LoadedModel | None, hardware: HardwareSpec | None, notify: Notify
) -> Plan:
    assert loaded and hardware, "what failed left a fault"
    return plan_job(loaded, hardware, training_job(settings, hardware, **settings.layout()), notify=notify)


def _evenly_held_out(samples: Samples, plan: Plan, settings: TrainSettings, notify: Notify) -> Samples:
    """Return the samples with those held out that make whole batches, and remark on what was read.

    Raises:
        UsageError: `--arg` states what the plan decides, or more held-out samples at once than there are.
    """
    faults = planned_argument_faults(settings, plan) + settings.engine_faults(plan.chosen.strategy.engine)
    at_once = settings.arg.get("per_device_eval_batch_size")
    most = evaluation_batch_size(plan, min(settings.evaluation_samples, len(samples.evaluation)))
    if at_once is not None and at_once not in range(1, most + 1):
        rule = f"must be from 1 to {most}, of which there are enough held-out samples for every rank"
        faults.append(Fault(where="arg per_device_eval_batch_size", value=at_once, rule=rule, fix="drop it"))
    if faults:
        raise UsageError(faults)
    if settings.arg.get("torch_compile"):
        notify(f"torch_compile is {not_covered('torch_compile')}")
    kept = evenly_held_out(samples, plan, settings, batch_size=at_once)
    if settings.streaming:
        notify(read_line(kept, settings, plan))
    if cut := kept.statistics.cut_rows:
        notify(f"{cut} of {kept.statistics.rows} rows are longer than {settings.seq_len} tokens: their end is cut off")
    return kept


def _edited_faults(plan: Plan, place: str) -> list[Fault]:
    """Return a fault for each configuration of a plan that somebody edited, since the plan itself is what is run."""
    directory = Path(place) if Path(place).is_dir() else Path(place).parent
    rule = "was edited, and train runs the plan as it was made"
    fix = "plan again with other options, or run your file with accelerate launch and a script"
    return [Fault(where=str(directory / name), rule=rule, fix=fix) for name in edited_files(plan, directory)]


def _as_planned(settings: TrainSettings, plan: Plan, model: str) -> TrainSettings:
    """Return the settings with what a plan was made for, so that reports state what ran, from the planned commit.

    Raises:
        UsageError: the plan is for another command.
    """
    job, strategy = plan.job, plan.chosen.strategy
    if job.teacher is not None:
        rule = f"holds the teacher {job.teacher.name}, and train has none"
        raise UsageError(Fault(where="plan", value=settings.plan, rule=rule, fix="use distill, or plan without it"))
    return settings.model_copy(
        update={
            "revision": settings.revision or (plan.model.revision if model == plan.model.name else None),
            "hardware": plan.hardware.name,
            "seq_len": job.seq_len_tokens,
            "precision": job.precision,
            "optimizer": job.optimizer,
            "method": job.method,
            "lora_rank": job.lora_rank,
            "lora_targets": ",".join(job.lora_targets),
            "micro_batch_size": strategy.micro_batch_size,
            "global_batch_size": job.global_batch_size,
            "gradient_checkpointing": job.gradient_checkpointing,
            "strategy": job.strategy,
            "offload": job.offload,
        }
    )


def _other_model_faults(plan: Plan, loaded: LoadedModel) -> list[Fault]:
    """Return a fault where a plan was made for a model of another shape; where it lies does not matter."""
    if replace(plan.model, name=loaded.spec.name, revision=loaded.spec.revision) == loaded.spec:
        return []
    rule, fix = f"is not the model of the plan, {plan.model.name}", "plan for this one, or drop --plan"
    return [Fault(where="model", value=loaded.spec.name, rule=rule, fix=fix)]


def _with_tokenizer(settings: TrainSettings, model: str) -> tuple[TrainSettings, Any]:
    """Return the settings with a length of samples that fits the model, and its tokenizer."""
    source = StartingModel(model=model, revision=settings.revision)
    config = load_config(source)
    fitting = with_positions(settings, config)
    return fitting, load_tokenizer(source, config.get_text_config().vocab_size)
