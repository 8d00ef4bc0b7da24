"""A plan's files with scaled sizes and substitutes on CPU ranks, and the launches of a rehearsal.

Substitutes replace what needs a GPU, a network or hours; each is reported. Where and when a run saves and logs is the
rehearsal's own matter and not reported. Seen with transformers 5.17.0, accelerate 1.15.0 and bitsandbytes 0.50.2.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from ...ds_configs.memory.generation import generated_sequences
from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.rendering import DEEPSPEED_FILE, HEADER, copied_configuration, task_arguments
from ...ds_configs.shrink import (
    Change,
    changes_between,
    rehearsed_sequence,
    section_of,
    shrink_accelerate_config,
    shrink_deepspeed_config,
    shrink_layout,
    shrink_model_config,
    shrink_zero_options,
)
from ...ds_configs.specs.errors import ShardwrightError, UsageError
from ...ds_configs.specs.hardware import parse_hardware
from ...ds_configs.specs.job import GROUPED_TASKS, TrainingJob, without_kernels
from ...ds_configs.specs.layout import Layout
from ...ds_configs.specs.model import ModelSpec
from ...ds_configs.specs.tasks import TASKS
from ...ds_configs.specs.texts import strict_json
from ...plugins.launching.launch import LaunchFailedError
from ...plugins.launching.messages import Message, Progress, log_message
from ..runs.run import launch_job, write_samples
from ..runs.settings import TRAIN_SAMPLES, RankJob
from ..training.synthetic import task_rows

SCRIPT_STAGE = "script"
"""Name of the records of a script's ranks."""
MOST_RANKS = 64
"""Maximum number of ranks in the search for the smallest legal count."""


class RehearsalJob(RankJob):
    task: Literal["rehearse"] = "rehearse"
    training_arguments: dict[str, Any] = Field(description="keys of TrainingArguments, scaled")
    stage: Literal["train", "resume"] = Field(default="train", description="which of the two launches this is")
    samples: int = Field(description="samples that the steps of all ranks need")
    save_step: int = Field(description="step whose checkpoint the second launch resumes from")


class RehearsedScriptJob(RankJob):
    """Job of every rank of a user's script."""

    task: Literal["rehearse-script"] = "rehearse-script"
    training_arguments: dict[str, Any] = Field(description="the plan's keys of TrainingArguments, scaled")
    planned: dict[str, Any] = Field(description="the plan's training arguments, unchanged")
    script: str = Field(description="Python file, in a copy of its directory")
    arguments: list[str] = Field(description="arguments of the script")
    model_name: str = Field(description="name of the model in the plan")
    steps: int = Field(description="optimizer steps of a trainer, at most")
    working_directory: str = Field(description="copy of the user's working directory")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFiles:
    """The files in a plan's directory, possibly edited."""

    accelerate: dict[str, Any]
    """`accelerate.yaml`."""
    deepspeed: dict[str, Any] | None
    """The DeepSpeed JSON that it names; `None` without one."""
    arguments: dict[str, Any]
    """`training_arguments.json`."""

    @classmethod
    def read(cls, directory: Path) -> PlanFiles:
        """Read files that have passed the strict check."""
        accelerate = yaml.safe_load((directory / "accelerate.yaml").read_text(encoding="utf-8"))
        section = accelerate.get("deepspeed_config") or {}
        name, deepspeed = section.get("deepspeed_config_file"), None
        if name:
            # As in every launch: if the directory moved, the file next to the YAML is the plan's.
            beside = directory / (DEEPSPEED_FILE if copied_configuration(name) else Path(name).name)
            file = beside if beside.exists() else Path(name)
            section["deepspeed_config_file"], deepspeed = str(file), strict_json(file.read_bytes())
        arguments = strict_json((directory / "training_arguments.json").read_bytes())
        return cls(accelerate=accelerate, deepspeed=deepspeed, arguments=arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """A plan with the sizes of its rehearsal."""

    plan: Plan
    """Of the shrunken model on CPU ranks, with the rehearsed layout, sequence and precision."""
    accelerate: dict[str, Any]
    """`accelerate.yaml` to launch with."""
    worker: RehearsalJob
    """What the ranks read."""
    offloads_optimizer: bool
    """Whether DeepSpeed steps on the host."""
    changes: tuple[Change, ...]
    """Every value that differs from the plan's."""


def choose_ranks(layout: Layout, ranks: int | None) -> int:
    """Return the number of ranks: the requested one, else 2 or the smallest legal count.

    Raises:
        UsageError: the number of ranks does not fit the layout.
    """
    counts: list[int] = [2, *range(1, MOST_RANKS + 1)] if ranks is None else []
    for count in counts:
        with contextlib.suppress(UsageError):
            shrink_layout(layout, ranks=count)
            return count
    shrink_layout(layout, ranks=ranks or 2)
    return ranks or 2


def scale_plan(
    plan: Plan, files: PlanFiles, config: Mapping[str, Any], *, ranks: int, steps: int, work: Path
) -> Rehearsed:
    """Return the plan's own files with scaled values for `ranks` CPU ranks, and write all of them into `work`.

    Ranks read them there, with `config.json` of the shrunken model.

    Raises:
        UsageError: the number of ranks does not fit the layout.
    """
    from ...plugins.planning import load_model_spec

    planned = plan.chosen.layout
    layout, layout_changes = shrink_layout(planned, ranks=ranks)
    shrunken, model_changes = shrink_model_config(config, layout=layout, seq_len_tokens=plan.job.seq_len_tokens)
    changes = [*layout_changes, *model_changes]
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text(json.dumps(shrunken, indent=1), encoding="utf-8")
    model = load_model_spec(str(work / "model")).spec
    if plan.job.task == "reward":
        model = model.with_score_head()
    zero = shrink_zero_options(
        layout.zero,
        original=plan.model,
        shrunken=model,
        shards_before=planned.shard_size,
        shards=layout.shard_size,
    )
    layout = replace(layout, zero=zero)
    precision = "bf16" if plan.job.precision in ("fp16", "fp8") else plan.job.precision
    seq_len = rehearsed_sequence(plan.job.seq_len_tokens, layout)
    # Tiles compute a chunked loss on CPU ranks, where Liger has no kernels.
    loss = "eager" if plan.job.second_models else plan.job.loss
    alone = without_kernels(plan.job).without_second_models()
    # The samples of a rehearsal are text, which a shrunken sequence holds without the tokens of images.
    images = {
        name: getattr(TrainingJob(), name) for name in ("images_per_sample", "image_size", "max_pixels", "frames")
    }
    alone = replace(alone, seq_len_tokens=seq_len, precision=precision, loss=loss, **images)
    job = small_task(plan, alone, model, layout)
    for name in (
        "task",
        "seq_len_tokens",
        "images_per_sample",
        "precision",
        "loss",
        "torch_compile",
        "use_liger_kernel",
    ):
        before, after = getattr(plan.job, name), getattr(job, name)
        if before != after:
            changes.append(Change(where=f"job: {name}", before=before, after=after))
    left = {second.role: second.spec.name for second in job.second_models}
    for second in plan.job.second_models:
        changes.append(Change(where=f"job: {second.role}", before=second.spec.name, after=left.get(second.role)))
    offload: dict[str, Any] = {}
    deepspeed_file, nvme = work / "ds_config.json", work / "nvme"
    nvme.mkdir()
    if files.deepspeed is not None:
        own = {name: value for name, value in files.deepspeed.items() if name != HEADER}
        deepspeed = deepcopy(own)
        shrink_deepspeed_config(deepspeed, zero=zero, nvme_path=str(nvme), before=planned, after=layout)
        cpu_deepspeed(deepspeed)
        changes += changes_between(own, deepspeed, "ds_config.json: ")
        offload = deepspeed.get("zero_optimization", {}).get("offload_optimizer") or {}
        deepspeed_file.write_text(json.dumps(deepspeed, indent=1), encoding="utf-8")
    accelerate = deepcopy(files.accelerate)
    shrink_accelerate_config(accelerate, ranks=ranks, deepspeed_config_file=str(deepspeed_file))
    cpu_accelerate(accelerate)
    (work / "accelerate.yaml").write_text(yaml.safe_dump(accelerate, sort_keys=False), encoding="utf-8")
    if layout.engine == "fsdp2":
        layout = replace(layout, offload_optimizer="none", offload_param="none")
    arguments = dict(files.arguments)
    cpu_arguments(arguments, layout=layout, steps=steps)
    for name in [name for name in arguments if name == "use_vllm" or name.startswith("vllm_")]:
        del arguments[name]
    changes += changes_between(files.accelerate, accelerate, "accelerate.yaml: ")
    changes += changes_between(files.arguments, arguments, "training_arguments.json: ")
    arguments |= {**OWN_ARGUMENTS, "save_steps": steps // 2}
    if plan.job.precision == "fp8":
        arguments["bf16"] = True
    worker = RehearsalJob(
        training_arguments=arguments,
        samples=layout.micro_batch_size * layout.gradient_accumulation_steps * ranks * steps,
        save_step=steps // 2,
    )
    chosen, hardware = replace(plan.chosen, layout=layout), parse_hardware(f"{ranks}xCPU")
    small = replace(plan, model=model, job=job, hardware=hardware, chosen=chosen)
    # The lengths and groups of a smaller task.
    arguments |= task_arguments(small)
    worker = worker.model_copy(update={"training_arguments": arguments})
    (work / "plan.json").write_text(json.dumps(small.to_dict()), encoding="utf-8")
    if job.task != "sft":
        write_samples(task_rows(small, worker.samples), work / TRAIN_SAMPLES)
    return Rehearsed(
        plan=small,
        accelerate=accelerate,
        worker=worker,
        offloads_optimizer=offload.get("device", "none") != "none",
        changes=tuple(changes),
    )


def small_task(plan: Plan, alone: TrainingJob, model: ModelSpec, layout: Layout) -> TrainingJob:
    """Return the job of a rehearsal with the plan's task: completions of the same share of a sequence by `generate`.

    `alone` is its supervised job, and `model` the shrunken one, which is also the reference.
    """
    planned = plan.job
    if TASKS[planned.task].trainer is None or planned.task in ("sft", "gkd"):
        return alone
    job = replace(alone, task=planned.task, beta=planned.beta, loss="auto")
    if planned.task in GROUPED_TASKS:
        share = planned.generated_tokens / planned.seq_len_tokens
        completions = layout.data_parallel_size * generated_sequences(layout, job)
        sizes = range(min(planned.generations, completions), 1, -1)
        group = next((size for size in sizes if completions % size == 0), 2)
        tokens = min(alone.seq_len_tokens - 8, max(1, round(share * alone.seq_len_tokens)))
        job = replace(job, generation="transformers", num_generations=group, completion_tokens=tokens)
    job = job.completed(model) if planned.reference is not None else job
    choice = plan.chosen.placements.get("reference")
    return job if choice is None or job.reference is None else job.placed("reference", choice.placement)


def make_model(work: Path, *, saved: bool, **settings: Any) -> Any:
    """Return the shrunken model: with weights in `work` if it is `saved`, else on the meta device.

    `settings` are those of `from_config`.
    """
    import torch
    from transformers import AutoConfig, set_seed

    from ...plugins.transformers.loading import auto_class

    config = AutoConfig.from_pretrained(work / "model", trust_remote_code=False)
    set_seed(0)
    with torch.device("cpu" if saved else "meta"):
        model = auto_class(config).from_config(config, trust_remote_code=False, **settings)
    if saved:
        # Transformers draws a progress bar, and DeepSpeed, which it imports here, logs to stdout.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            model.save_pretrained(work / "model")
    return model


LEARNING_RATES: Mapping[str, float] = {
    "sgd": 0.5,
    "lion": 1e-3,
    "adagrad": 2e-2,
    "rmsprop": 2e-3,
    "adafactor": 1e-2,
}
"""Rates with which each optimizer visibly learns in a few steps, by the start of its name."""
ADAM_LEARNING_RATE = 5e-3

_GPU_OPTIMIZERS = ("bnb", "8bit", "paged", "32bit", "_4bit", "apex", "fused_npu", "galore", "torchao")
_NEUTRAL: Mapping[str, Any] = {
    "tf32": None,
    "torch_compile": False,
    "use_liger_kernel": False,
    "ddp_backend": "gloo",
    "use_cpu": True,
    "no_cuda": None,
    "warmup_steps": 0,
    "warmup_ratio": None,
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "resume_from_checkpoint": None,
    "dataloader_num_workers": 0,
    "group_by_length": False,
    "neftune_noise_alpha": None,
    "save_total_limit": None,
    "save_only_model": False,
    "logging_dir": None,
    "liger_kernel_config": None,
    "deepspeed": None,
}
"""Keys that are replaced when they are present with another value; `None` removes the key."""


def cpu_arguments(scaled: dict[str, Any], *, layout: Layout, steps: int) -> None:
    """Make training arguments those of a few steps of a layout on CPU ranks."""
    scaled["per_device_train_batch_size"] = layout.micro_batch_size
    scaled["gradient_accumulation_steps"] = layout.gradient_accumulation_steps
    for key, neutral in _NEUTRAL.items():
        if neutral is None:
            scaled.pop(key, None)
        elif scaled.get(key) is not None:
            scaled[key] = neutral
    if scaled.get("fp16"):
        scaled["fp16"] = False
        scaled["bf16"] = True
    optimizer = str(scaled.get("optim", "adamw_torch_fused"))
    if any(part in optimizer for part in _GPU_OPTIMIZERS):
        optimizer = "adamw_torch"
        scaled["optim"] = optimizer
    rates = (rate for name, rate in LEARNING_RATES.items() if optimizer.startswith(name))
    scaled["learning_rate"] = next(rates, ADAM_LEARNING_RATE)
    scaled["max_steps"] = steps


OWN_ARGUMENTS: dict[str, Any] = {
    "save_strategy": "steps",
    "logging_strategy": "steps",
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "report_to": "none",
    "disable_tqdm": True,
}
"""What a rehearsal saves and logs."""


def cpu_deepspeed(scaled: dict[str, Any]) -> None:
    """Replace fp16, which CPU ranks do not train, by bf16 in a DeepSpeed configuration."""
    section = scaled.get("fp16")
    if isinstance(section, dict) and section.get("enabled") is not False:
        scaled.pop("fp16", None)
        scaled["bf16"] = {"enabled": section.get("enabled", True)}


def cpu_accelerate(scaled: dict[str, Any]) -> None:
    """Make an Accelerate configuration name no GPUs and compute in bf16 instead of fp16 or fp8.

    FSDP2 offloads into pinned memory, which torch 2.13.0 has only beside an accelerator; on CPU ranks its shards are
    on the host already.
    """
    fsdp = section_of(scaled, "fsdp_config")
    if fsdp is not None and fsdp.get("fsdp_offload_params"):
        fsdp["fsdp_offload_params"] = False
    if scaled.get("mixed_precision") in ("fp16", "fp8"):
        scaled["mixed_precision"] = "bf16"
    for key in ("gpu_ids", "fp8_config", "dynamo_config", "enable_cpu_affinity"):
        if scaled.get(key):
            scaled.pop(key, None)


STAGES = {"train": "training", "resume": "resuming from the checkpoint"}
"""The two launches of a rehearsal without a script, and what the log calls them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """Settings that all launches of a rehearsal share."""

    directory: Path
    """Of the plan's files."""
    work: Path
    """Temporary directory of launchers and ranks."""
    ranks: int
    steps: int
    """Optimizer steps."""
    time_limit_seconds: float
    """Hard limit of one launch."""

    def log_progress(self, what: str, done: int = 0) -> None:
        """Log the activity with the optimizer steps of both launches."""
        log_message(Progress(what=what, done=done, total=len(STAGES) * self.steps))


def launch_rehearsal(
    job: RankJob, rehearsed: Rehearsed, settings: LaunchSettings, what: str, *, steps_before: int = 0
) -> None:
    """Run a job on the ranks of a rehearsal.

    `what` describes the job in the log, and `steps_before` counts the optimizer steps of earlier launches.

    Raises:
        ShardwrightError: a rank failed or was killed, or the time limit passed; or an operator cannot be compiled.
    """
    settings.log_progress(f"{what}: starting {settings.ranks} ranks", steps_before)

    def on_message(message: Message) -> None:
        if isinstance(message, Progress):
            settings.log_progress(what, steps_before + message.done)
        else:
            log_message(message)

    work, limit = settings.work, settings.time_limit_seconds
    # The plan's own launcher. Accelerate has none for CPU ranks of MULTI_CPU and other types.
    launcher = ["torchrun", "--standalone", f"--nproc_per_node={settings.ranks}"]
    if rehearsed.accelerate.get("distributed_type") in ("DEEPSPEED", "FSDP", "MULTI_GPU", "NO"):
        launcher = ["accelerate", "launch", "--config_file", str(work / "accelerate.yaml")]
    try:
        launch_job(job, rehearsed.plan, work, work, launcher=launcher, timeout_seconds=limit, on_message=on_message)
    except LaunchFailedError as error:
        stopped = error.launcher_exit_code is None
        hint = f"stopped after {limit:g} s; raise --time-limit if the machine is slow\n" if stopped else ""
        raise ShardwrightError(f"{hint}{error}") from None


def rank_records(work: Path, stage: str, ranks: int) -> list[dict[str, Any]]:
    files = [work / f"{stage}-rank{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
