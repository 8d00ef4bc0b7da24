"""Inputs of every launched training: hardware, samples, second models, the job to plan, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.output import output_errors
from ...ds_configs.plan.rendering import NodePlace
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.job import AXIS_FIELDS, MODEL_ROLES, TrainingJob
from ...plugins.planning import LoadedModel, load_model_spec, read_hardware
from ...plugins.transformers.loading import refuse_other_formats
from ..checkpoints import Reader, Selection, compared, finished, newest_whole, read_complete, read_whole
from ..data.samples import Samples, stated_samples
from ..data.sources import parse_source
from .settings import LaunchedSettings, RunRequest

if TYPE_CHECKING:
    from ...ds_configs.specs.hardware import HardwareSpec
    from ...ds_configs.specs.layout import Layout
    from ...ds_configs.specs.second_models import SecondModelRole

_DEFAULT_GLOBAL_BATCH = 32


def chosen_hardware(settings: LaunchedSettings) -> HardwareSpec:
    """Return the requested hardware, by default this machine's GPUs, or two CPU ranks."""
    name = settings.hardware
    if name is None:
        import torch

        name = "local" if torch.cuda.is_available() else "2xCPU"
    return read_hardware(name, host_memory=settings.host_memory, nvme=settings.nvme)


_DEVICE_FIX = "pass --dry-run to stop after planning, or omit --hardware to use this machine"
PLANNED_DEVICE_FIX = (
    "plan for this machine (--hardware local), or test the plan on CPU ranks with `shardwright rehearse`"
)
"""Fix for a plan that was written for other accelerators."""


def launch_errors(
    hardware: HardwareSpec, place: NodePlace | None = None, *, device_fix: str = _DEVICE_FIX
) -> list[ConfigError]:
    """Return why this machine cannot run its part of a plan for some hardware.

    `device_fix` is the fix if the machine lacks accelerators.
    """
    import torch

    if place is not None and not 0 <= int(place.rank) < hardware.nodes:
        rule, fix = f"must be from 0 to {hardware.nodes - 1}", "plan for more machines, such as 2x8xH100-80GB"
        return [ConfigError(where="node_rank", value=place.rank, rule=rule, fix=fix)]
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    alone = hardware.nodes == 1 or place is not None
    if alone and (hardware.gpu == "CPU" or hardware.gpus_per_node <= here):
        return []
    where = "on each machine" if place is not None else f"on {hardware.nodes} node(s)"
    count = hardware.gpus_per_node if place is not None else hardware.world_size
    rule = f"requires {count} x {hardware.gpu} {where}; this machine has {here} GPUs"
    fix = device_fix
    if hardware.nodes > 1 and place is None:
        fix = "start each machine with --node-rank and --main-address, or run shardwright launch PLAN --on ssh|slurm"
    return [ConfigError(where="hardware", value=hardware.name, rule=rule, fix=fix)]


CONVERTED = "convert them to safetensors, or pass the config.json for random weights"


def load_second_model_spec(role: SecondModelRole, name: str, *, revision: str | None = None) -> LoadedModel:
    """Return the sizes of a trained second model.

    Raises:
        UsageError: it has no weights.
        RefusedInputError: its weights are not safetensors.
    """
    source = Path(name)
    if is_without(source, ["*.safetensors"]):
        refuse_other_formats(source, where=role)
        fix = "pass a trained model"
        raise UsageError(ConfigError(where=role, value=name, rule="has no weights", fix=fix))
    return load_model_spec(name, revision=revision)


def named_samples(
    settings: LaunchedSettings, tokenizer: Any, *, read: Callable[[Any, Any], Samples] = stated_samples
) -> Samples:
    """Return the training samples and at most `evaluation_samples`, held out or from another split or file.

    `read` makes samples from settings and the tokenizer.

    Raises:
        UsageError: there is no text, or the evaluation split is empty.
    """
    other, other_split = settings.evaluation_dataset, settings.evaluation_split
    if other is not None or other_split is not None:
        if other_split is not None and parse_source(other or settings.dataset).is_local:
            rule, fix = "requires a Hub dataset", "pass a file with --evaluation-dataset"
            raise UsageError(ConfigError(where="evaluation_split", value=other_split, rule=rule, fix=fix))
        unsplit = settings.model_copy(update={"evaluation_fraction": 0.0})
        evaluation_source = {
            "dataset": other or settings.dataset,
            "dataset_split": other_split or settings.dataset_split,
            "dataset_revision": settings.dataset_revision if other is None else None,
        }
        samples = read(unsplit, tokenizer)
        held_out = read(unsplit.model_copy(update=evaluation_source), tokenizer).train
    else:
        samples = read(settings, tokenizer)
        held_out = samples.evaluation
    if not held_out:
        share = f"{100 * settings.evaluation_fraction:.0f} %"
        rule = f"the evaluation split ({share}) is empty: duplicate rows always go to the same split"
        fix = "add data, raise --evaluation-fraction, or lower --seq-len"
        raise UsageError(ConfigError(where="dataset", value=settings.dataset, rule=rule, fix=fix))
    kept = held_out[: settings.evaluation_samples]
    return replace(samples, evaluation=kept, statistics=replace(samples.statistics, evaluation_samples=len(kept)))


def optimizer_steps(settings: LaunchedSettings, layout: Layout, samples: int) -> int:
    """Return the optimizer steps of a run, as Transformers 5.17 counts them (`set_initial_training_values`)."""
    if settings.max_steps is not None:
        return settings.max_steps
    batches = ceil(ceil(samples / layout.micro_batch_size) / layout.data_parallel_size)
    return ceil(settings.epochs * max(1, ceil(batches / layout.gradient_accumulation_steps)))


def training_job(settings: LaunchedSettings, hardware: HardwareSpec, **further: Any) -> TrainingJob:
    """Return the job to plan; `further` contains fields of `TrainingJob`, such as second models.

    Without axis sizes in `further` the job uses data parallelism only, as trainers with custom losses require.
    """
    options = {name: getattr(settings, name) for name in job_options(settings)}
    if settings.precision == "auto":
        options["precision"] = "fp32" if hardware.gpu == "CPU" else "bf16"
    step_samples = hardware.world_size * (settings.micro_batch_size or 1)
    options["global_batch_size"] = settings.global_batch_size or step_samples * max(
        1, _DEFAULT_GLOBAL_BATCH // step_samples
    )
    return TrainingJob(**{"loss": "eager"} | dict.fromkeys(AXIS_FIELDS, 1) | options | further)


def job_options(settings: LaunchedSettings) -> set[str]:
    """Return the options of a command that are fields of its job, without second models and a student's loss."""
    names = TrainingJob().options().keys() & type(settings).model_fields.keys()
    return names - {*MODEL_ROLES} - settings.own_options


CHECKPOINTS = "checkpoints"
"""Directory of the checkpoints inside an output directory."""


def last_checkpoint(output_dir: Path) -> Path | None:
    """Return the newest checkpoint by names and sizes, as ranks read every byte; raises as `newest_whole`."""
    newest = newest_whole(output_dir / CHECKPOINTS, read_complete)
    return None if newest is None else newest.path


def check_resumption(directory: Path, facts: Mapping[str, Any], *, steps: int) -> Selection | None:
    """Return the newest checkpoint if the run is complete, and reject incompatible settings before ranks start.

    Raises:
        UsageError: the run has fewer steps than the checkpoint, or its settings are incompatible with it.
        RefusedInputError: there are checkpoints, but none is valid.
    """

    def judged(read: Reader) -> tuple[Selection | None, bool, list[ConfigError]]:
        newest = newest_whole(directory, read)
        if newest is None:
            return None, False, []
        is_done, errors = finished(newest, facts, steps)
        return newest, is_done, compared(newest.record.facts, facts)[0] + errors

    # Read every byte only before rejecting the run: ranks would skip a corrupt checkpoint.
    try:
        newest, is_done, errors = judged(read_complete)
        is_rejected = bool(errors)
    except (OSError, ValueError):
        is_rejected = True
    if is_rejected:
        newest, is_done, errors = judged(read_whole)
        if errors:
            raise UsageError(errors)
    return newest if is_done else None


def run_output_errors(request: RunRequest, sources: Mapping[str, str | None]) -> list[ConfigError]:
    """Return errors for the output directory, on the machine that writes; `sources` maps inputs to their paths."""
    if request.dry_run or not (request.place is None or request.place.is_first):
        return []
    directory, fix = request.output_dir, "pass --force to write into it, or --resume to resume from its last checkpoint"
    errors = output_errors(directory, force=request.force or request.resume, sources=sources, fix=fix)
    needs_checkpoint = request.resume and not request.or_anew and not directory.is_file()
    if needs_checkpoint and last_checkpoint(directory) is None:
        rule, fix = "contains no checkpoint to resume from", "run with --save-steps first, or omit --resume"
        errors.append(ConfigError(where="output_dir", value=str(directory), rule=rule, fix=fix))
    return errors


def is_without(directory: Path, names: Sequence[str]) -> bool:
    """Return whether a local model has no file of these names or patterns."""
    if directory.is_file():
        return True
    return directory.is_dir() and not any(any(directory.glob(name)) for name in names)
