"""Runs on every rank of a script's rehearsal: replace the script's model, scale its arguments, and run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import UsageError
from ...plugins import patches
from ..runs.clock import ProgressSender
from ..runs.plan_callback import TRAINED_TYPE, argument_differences, keep_planned_memory
from ..runs.ranks import write_json
from ..runs.settings import RankTask
from ..training.script_rank import run_script
from .files import SCRIPT_STAGE, RehearsedScriptJob

_COMPARED = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "bf16", "fp16")
"""Arguments that determine a plan's memory and time."""


class RehearsedScriptTask(RehearsedScriptJob, RankTask):
    """A user's script with the shrunken model in place of its own."""

    def run(self, work: Path) -> None:
        """Run the script on this rank, and write a record."""
        record: dict[str, Any] = {"trainers": 0, "losses": [], "differences": [], "errors": []}
        _exchange_model(self.model_name, str(work / "model"))
        _scale_arguments(self, work, record)
        plan = Plan.load(work)
        os.chdir(self.working_directory)
        os.environ["PWD"] = self.working_directory
        # Caches would be written to the directories of modules outside the copy.
        sys.dont_write_bytecode = True
        try:
            run_script(plan, self.script, self.arguments, [_recorder(record, plan), ProgressSender])
        finally:
            write_json(record, work / f"{SCRIPT_STAGE}-rank{os.environ.get('RANK', '0')}.json")


def _exchange_model(name: str, directory: str) -> None:
    """Load everything with the name of the plan's model from a directory."""

    def from_directory(bound: Any) -> Any:
        load = bound.__func__

        def loaded(kind: Any, named: Any, *args: Any, **settings: Any) -> Any:
            if str(named) == name:
                named = directory
                settings.pop("revision", None)
            return load(kind, named, *args, **settings)

        return classmethod(loaded)

    for loader in patches.names("rehearsal-model-"):
        patches.apply(loader, from_directory)


def _scale_arguments(job: RehearsedScriptJob, work: Path, record: dict[str, Any]) -> None:
    """Replace the plan's values in a script's `TrainingArguments` by the rehearsal's, and limit the run."""
    from transformers import TrainingArguments

    defaults = {field.name: field.default for field in fields(TrainingArguments)}
    limits = {
        "output_dir": str(work / "output"),
        "max_steps": job.steps,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "logging_strategy": "steps",
        "save_strategy": "no",
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "report_to": "none",
        "push_to_hub": False,
        "disable_tqdm": True,
    }

    def scaling(complete: Callable[[Any], None]) -> Callable[[Any], None]:
        def scaled(arguments: Any) -> None:
            for name, planned in job.planned.items():
                stated = getattr(arguments, name)
                stated = getattr(stated, "value", stated)
                if stated == planned:
                    setattr(arguments, name, job.training_arguments.get(name, defaults[name]))
                elif name in _COMPARED:
                    record["differences"].append(f"{name} is {stated}, but the plan has {planned}")
            for name, value in limits.items():
                setattr(arguments, name, value)
            complete(arguments)

        return scaled

    patches.apply("rehearsal-arguments", scaling)


def _recorder(record: dict[str, Any], plan: Plan) -> type:
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            record["trainers"] += 1
            lines = argument_differences(plan, args, kwargs.get("model"), ranks=args.world_size)
            record["errors"] += [line for line in lines if line.startswith(TRAINED_TYPE)]
            try:
                keep_planned_memory(plan, args, kwargs.get("model"))
            except UsageError as error:
                record["errors"].append(str(error))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in (logs or {}):
                record["losses"].append(float(logs["loss"]))

    return Recorder
