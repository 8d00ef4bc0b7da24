"""Inputs that every launched training reads: hardware, held-out samples, a teacher, and the job that is planned."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.launch import NodePlace
from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.training_arguments import planned_training_arguments
from ...ds_configs.specs.errors import Fault, RefusedInputError, UsageError
from ...ds_configs.specs.job import AXIS_FIELDS, TrainingJob
from ...plugins.planning.from_names import read_hardware
from ...plugins.planning.models import LoadedModel, load_model_spec
from ..data.samples import Samples, stated_samples
from ..data.sources import WHOLE, Part, parse_source
from ..data.streamed import streamed_samples
from .checkpoints import CHECKPOINTS
from .settings import LaunchedSettings, is_without

if TYPE_CHECKING:
    from ...ds_configs.specs.hardware import HardwareSpec
    from ...ds_configs.specs.strategy import Strategy

_DEFAULT_GLOBAL_BATCH = 32


def chosen_hardware(settings: LaunchedSettings) -> HardwareSpec:
    """Return the named hardware; without a name this machine's accelerators, or else two CPU ranks."""
    import torch

    name = settings.hardware or ("local" if torch.cuda.is_available() else "2xCPU")
    return read_hardware(name, host_memory=settings.host_memory, nvme=settings.nvme)


def launch_faults(hardware: HardwareSpec, place: NodePlace | None = None) -> list[Fault]:
    """Return why this machine, or this one of several, cannot run what the hardware's name says."""
    import torch

    if place is not None and not 0 <= int(place.rank) < hardware.nodes:
        rule = f"the plan has the machines 0 to {hardware.nodes - 1}"
        return [Fault(where="node_rank", value=place.rank, rule=rule, fix="plan for several, such as 2x8xH100-80GB")]
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    alone = hardware.nodes == 1 or place is not None
    if alone and (hardware.gpu == "CPU" or hardware.gpus_per_node <= here):
        return []
    where = "on each machine" if place is not None else f"on {hardware.nodes} node(s)"
    count = hardware.gpus_per_node if place is not None else hardware.world_size
    rule = f"needs {count} x {hardware.gpu} {where}; this machine has {here} GPUs"
    fix = "plan it with --dry-run, or leave --hardware out to use what is here"
    if hardware.nodes > 1 and place is None:
        fix = "start it on all machines by --on ssh with --hostfile, or with --node-rank and --main-address on each"
    return [Fault(where="hardware", value=hardware.name, rule=rule, fix=fix)]


def trained_teacher(teacher: str, revision: str | None) -> LoadedModel:
    """Return a teacher's sizes.

    Raises:
        UsageError: it has no weights.
        RefusedInputError: its weights are in another format than safetensors.
    """
    source = Path(teacher)
    if is_without(source, ["*.safetensors"]):
        if is_without(source, ["*.bin", "*.pt", "*.pth"]):
            rule = "has no weights, so it has nothing to teach"
            raise UsageError(Fault(where="teacher", value=teacher, rule=rule, fix="give a trained model"))
        rule = "weights are read from safetensors only, other formats can run code"
        raise RefusedInputError(Fault(where="teacher", value=teacher, rule=rule, fix="convert them"))
    return load_model_spec(teacher, revision=revision)


def named_samples(
    settings: LaunchedSettings, tokenizer: Any, *, train_samples: int | None = None, part: Part = WHOLE
) -> Samples:
    """Return the samples of the dataset, and others to evaluate on: held out of it, or of a split or file of its own.

    With a number of samples to train on the dataset is read no further, and its head is held out; of the rest a part
    may be read.

    Raises:
        UsageError: there is no text, or nothing is left to hold out.
    """
    other, other_split = settings.evaluation_dataset, settings.evaluation_split
    if other is not None or other_split is not None:
        if other_split is not None and parse_source(other or settings.dataset).is_local:
            rule, fix = "is a split, which only a Hub dataset has", "name a file with --evaluation-dataset"
            raise UsageError(Fault(where="evaluation_split", value=other_split, rule=rule, fix=fix))
        whole = settings.model_copy(update={"evaluation_fraction": 0.0})
        named = {
            "dataset": other or settings.dataset,
            "dataset_split": other_split or settings.dataset_split,
            "dataset_revision": settings.dataset_revision if other is None else None,
        }
        found = _stated(whole, tokenizer, train_samples, evaluation_samples=0, part=part)
        held_out = list(stated_samples(whole.model_copy(update=named), tokenizer).train)
        statistics = replace(found.statistics, evaluation_samples=len(held_out))
        return replace(found, evaluation=held_out, statistics=statistics)
    found = _stated(settings, tokenizer, train_samples, evaluation_samples=settings.evaluation_samples, part=part)
    if not found.evaluation:
        share = f"{settings.evaluation_fraction:.0%}"
        rule = f"the {share} that is held out has no whole sample, where equal rows stay on one side"
        fix = "give more data, raise --evaluation-fraction or lower --seq-len"
        raise UsageError(Fault(where="dataset", value=settings.dataset, rule=rule, fix=fix))
    return found


def _stated(
    settings: LaunchedSettings, tokenizer: Any, train_samples: int | None, *, evaluation_samples: int, part: Part
) -> Samples:
    if train_samples is None:
        return stated_samples(settings, tokenizer)
    counts = {"train_samples": train_samples, "evaluation_samples": evaluation_samples}
    return streamed_samples(settings, tokenizer, part=part, **counts)


def evenly_held_out(
    samples: Samples, plan: Plan, settings: LaunchedSettings, *, batch_size: int | None = None
) -> Samples:
    """Cut the held-out samples to whole batches on every rank: a last one would be filled up with copies."""
    found = samples.evaluation[: settings.evaluation_samples]
    at_once = plan.hardware.world_size * (batch_size or evaluation_batch_size(plan, len(found)))
    kept = found[: max(1, len(found) // at_once) * at_once]
    return replace(samples, evaluation=kept, statistics=replace(samples.statistics, evaluation_samples=len(kept)))


def evaluation_batch_size(plan: Plan, samples: int) -> int:
    """Return the held-out samples of one forward pass on one rank: a micro-batch, or fewer where there are few."""
    return max(1, min(plan.chosen.strategy.micro_batch_size, samples // plan.hardware.world_size))


def common_arguments(settings: LaunchedSettings, plan: Plan, output_dir: Path, held_out: int) -> dict[str, Any]:
    """Return the keys of `TrainingArguments` that a plan and the settings of every training ask for.

    Args:
        settings: What was asked for.
        plan: Where everything goes.
        output_dir: Of the training.
        held_out: Samples to evaluate on.
    """
    arguments = planned_training_arguments(plan) | {
        "output_dir": str(output_dir.absolute() / CHECKPOINTS),
        "learning_rate": settings.base_learning_rate(),
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,
        "num_train_epochs": settings.epochs,
        "per_device_eval_batch_size": evaluation_batch_size(plan, held_out),
        "logging_steps": settings.logging_steps,
        "save_strategy": "no" if settings.save_steps is None else "steps",
        "seed": settings.seed,
        "report_to": list(settings.report_to) or "none",
        "disable_tqdm": True,
    }
    if settings.max_steps is not None:
        arguments["max_steps"] = settings.max_steps
    if settings.save_steps is not None:
        arguments["save_steps"] = settings.save_steps
    return arguments


def optimizer_steps(settings: LaunchedSettings, strategy: Strategy, samples: int) -> int:
    """Return the optimizer steps of a run, as Transformers 5.17 counts them (`set_initial_training_values`)."""
    if settings.max_steps is not None:
        return settings.max_steps
    batches = ceil(ceil(samples / strategy.micro_batch_size) / strategy.data_parallel_size)
    return ceil(settings.epochs * max(1, ceil(batches / strategy.gradient_accumulation_steps)))


def training_job(settings: LaunchedSettings, hardware: HardwareSpec, **further: Any) -> TrainingJob:
    """Return what is to be planned; `further` holds fields of `TrainingJob`, such as those of a teacher.

    Without sizes among them a training runs under data parallelism alone: trainers with losses of their own need it.
    """
    alone: dict[str, Any] = dict.fromkeys(AXIS_FIELDS, 1)
    precision = settings.precision
    if precision == "auto":
        precision = "fp32" if hardware.gpu == "CPU" else "bf16"
    micro_batch = None if settings.micro_batch_size == "auto" else settings.micro_batch_size
    at_once = hardware.world_size * (micro_batch or 1)
    return TrainingJob(
        seq_len_tokens=settings.seq_len,
        micro_batch_size=micro_batch,
        global_batch_size=settings.global_batch_size or at_once * max(1, _DEFAULT_GLOBAL_BATCH // at_once),
        precision=precision,
        optimizer=settings.optimizer,
        method=settings.method,
        lora_rank=settings.lora_rank,
        lora_targets=tuple(name.strip() for name in settings.lora_targets.split(",") if name.strip()),
        gradient_checkpointing=settings.gradient_checkpointing,
        loss="eager",
        strategy=settings.strategy,
        offload=settings.offload,
        **(alone | further),
    )
