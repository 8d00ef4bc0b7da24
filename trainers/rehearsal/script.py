"""Rehearsal of a user's own script: a plan in small, and a script whose model and arguments are exchanged for it."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ShardwrightError
from ...ds_configs.specs.hardware import parse_hardware
from ...plugins.transformers.training_arguments import byte_tokenizer
from .checks import Check, failed, passed
from .files import PlanFiles, Rehearsed
from .launch import LaunchSettings, launch_worker, prepare_launch, rank_records
from .script_worker import STAGE, ScriptJob

WORKER = f"{__package__}.script_worker"
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
)


def rehearse_script(
    plan: Plan, files: PlanFiles, rehearsed: Rehearsed, settings: LaunchSettings, script: Path, arguments: Sequence[str]
) -> tuple[list[Check], tuple[float, ...]]:
    """Run a script on every rank of a rehearsal, and return what was found and the loss of each step.

    Args:
        plan: The plan in its own size.
        files: Its files.
        rehearsed: The same in the rehearsal's size.
        settings: Of the launch.
        script: Python file.
        arguments: Its arguments.
    """
    work = settings.work
    _write_small(plan, files, rehearsed, settings)
    scaled = rehearsed.worker.training_arguments
    job = ScriptJob(
        training_arguments={name: scaled[name] for name in files.arguments if name in scaled},
        planned=files.arguments,
        script=str(script.absolute()),
        arguments=[_exchanged(argument, plan, settings.directory, work) for argument in arguments],
        model_name=plan.model.name,
        model_directory=str(work / "model"),
        steps=settings.steps,
    )
    message = f"running {script.name}"
    settings.tell(f"{message}: starting {settings.ranks} ranks")
    try:
        prepare_launch(rehearsed, settings)
        launch_worker(WORKER, job, rehearsed, settings, lambda step, _: settings.tell(message, step))
    except ShardwrightError as error:
        return [failed("launch", str(error))], ()
    records = rank_records(work, STAGE, settings.ranks)
    return _found(records, script.name, settings.ranks), tuple(records[0]["losses"])


def _exchanged(argument: str, plan: Plan, plan_directory: Path, work: Path) -> str:
    """Return an argument of the script with the plan's model and directory exchanged for the rehearsal's."""
    if argument == plan.model.name:
        return str(work / "model")
    place, directory = Path(argument).absolute(), plan_directory.absolute()
    return str(work / place.relative_to(directory)) if place.is_relative_to(directory) else argument


def _write_small(plan: Plan, files: PlanFiles, rehearsed: Rehearsed, settings: LaunchSettings) -> None:
    """Write what a script reads of a plan and a model: weights, a tokenizer of bytes, the plan in small.

    The arguments stay those of the plan, which the ranks scale where the script takes them.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    work = settings.work
    model = work / "model"
    set_seed(0)
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    dtype = torch.bfloat16 if rehearsed.job.precision == "bf16" else torch.float32
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        made = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        made.save_pretrained(model)
    tokenizer = byte_tokenizer(rehearsed.model.dimensions.vocab_size)
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(model)
    chosen = replace(plan.chosen, strategy=rehearsed.strategy)
    hardware = parse_hardware(f"{settings.ranks}xCPU")
    small = replace(plan, model=rehearsed.model, job=rehearsed.job, hardware=hardware, chosen=chosen)
    texts = {"plan.json": small.to_dict(), "training_arguments.json": files.arguments}
    for name, value in texts.items():
        (work / name).write_text(json.dumps(value), encoding="utf-8")


def _found(records: Sequence[Mapping[str, Any]], name: str, ranks: int) -> list[Check]:
    """Return what the ranks' records say of a script that ran to its end."""
    checks = [passed("launch", f"{ranks} ranks ran {name} to its end")]
    first = records[0]
    if not first["trainers"]:
        return [*checks, passed("script", "makes no Trainer: its batch and its losses are its own")]
    if first["differences"]:
        lines = "; ".join(first["differences"])
        checks.append(failed("script", f"{lines}: give the plan's training_arguments.json to TrainingArguments"))
    else:
        checks.append(passed("script", "its TrainingArguments are the plan's"))
    losses = first["losses"]
    if losses and all(math.isfinite(loss) for loss in losses):
        checks.append(passed("loss_finite", f"{losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"))
    else:
        checks.append(failed("loss_finite", f"losses: {', '.join(f'{loss:.3f}' for loss in losses) or 'none'}"))
    return checks
