"""Runs on every rank of a script's rehearsal: exchanges the script's model, scales its arguments, and runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import Field

from ...ds_configs.plan.plan import Plan
from ...plugins.accelerate.cpu_ranks import serve_scripts_on_cpu_ranks
from ..runs.ranks import progress_callback, run_rank, write_json
from ..runs.settings import RankJob
from ..training.script_rank import carry_axes, run_script
from .view import ViewGuard

STAGE, VIEW = "script", "here"
_COMPARED = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "bf16", "fp16")
"""Arguments that a plan's memory and time rest on."""


class ScriptJob(RankJob):
    """Job of every rank; `training_arguments` are the plan's, scaled."""

    planned: dict[str, Any] = Field(description="the plan's training arguments as its file holds them")
    script: str = Field(description="Python file")
    arguments: list[str] = Field(description="what the script is called with")
    model_name: str = Field(description="how the plan names its model")
    model_directory: str = Field(description="the shrunken model that takes its place")
    steps: int = Field(description="optimizer steps of a trainer, at most")
    working_directory: str = Field(description="the user's, of which the script sees a view")


def rehearse_script_rank(job: ScriptJob, work: Path) -> None:
    """Run the script on this rank, and write what was seen."""
    record: dict[str, Any] = {"trainers": 0, "losses": [], "differences": []}
    _exchange_model(job.model_name, job.model_directory)
    _scale_arguments(job, work, record)
    # The outermost change of the arguments runs first: CPU ranks need theirs in what was scaled.
    serve_scripts_on_cpu_ranks()
    _record_trainers(record)
    carry_axes(Plan.load(work))
    os.chdir(work / VIEW)
    # Caches of the user's own modules would lie beside them.
    sys.dont_write_bytecode = True
    kept = Path(job.working_directory), Path(job.script).parent
    sys.addaudithook(ViewGuard.of(work / VIEW, *kept, free=work))
    try:
        run_script(job.script, job.arguments)
    finally:
        write_json(record, work / f"{STAGE}-rank{os.environ.get('RANK', '0')}.json")


def _exchange_model(name: str, directory: str) -> None:
    """Let everything that is loaded by the name of the plan's model come from a directory."""
    from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    def from_directory(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(kind: Any, named: Any, *args: Any, **settings: Any) -> Any:
            if str(named) == name:
                named = directory
                settings.pop("revision", None)
            return load(kind, named, *args, **settings)

        return loaded

    loaders: tuple[Any, ...] = (AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedConfig)
    for kind in (*loaders, _BaseAutoModelClass):
        kind.from_pretrained = classmethod(from_directory(kind.from_pretrained.__func__))


def _scale_arguments(job: ScriptJob, work: Path, record: dict[str, Any]) -> None:
    """Put the rehearsal's values where a script's `TrainingArguments` hold the plan's, and limit what it does."""
    from transformers import TrainingArguments

    complete: Any = TrainingArguments.__post_init__
    defaults = {field.name: field.default for field in fields(TrainingArguments)}
    limits = {
        "output_dir": str(work / "output"),
        "max_steps": job.steps,
        "logging_steps": 1,
        "logging_strategy": "steps",
        "save_strategy": "no",
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "report_to": "none",
        "push_to_hub": False,
        "disable_tqdm": True,
    }

    def scaled(arguments: Any) -> None:
        for name, planned in job.planned.items():
            stated = getattr(arguments, name)
            stated = getattr(stated, "value", stated)
            if stated == planned:
                setattr(arguments, name, job.training_arguments.get(name, defaults[name]))
            elif name in _COMPARED:
                record["differences"].append(f"{name} is {stated}, the plan says {planned}")
        for name, value in limits.items():
            setattr(arguments, name, value)
        complete(arguments)

    TrainingArguments.__post_init__ = scaled


def _record_trainers(record: dict[str, Any]) -> None:
    from transformers import TrainerCallback
    from transformers import trainer as trainer_module

    class Recorder(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            record["trainers"] += 1

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in (logs or {}):
                record["losses"].append(float(logs["loss"]))

    trainer_module.DEFAULT_CALLBACKS += [Recorder, type(progress_callback())]


if __name__ == "__main__":
    run_rank(ScriptJob, rehearse_script_rank)
