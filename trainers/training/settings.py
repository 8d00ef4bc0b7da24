"""Settings of `shardwright train`, their checks, and the jobs of its ranks."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Literal

from pydantic import Field

from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.rendering import planned_training_arguments
from ...ds_configs.specs.errors import ConfigError, collecting
from ...ds_configs.specs.job import ImageFields, JobSettings, KernelFields, LayoutFields, TaskFields, adapter_errors
from ...ds_configs.specs.model import adapted_experts
from ...ds_configs.specs.settings import NamedValues
from ...ds_configs.specs.tasks import TASKS, TaskName
from ...plugins.peft import dropout_error
from ...plugins.transformers.training_arguments import class_of_task, package_errors, unknown_argument_errors
from ..runs.settings import LaunchedJob, LaunchedSettings, RankJob, launched_errors

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
}
"""Options of the command that set keys of `TrainingArguments`."""
_ENGINE_ARGUMENTS = ("deepspeed", "fsdp", "fsdp_config", "accelerator_config", "parallelism_config", "use_cpu")
"""Keys of `TrainingArguments` that would run a different layout from the planned one."""
_UNCOUNTED_ARGUMENTS = {
    "dataloader_drop_last": "skips samples that the report counts as trained on",
    "auto_find_batch_size": "would train on different batches from the planned ones",
}
"""Switches of `TrainingArguments` whose effect the report would not show."""
_PLANNED = frozenset(JobSettings.model_fields) - {"revision", "reward"}
"""Options whose values a plan fixes."""


class TrainSettings(LaunchedSettings, KernelFields, ImageFields, LayoutFields, TaskFields):
    """Every setting of `shardwright train`."""

    group = "Training"

    loss: Literal["auto", "eager", "chunked"] = Field(
        "eager", description="Loss computation; chunked stores no logits of all tokens; auto: planned"
    )
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp8"] = Field(  # type: ignore[assignment]
        "auto", description="Compute precision; auto: bf16, or fp32 without an accelerator"
    )
    reference: str | None = Field(
        None, description="Frozen model whose log-probabilities a task compares. Default: the model itself"
    )
    reward: str | None = Field(None, description="Reward of completions: FILE.py:FUNCTION, or a reward model")
    plan: str | None = Field(None, description="Directory of a plan to run. Default: plan now")
    arg: NamedValues = Field({}, description="NAME=VALUE of TrainingArguments, such as weight_decay=0.1; repeatable")


class TrainJob(LaunchedJob):
    task: Literal["train"] = "train"
    settings: TrainSettings = Field(description="settings of the user")
    model: str = Field(description="Hub id, directory or config.json")


class ScriptJob(RankJob):
    task: Literal["script"] = "script"
    plan: str = Field(description="directory of the plan")
    script: str = Field(description="Python file")
    arguments: list[str] = Field(description="of the script")


def train_settings_errors(settings: TrainSettings, task: TaskName) -> list[ConfigError]:
    """Return the settings that cannot be combined, before data and model are read; a plan decides the task."""
    errors = launched_errors(settings)
    if settings.plan is None:
        errors += adapter_errors(settings.stated(), settings.method)
    else:
        rule, fix = "is fixed by the plan", "omit it, or omit --plan to plan now"
        errors += [
            ConfigError(where=name, value=getattr(settings, name), rule=rule, fix=fix)
            for name in sorted(_PLANNED & settings.model_fields_set)
        ]
    kind = None
    with collecting(errors):
        kind = class_of_task(TASKS[task].config or "transformers.TrainingArguments")
    errors += unknown_argument_errors(settings.arg, kind)
    for name, value in settings.arg.items():
        if option := _OPTIONS_OF_ARGUMENTS.get(name):
            errors.append(
                ConfigError(where=f"arg {name}", value=value, rule="is not an extra argument", fix=f"use {option}")
            )
        elif name in _ENGINE_ARGUMENTS:
            rule, fix = "would run a different layout from the planned one", "use --strategy and the other options"
            errors.append(ConfigError(where=f"arg {name}", value=value, rule=rule, fix=fix))
        elif value and (rule := _UNCOUNTED_ARGUMENTS.get(name, "")):
            errors.append(ConfigError(where=f"arg {name}", value=value, rule=rule, fix="omit it"))
    return errors


def planned_argument_errors(settings: TrainSettings, plan: Plan) -> list[ConfigError]:
    """Return errors for arguments that the plan fixes, and for a missing package that the plan needs."""
    planned = planned_training_arguments(plan)
    scale = settings.stated().keys() & {"lora_alpha", "lora_dropout", "lora_plus_ratio"}
    not_adapted = adapter_errors({name: getattr(settings, name) for name in scale}, plan.job.method)
    rule, fix = "is fixed by the plan", "change the plan with its options, such as --micro-batch-size"
    errors = [
        ConfigError(where=f"arg {name}", value=value, rule=rule, fix=fix)
        for name, value in settings.arg.items()
        if name in planned and name != "max_grad_norm"
    ]
    errors += [replace(error, fix="plan with --method lora, or omit it") for error in not_adapted]
    if settings.lora_dropout and adapted_experts(plan.model, plan.job.lora_targets) and not not_adapted:
        errors.append(dropout_error(settings.lora_dropout))
    if plan.job.precision == "fp8" and find_spec("torchao") is None:
        rule, fix = "needs the package torchao, which is not installed", "pip install torchao, or use --precision bf16"
        errors.append(ConfigError(where="precision", value="fp8", rule=rule, fix=fix))
    return errors + package_errors(planned)
