"""Create the files of a rehearsal from a plan's files: the same keys and values, but scaled sizes and CPU ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.rendering import DEEPSPEED_FILE, copied_configuration
from ...ds_configs.shrink.config import Change, Rewriting, rehearsed_sequence, shrink_model_config
from ...ds_configs.shrink.layout import (
    shrink_accelerate_config,
    shrink_deepspeed_config,
    shrink_strategy,
    shrink_zero_options,
)
from ...ds_configs.specs.errors import UsageError
from ...ds_configs.specs.hardware import parse_hardware
from ...ds_configs.specs.job import TrainingJob, without_kernels
from ...ds_configs.specs.layout import Layout
from ...ds_configs.specs.model import ModelSpec
from ...ds_configs.specs.texts import strict_json
from ..runs.settings import RankJob
from .cpu_substitutes import cpu_accelerate, cpu_arguments, cpu_deepspeed

SCRIPT_STAGE = "script"
"""Name of the records of a script's ranks."""
MOST_RANKS = 64
"""Maximum number of ranks in the search for the smallest legal count."""


class RehearsalJob(RankJob):
    """Job of every rank."""

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
    model_directory: str = Field(description="directory of the small model that replaces it")
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

    model: ModelSpec
    """Of the shrunken model."""
    strategy: Layout
    """The layout on the rehearsal's ranks."""
    job: TrainingJob
    """The job with the rehearsed sequence and precision."""
    accelerate: dict[str, Any]
    """`accelerate.yaml` to launch with."""
    deepspeed: dict[str, Any] | None
    """`ds_config.json` to launch with; `None` without DeepSpeed."""
    worker: RehearsalJob
    """What the ranks read."""
    changes: tuple[Change, ...]
    """Every value that differs from the plan's."""

    def offload_device(self, what: Literal["optimizer", "param"]) -> str:
        """Return where the files send optimizer states or parameters: `none`, `cpu` or `nvme`."""
        section = (self.deepspeed or {}).get("zero_optimization", {}).get(f"offload_{what}") or {}
        return str(section.get("device", "none"))


def choose_ranks(strategy: Layout, *, nodes: int, ranks: int | None) -> int:
    """Return the number of ranks: the requested one, else 2 (or one per node) or the smallest legal count.

    Raises:
        UsageError: the number of ranks does not fit the layout.
    """
    if ranks is not None:
        shrink_strategy(strategy, ranks=ranks, nodes=nodes)
        return ranks
    preferred = max(2, nodes)
    counts: list[int] = [preferred, *range(nodes, MOST_RANKS + 1, nodes)]
    for count in counts:
        try:
            shrink_strategy(strategy, ranks=count, nodes=nodes)
        except UsageError:
            continue
        return count
    shrink_strategy(strategy, ranks=preferred, nodes=nodes)
    raise AssertionError("the last call raises")


def scale_plan(
    plan: Plan, files: PlanFiles, config: Mapping[str, Any], *, ranks: int, nodes: int, steps: int, work: Path
) -> Rehearsed:
    """Return the plan's own files with scaled values, for `ranks` CPU ranks on `nodes` launchers.

    It writes `config.json` of the shrunken model to the work directory.

    Raises:
        UsageError: the number of ranks does not fit the layout.
    """
    from ...plugins.planning.models import load_model_spec

    strategy, layout_changes = shrink_strategy(plan.chosen.strategy, ranks=ranks, nodes=nodes)
    shrunken, model_changes = shrink_model_config(config, strategy=strategy, seq_len_tokens=plan.job.seq_len_tokens)
    changes = [*layout_changes, *model_changes]
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text(json.dumps(shrunken, indent=1), encoding="utf-8")
    model = load_model_spec(str(work / "model")).spec
    zero, _ = shrink_zero_options(
        strategy.zero,
        original=plan.model,
        shrunken=model,
        shards_before=plan.chosen.strategy.shard_size,
        shards=strategy.shard_size,
    )
    strategy = replace(strategy, zero=zero)
    precision = "bf16" if plan.job.precision in ("fp16", "fp8") else plan.job.precision
    seq_len = rehearsed_sequence(plan.job.seq_len_tokens, strategy)
    # Tiles compute a chunked loss on CPU ranks, where Liger has no kernels.
    loss = plan.job.loss if plan.job.teacher is None else "eager"
    job = replace(without_kernels(plan.job), seq_len_tokens=seq_len, precision=precision, loss=loss, teacher=None)
    for name in ("seq_len_tokens", "precision", "loss", "torch_compile", "use_liger_kernel"):
        before, after = getattr(plan.job, name), getattr(job, name)
        if before != after:
            changes.append(Change(where=f"job: {name}", before=before, after=after))
    if plan.job.teacher is not None:
        changes.append(Change(where="job: teacher", before=plan.job.teacher.name, after=None))
    deepspeed, deepspeed_file = None, None
    if files.deepspeed is not None:
        deepspeed_file = str(work / "ds_config.json")
        deepspeed = Rewriting(files.deepspeed, path="ds_config.json: ")
        nvme_path, planned = str(work / "nvme"), plan.chosen.strategy
        shrink_deepspeed_config(deepspeed, zero=strategy.zero, nvme_path=nvme_path, before=planned, after=strategy)
        cpu_deepspeed(deepspeed)
        changes += deepspeed.changes
    accelerate = Rewriting(files.accelerate, path="accelerate.yaml: ")
    shrink_accelerate_config(accelerate, ranks=ranks, nodes=nodes, deepspeed_config_file=deepspeed_file)
    cpu_accelerate(accelerate)
    if strategy.engine == "fsdp2":
        strategy = replace(strategy, offload_optimizer="none", offload_param="none")
    arguments = Rewriting(files.arguments, path="training_arguments.json: ")
    cpu_arguments(arguments, layout=strategy, steps=steps, save_step=steps // 2)
    changes += [*accelerate.changes, *arguments.changes]
    if plan.job.precision == "fp8":
        arguments.values["bf16"] = True
    worker = RehearsalJob(
        training_arguments=arguments.values,
        samples=strategy.micro_batch_size * strategy.gradient_accumulation_steps * ranks * steps,
        save_step=steps // 2,
    )
    return Rehearsed(
        model=model,
        strategy=strategy,
        job=job,
        accelerate=accelerate.values,
        deepspeed=None if deepspeed is None else deepspeed.values,
        worker=worker,
        changes=tuple(changes),
    )


def write_rehearsal(plan: Plan, rehearsed: Rehearsed, work: Path, *, ranks: int) -> None:
    """Write what the launchers and ranks read, but for the job: among it the plan with the sizes of the rehearsal."""
    (work / "nvme").mkdir()
    chosen = replace(plan.chosen, strategy=rehearsed.strategy)
    small = replace(
        plan, model=rehearsed.model, job=rehearsed.job, hardware=parse_hardware(f"{ranks}xCPU"), chosen=chosen
    )
    (work / "plan.json").write_text(json.dumps(small.to_dict()), encoding="utf-8")
    accelerate = yaml.safe_dump(rehearsed.accelerate, sort_keys=False)
    (work / "accelerate.yaml").write_text(accelerate, encoding="utf-8")
    if rehearsed.deepspeed is not None:
        (work / "ds_config.json").write_text(json.dumps(rehearsed.deepspeed, indent=1), encoding="utf-8")
