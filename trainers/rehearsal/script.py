"""Rehearsal of a user's script with a shrunken plan, whose model and arguments replace the script's."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ShardwrightError
from ...ds_configs.specs.hardware import parse_hardware
from ...plugins.transformers.training_arguments import byte_tokenizer
from ..training.script import with_plan_flags
from .checks import Check, failed, passed
from .files import SCRIPT_STAGE, VIEW, PlanFiles, Rehearsed, RehearsedScriptJob
from .launch import LaunchSettings, launch_job, prepare_launch, rank_records
from .view import MOST_FILES, make_view

logger = logging.getLogger(__name__)
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
)

_NOT_SHOWN = (
    "\nA rehearsed script sees its working directory without hidden directories and weights over 64 MiB: pass these "
    "as arguments or absolute paths"
)


def rehearse_script(
    plan: Plan, files: PlanFiles, rehearsed: Rehearsed, settings: LaunchSettings, script: Path, arguments: Sequence[str]
) -> tuple[list[Check], tuple[float, ...]]:
    """Run a script on every rank of a rehearsal, and return the checks and the loss of each step."""
    work = settings.work
    _write_small(plan, files, rehearsed, settings)
    # The script sees the rehearsal's files and model in place of the plan's.
    exchanged = {file: work / file.name for file in settings.directory.absolute().iterdir()}
    exchanged = {file: small for file, small in exchanged.items() if small.is_file()}
    if (model := Path(plan.model.name)).is_dir():
        exchanged[model.absolute()] = work / "model"
    if not make_view(Path.cwd(), work / VIEW, exchanged, apart=work.parent):
        logger.info(f"the working directory has over {MOST_FILES:,} files: the script does not see all of them")
    scaled = rehearsed.worker.training_arguments
    job = RehearsedScriptJob(
        training_arguments={name: scaled[name] for name in files.arguments if name in scaled},
        planned=files.arguments,
        script=str(script.absolute()),
        arguments=exchanged_arguments(with_plan_flags(arguments, plan), plan, settings.directory, work),
        model_name=plan.model.name,
        model_directory=str(work / "model"),
        steps=settings.steps,
        working_directory=str(Path.cwd()),
    )
    try:
        prepare_launch(rehearsed)
        launch_job(job, rehearsed, settings, f"running {script.name}")
    except ShardwrightError as error:
        hint = _NOT_SHOWN if "FileNotFoundError" in str(error) else ""
        return [failed("launch", f"{error}{hint}")], ()
    record = rank_records(work, SCRIPT_STAGE, settings.ranks)[0]
    losses, checks = record["losses"], [passed("launch", f"{settings.ranks} ranks ran {script.name} to its end")]
    if not record["trainers"]:
        return [*checks, passed("script", "creates no Trainer, so its batch and losses are not checked")], tuple(losses)
    errors = record["errors"]
    if record["differences"]:
        lines = "; ".join(record["differences"])
        errors = [f"{lines}: pass the plan's training_arguments.json to TrainingArguments", *errors]
    if errors:
        checks.append(failed("script", "; ".join(errors)))
    else:
        checks.append(passed("script", "its TrainingArguments are the plan's"))
    if losses and all(math.isfinite(loss) for loss in losses):
        checks.append(passed("loss_finite", f"{losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"))
    else:
        checks.append(failed("loss_finite", f"losses: {', '.join(f'{loss:.3f}' for loss in losses) or 'none'}"))
    return checks, tuple(losses)


def exchanged_arguments(arguments: Sequence[str], plan: Plan, plan_directory: Path, work: Path) -> list[str]:
    """Return the arguments of a script, with the rehearsal's model and directory in place of the plan's.

    Other paths that exist become absolute, because the script runs in a view of this directory. Values of flags that
    name an output do not: a script must not replace the results of a training.
    """
    directory = plan_directory.absolute()

    def exchanged(value: str, flag: str) -> str:
        path = Path(value).absolute()
        if plan.model.name in (value, str(path)):
            return str(work / "model")
        if path.is_relative_to(directory):
            return str(work / path.relative_to(directory))
        # `os.path.exists` is false for text that is longer than a path can be.
        return str(path) if value and "output" not in flag and os.path.exists(path) else value  # noqa: PTH110

    words = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        flag, sign, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        words.append(f"{flag}{sign}{exchanged(value, flag or before)}" if value else argument)
    return words


def _write_small(plan: Plan, files: PlanFiles, rehearsed: Rehearsed, settings: LaunchSettings) -> None:
    """Write the shrunken weights, a tokenizer of bytes, and the shrunken plan with the arguments that ranks scale."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    work = settings.work
    model = work / "model"
    set_seed(0)
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    # As the model's own checkpoint, whose type a script loads by default. DeepSpeed in fp32 trains no other type.
    dtype = config.dtype if config.dtype in (torch.bfloat16, torch.float32) else torch.float32
    if rehearsed.strategy.engine == "deepspeed":
        dtype = torch.bfloat16 if rehearsed.job.precision == "bf16" else torch.float32
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        made = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        made.save_pretrained(model)
    tokenizer = byte_tokenizer(rehearsed.model.dimensions.vocab_size)
    tokenizer.chat_template = _CHAT_TEMPLATE
    # Collators of scripts pad.
    tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.save_pretrained(model)
    chosen = replace(plan.chosen, strategy=rehearsed.strategy)
    hardware = parse_hardware(f"{settings.ranks}xCPU")
    small = replace(plan, model=rehearsed.model, job=rehearsed.job, hardware=hardware, chosen=chosen)
    texts = {"plan.json": small.to_dict(), "training_arguments.json": files.arguments}
    for name, value in texts.items():
        (work / name).write_text(json.dumps(value), encoding="utf-8")
