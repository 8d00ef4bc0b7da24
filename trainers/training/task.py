"""`train`: checks the settings, plans, prepares the run that `runs/run.py` launches, and reports its outcome."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, nan
from pathlib import Path
from typing import Any

from ...ds_configs.legality.rules import images_stay_whole
from ...ds_configs.models.images import RULES, image_tokens
from ...ds_configs.plan.plan import Plan, edited_files
from ...ds_configs.plan.rendering import train_arguments
from ...ds_configs.specs.errors import ConfigError, UsageError, collecting
from ...ds_configs.specs.job import AXIS_FIELDS, TrainingJob
from ...ds_configs.specs.model import ModelSpec
from ...ds_configs.specs.second_models import SecondModelRole
from ...ds_configs.specs.settings import settings_of
from ...plugins.planning import installed_release_difference, load_model_spec
from ...plugins.planning import plan as select_plan
from ...plugins.transformers.loading import refuse_other_formats
from ..data.chat import set_chat_template
from ..data.models import StartingModel, load_config, load_processor, load_tokenizer, with_positions
from ..data.samples import Samples, SampleStatistics, packed_if_possible, stated_samples
from ..data.sources import local_place
from ..preferences.data import in_complete_batches, task_samples
from ..preferences.trainer import (
    generation_errors,
    is_reward_function,
    second_model_errors,
    task_errors,
)
from ..runs.inputs import (
    CONVERTED,
    PLANNED_DEVICE_FIX,
    chosen_hardware,
    is_without,
    job_options,
    launch_errors,
    load_second_model_spec,
    named_samples,
    run_output_errors,
    training_job,
)
from ..runs.run import LaunchedOutcome, PreparedTraining, StepResult, losses, model_file_names, run_training
from ..runs.settings import RunRequest
from .settings import TrainJob, TrainSettings, planned_argument_errors, train_settings_errors

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
"""Version of `train --format json`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult(StepResult):
    """Measurements of the ranks; the content of `result.json`."""

    before: float | None
    """Cross-entropy on the held-out samples before the first step, in nats per token; `None` under context parallelism,
    where it cannot be measured."""
    after: float | None
    """The same after the last step."""
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of a task other than `sft`: what TRL's trainer measures on the held-out rows `before` and `after` training."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TrainOutcome(LaunchedOutcome):
    settings: TrainSettings
    model: str
    """Hub id, directory or `config.json` that training started from."""
    result: TrainResult

    def measures(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        result = self.result
        if result.evaluations:
            first = result.evaluations["before"]
            last = result.evaluations["after"].items()
            rows = [(name, f"{first.get(name, nan):.4f}", f"{value:.4f}") for name, value in last]
            return ("held-out rows", "before", "after"), rows
        if result.before is None or result.after is None:
            return ("", "before", "after"), [("cross-entropy, nats per token", "not measured", "not measured")]
        names = ("cross-entropy, nats per token", "perplexity")
        return ("", "before", "after"), list(zip(names, losses(result.before), losses(result.after), strict=True))

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            **self.where_and_what(),
            "cross_entropy": {"before": self.result.before, "after": self.result.after},
            **({"task": self.settings.task, "evaluations": self.result.evaluations} if self.result.evaluations else {}),
            **self.speed(),
        }


def train(
    model: str, output_dir: str | Path, *, resume: bool = False, force: bool = False, **settings: Any
) -> TrainOutcome:
    """Train a model on a dataset: plan, launch ranks, evaluate before and after, save with a report.

    Prints nothing on stdout; notes and progress are logged. Example:
    ``shardwright.train("model", "tuned", dataset="chats.jsonl", method="lora", max_steps=100).result.after``

    Args:
        model: Hub id or directory, or a `config.json` for random weights.
        output_dir: Directory for the model, plan and report.
        resume: Resume from the last checkpoint in `output_dir`.
        force: Write into a directory that contains other files.
        settings: Fields of `TrainSettings`, which are the flags of `shardwright train`.

    Returns:
        Everything measured; `to_dict()` is what `--format json` prints.

    Raises:
        UsageError: all errors of the settings.
        RefusedInputError: files of a model are corrupt or unsafe.
        DoesNotFitError: no layout fits.
        ShardwrightError: a rank failed; names the rank and its error.
    """
    request = RunRequest(output_dir=Path(output_dir), resume=resume, force=force)
    with redirect_stdout(sys.stderr):
        return run_training(prepare_train(settings_of(TrainSettings, settings), model, request))


@dataclass(frozen=True, kw_only=True)
class PreparedTrain(PreparedTraining[TrainOutcome]):
    settings: TrainSettings
    """Settings of the user; with `--plan`, those of the plan."""
    model: str
    """Hub id, directory or `config.json`."""

    kind = "train"

    @property
    def models(self) -> dict[str, str]:
        return {"revision": self.model}

    @property
    def own_file_names(self) -> tuple[str, ...]:
        return model_file_names(self.settings)

    @property
    def own_arguments(self) -> dict[str, Any]:
        return self.settings.arg

    def job(self, common: Mapping[str, Any], work: Path) -> TrainJob:
        model = str(Path(self.model).absolute()) if Path(self.model).exists() else self.model
        return TrainJob(**common, model=model)

    def outcome(self, result: Mapping[str, Any], common: Mapping[str, Any]) -> TrainOutcome:
        return TrainOutcome(model=self.model, result=TrainResult(**result), **common)


def prepare_train(settings: TrainSettings, model: str, request: RunRequest) -> PreparedTrain:
    """Read and check everything, report all errors together, and plan.

    Raises:
        UsageError: all errors together.
        RefusedInputError: files of a model are corrupt or unsafe.
        PlanDoesNotFitError: no layout fits.
    """
    errors: list[ConfigError] = []
    written_plan = loaded = hardware = tokenizer = processor = samples = None
    if settings.plan is not None:
        with collecting(errors):
            written_plan = Plan.load(settings.plan)
    task, reward = settings.task, settings.reward
    if written_plan is not None:
        task = written_plan.job.task
        reward = reward or (written_plan.job.reward.name if written_plan.job.reward else None)
    errors += train_settings_errors(settings, task) + task_errors(task, reward=reward)
    sources = {"the model": model, "the plan": settings.plan, "the dataset": local_place(settings.dataset)}
    errors += run_output_errors(request, sources)
    if settings.plan is not None and written_plan is not None:
        with collecting(errors):
            directory = Path(settings.plan) if Path(settings.plan).is_dir() else Path(settings.plan).parent
            rule = "was edited, but train runs the original plan"
            fix = "plan again with other options, or run your file with accelerate launch and a script"
            errors += [
                ConfigError(where=str(directory / name), rule=rule, fix=fix)
                for name in edited_files(written_plan, directory)
            ]
            settings = _as_planned(settings, written_plan, model)
    if settings.frames:
        rule, fix = "videos are planned, but train reads none", "omit it, and plan and train with images of frames"
        errors.append(ConfigError(where="frames", value=settings.frames, rule=rule, fix=fix))
    if written_plan is not None or settings.plan is None:
        with collecting(errors):
            hardware = chosen_hardware(settings) if written_plan is None else written_plan.hardware
            device_fix = {} if written_plan is None else {"device_fix": PLANNED_DEVICE_FIX}
            errors += [] if request.dry_run else launch_errors(hardware, request.place, **device_fix)
    with collecting(errors):
        loaded = load_model_spec(model, revision=settings.revision)
        refuse_other_formats(Path(model), where="model", fix=CONVERTED)
        spec = loaded.spec
        same: dict[str, Any] = {"name": spec.name, "revision": spec.revision}
        if written_plan is not None and written_plan.model.release != spec.release:
            # These depend on the release of Transformers rather than on the model.
            changing = ("release", "attention", "settings", "layer_classes", "buffer_bytes", "source")
            same |= {field: getattr(spec, field) for field in changing}
        planned = spec.with_score_head() if task == "reward" else spec
        # The location of a model does not matter.
        if written_plan is not None and replace(written_plan.model, **same) != planned:
            rule = f"is not the model of the plan, {written_plan.model.name}"
            fix = "plan for this model, or omit --plan"
            errors.append(ConfigError(where="model", value=spec.name, rule=rule, fix=fix))
        if settings.task != "sft" and is_without(Path(model), ["*.safetensors"]):
            # The reference is what the model was before training.
            rule, fix = f"has no weights, from which task {settings.task} starts", "pass a trained model"
            errors.append(ConfigError(where="model", value=model, rule=rule, fix=fix))
        if settings.task != "reward" and spec.architecture.endswith("Classification"):
            rule, fix = "returns scores instead of tokens", "pass a causal language model, or launch your own script"
            errors.append(ConfigError(where="model", value=model, rule=rule, fix=fix))
    if loaded is not None:
        with collecting(errors):
            source = StartingModel(model=model, revision=settings.revision)
            config = load_config(source)
            settings = with_positions(settings, config)
            own_tokenizer = load_tokenizer(source, config.get_text_config().vocab_size)
            processor = load_processor(source, config, own_tokenizer, settings.max_pixels)
            set_chat_template(own_tokenizer, settings.chat_template)
            if processor is not None:
                processor.chat_template = own_tokenizer.chat_template
            tokenizer = own_tokenizer
    if tokenizer is not None and settings.dataset:
        with collecting(errors):
            read: Callable[[Any, Any], Samples] = partial(stated_samples, processor=processor)
            if settings.task != "sft":
                generation = TrainingJob(seq_len_tokens=settings.seq_len, completion_tokens=settings.completion_tokens)
                read = partial(task_samples, settings.task, completion_tokens=generation.generated_tokens)
            samples = named_samples(settings, tokenizer, read=read)
    seconds: dict[str, Any] = {}
    roles: tuple[SecondModelRole, ...] = ("reference", "reward")
    for role in roles if written_plan is None else ():
        name = getattr(settings, role)
        # A file without a function is among the errors already.
        if name is not None and not is_reward_function(name) and not name.endswith(".py"):
            with collecting(errors):
                second = load_second_model_spec(role, name)
                seconds[role] = second.spec
                errors += [] if tokenizer is None else second_model_errors(role, name, second.config, tokenizer)
    if errors:
        raise UsageError(errors)
    assert loaded and hardware and tokenizer and samples, "each failure added an error"
    if written_plan is not None and (difference := installed_release_difference(written_plan)) is not None:
        logger.info(difference)
    plan, statistics = written_plan, samples.statistics
    if plan is None and loaded.spec.model_type in RULES:
        settings = _with_images(settings, loaded.spec, statistics)
    if plan is None:
        # Liger computes the loss too, unless it is chosen.
        automatic = (settings.use_liger_kernel or settings.task != "sft") and "loss" not in settings.model_fields_set
        job = training_job(settings, hardware, **seconds, **({"loss": "auto"} if automatic else {}))
        plan = select_plan(loaded, hardware, job)
    if statistics.images_per_sample > plan.job.images_per_sample:
        logger.info(
            f"a row has {statistics.images_per_sample} images, and the plan counts {plan.job.images_per_sample} of a "
            "sequence: a step may need more memory and time than predicted"
        )
    settings = settings.with_optimizer(plan.job)
    errors = [] if request.dry_run and plan.hardware.gpu != "CPU" else generation_errors(plan)
    errors += planned_argument_errors(settings, plan)
    if statistics.image_rows:
        with_images = replace(plan.job, images_per_sample=statistics.images_per_sample)
        errors += images_stay_whole(plan.model, plan.chosen.layout, with_images, plan.hardware)
    batch_size = settings.arg.get("per_device_eval_batch_size")
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        where, rule = "arg per_device_eval_batch_size", "must be at least 1"
        errors.append(ConfigError(where=where, value=batch_size, rule=rule, fix="omit it"))
    if errors:
        raise UsageError(errors)
    if settings.task != "sft":
        layout = plan.chosen.layout
        samples = in_complete_batches(samples, layout.micro_batch_size * layout.data_parallel_size)
    else:
        with_cache = "with a cache (--arg use_cache), Transformers does not separate documents"
        obstacle = with_cache if settings.arg.get("use_cache") else None
        models = [(loaded.config, plan.model.attention)]
        samples = packed_if_possible(samples, settings, plan, models, obstacle=obstacle)
    return PreparedTrain(
        model=model,
        settings=settings,
        plan=plan,
        samples=samples,
        tokenizer=tokenizer,
        processor=processor,
        request=request,
    )


def _with_images(settings: TrainSettings, spec: ModelSpec, statistics: SampleStatistics) -> TrainSettings:
    """Return the settings with the number and size of images of the row with most of their tokens, unless both are set.

    The images of a row may have several sizes, and the model's processor other limits than the rule of its family: the
    size is one whose tokens are not below the counted ones and fit into the sequence, and of these nearly the fewest.
    """
    count = settings.images_per_sample
    if "images_per_sample" not in settings.model_fields_set:
        count = statistics.images_per_sample
        settings = settings.model_copy(update={"images_per_sample": count})
    if "image_size" in settings.model_fields_set or not statistics.image_sizes or not count:
        return settings
    # A set number of images has the mean tokens of the counted ones.
    counted_tokens = ceil(count * statistics.image_tokens / statistics.images_per_sample)
    excess: dict[str, int] = {}
    for size in (*statistics.image_sizes, *(f"{side}x{side}" for side in range(_LARGEST_SIDE, 0, -_SIDE_STEP))):
        job = TrainingJob(
            seq_len_tokens=settings.seq_len, images_per_sample=count, image_size=size, max_pixels=settings.max_pixels
        )
        # Not every size is legal or fits into the sequence.
        with suppress(UsageError):
            tokens = image_tokens(spec, job)
            assert tokens is not None, "the job has images"
            if count * tokens.text_tokens >= counted_tokens:
                # Processors count the tokens around an image as text or as image.
                excess[size] = max(0, count * tokens.features - counted_tokens)
    size = min(excess, key=lambda size: excess[size], default=statistics.image_sizes[0])
    return settings.model_copy(update={"image_size": size})


_LARGEST_SIDE = 4096
_SIDE_STEP = 16
"""Pixels between the squares that stand for images of several sizes; no family has smaller merged patches."""


def _as_planned(settings: TrainSettings, plan: Plan, model: str) -> TrainSettings:
    """Return the settings with the plan's values and the planned commit of the model."""
    if settings.reward is not None and (plan.job.reward is not None or not is_reward_function(settings.reward)):
        rule, fix = "is fixed by the plan", "omit it, or omit --plan to plan now"
        raise UsageError(ConfigError(where="reward", value=settings.reward, rule=rule, fix=fix))
    if (seconds := plan.job.second_models) and plan.job.task == "sft":
        rule = f"has the {seconds[0].role} {seconds[0].spec.name}, but train uses none"
        command = train_arguments(plan, directory=settings.plan or "")[1]
        fix = f"plan without a {seconds[0].role}" + (f", or use {command}" if command != "train" else "")
        raise UsageError(ConfigError(where="plan", value=settings.plan, rule=rule, fix=fix))
    revision = settings.revision or (plan.model.revision if model == plan.model.name else None)
    models = {role: spec.name for role in ("reference", "reward") if (spec := getattr(plan.job, role)) is not None}
    # Reports show the values of the plan.
    options, layout = plan.job.options(), plan.chosen.layout
    options |= {"micro_batch_size": layout.micro_batch_size}
    options |= {field: layout.axes[axis] for field, axis in AXIS_FIELDS.items() if axis in layout.axes}
    planned = {name: options[name] for name in job_options(settings)}
    planned |= {name: plan.hardware.options().get(name) for name in ("host_memory", "nvme")}
    return settings.model_copy(update=planned | {"hardware": plan.hardware.name, "revision": revision} | models)
