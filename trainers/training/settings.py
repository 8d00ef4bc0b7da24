"""Settings of `shardwright train`, and the file through which its ranks learn them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from pydantic import Field

from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.training_arguments import planned_training_arguments
from ...ds_configs.specs.errors import Fault
from ...ds_configs.specs.settings import (
    HardwareSettings,
    LayoutSettings,
    NamedValues,
    Settings,
    TrainingSettings,
    adapter_faults,
)
from ...plugins.transformers.training_arguments import unknown_argument_faults
from ..runs.settings import LaunchedJob, LaunchedSettings, launched_faults

_OPTIONS_OF_ARGUMENTS = {
    "output_dir": "--output-dir",
    "learning_rate": "--learning-rate",
    "num_train_epochs": "--epochs",
    "max_steps": "--max-steps",
    "logging_steps": "--logging-steps",
    "save_steps": "--save-steps",
    "save_strategy": "--save-steps",
    "seed": "--seed",
    "resume_from_checkpoint": "--resume",
    "report_to": "--report-to",
    "push_to_hub": "--push-to-hub",
    "hub_model_id": "--push-to-hub",
    "hub_private_repo": "--private",
}
"""Keys of `TrainingArguments` that an option of the command states."""
_ENGINE_ARGUMENTS = ("deepspeed", "fsdp", "fsdp_config", "accelerator_config", "parallelism_config", "use_cpu")
"""Keys of `TrainingArguments` through which another layout than the planned one would run."""
_UNCOUNTED_ARGUMENTS = {
    "dataloader_drop_last": "leaves out samples that the report counts as trained on",
    "auto_find_batch_size": "would train on other batches than the planned ones",
}
"""Switches of `TrainingArguments` whose effect no report would show."""
_PLANNED = frozenset(
    {*LayoutSettings.model_fields, *TrainingSettings.model_fields, *HardwareSettings.model_fields}
    | {"seq_len", "precision", "method"}
) - {"revision"}
"""Options whose values a plan holds."""


class StreamingSettings(Settings):
    """Extent to which a dataset is read."""

    group = "Data"

    streaming: bool = Field(
        False,
        description="Read rows only as far as --max-steps trains; the first ones make the --evaluation-samples",
    )


class TrainSettings(LayoutSettings, StreamingSettings, LaunchedSettings):
    """Every setting of `shardwright train`."""

    group = "Training"

    plan: str | None = Field(
        None, description="Directory that `plan` wrote, whose layout is run. Default: plan on the spot"
    )
    arg: NamedValues = Field(
        {}, description="NAME=VALUE of the Trainer's TrainingArguments, such as weight_decay=0.1; may be repeated"
    )


class TrainJob(LaunchedJob):
    """Job of every rank, as it stands in `job.json`."""

    settings: TrainSettings = Field(description="what the user asked for")
    model: str = Field(description="Hub id, directory or config.json")
    machines: int = Field(1, description="among which the samples are divided; then counts are of this one's")


def train_settings_faults(settings: TrainSettings) -> list[Fault]:
    """Return what does not go together before anything is read."""
    faults = launched_faults(settings) + adapter_faults(settings.stated(), settings.method)
    if settings.plan is not None:
        rule, fix = "is what the plan decides", "drop it, or drop --plan and plan on the spot"
        faults += [
            Fault(where=name, value=getattr(settings, name), rule=rule, fix=fix)
            for name in sorted(_PLANNED & settings.model_fields_set)
        ]
    if settings.streaming and settings.max_steps is None:
        rule, fix = "reads no further than a training goes, whose length is not known", "give --max-steps"
        faults.append(Fault(where="streaming", value=True, rule=rule, fix=fix))
    return faults + _argument_faults(settings.arg)


def _argument_faults(stated: dict[str, Any]) -> list[Fault]:
    """Return what is wrong with `--arg`, before a plan is known."""
    faults = unknown_argument_faults(stated)
    for name, value in stated.items():
        if option := _OPTIONS_OF_ARGUMENTS.get(name):
            faults.append(Fault(where=f"arg {name}", value=value, rule="has an option of its own", fix=f"use {option}"))
        elif name in _ENGINE_ARGUMENTS:
            rule, fix = "would run another layout than the planned one", "use --strategy and the other options"
            faults.append(Fault(where=f"arg {name}", value=value, rule=rule, fix=fix))
        elif value and (rule := _UNCOUNTED_ARGUMENTS.get(name, "")):
            faults.append(Fault(where=f"arg {name}", value=value, rule=rule, fix="drop it"))
    return faults


def planned_argument_faults(settings: TrainSettings, plan: Plan) -> list[Fault]:
    """Return the arguments that the plan decides and the user states otherwise, and what it needs and is not here."""
    planned = planned_training_arguments(plan)
    rule, fix = "is what the plan decides", "change the plan by its options, such as --micro-batch-size"
    faults = [
        Fault(where=f"arg {name}", value=value, rule=rule, fix=fix)
        for name, value in settings.arg.items()
        if name in planned and name != "max_grad_norm"
    ]
    if planned.get("use_liger_kernel") and find_spec("liger_kernel") is None:
        rule, fix = "needs the package liger-kernel, which is not installed", "pip install liger-kernel (on GPUs)"
        faults.append(Fault(where="plan: loss", value=plan.job.loss, rule=rule, fix=fix))
    return faults
