"""`shardwright plan`: choose a strategy, explain it, write its files."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ...ds_configs.plan.plan import Plan, PlanDoesNotFitError
from ...ds_configs.plan.plan_json import job_dict, model_summary, plan_to_dict, rejected_dict
from ...ds_configs.specs.errors import Fault, UsageError
from ...ds_configs.specs.hardware import HardwareSpec
from ...ds_configs.specs.job import TrainingJob
from ...ds_configs.specs.model import ModelSpec
from ..command_line import command_line
from ..options import WriteOptions
from ..planning.run_questions import answers, question_faults, shown_answers
from ..planning.stated import PlanSettings, plan_stated
from ..progress import note
from ..settings import FILLED, Options, grouped

if TYPE_CHECKING:
    from ..planning.tensor_layouts import ComparedLayouts


@grouped
class PlanOptions(WriteOptions):
    """Output of `plan`."""

    explain_tensor_parallel: bool = Field(
        False,
        description="Compare 1D, 2D, 2.5D and 3D tensor parallelism on this hardware. "
        "Analysis only: nothing runs the last three",
    )
    calibration: bool = Field(
        True, description="Let runs that `shardwright calibrate` stored narrow the memory interval"
    )
    trace_activations: bool = Field(
        False,
        description="Trace a model without stored activation coefficients, in minutes, instead of an upper bound",
    )
    trust_remote_code: bool = Field(False, description="Has no effect here: planning never runs a model's own code")


def plan_command(
    model: str,
    *,
    settings: Annotated[PlanSettings, Options] = FILLED,
    options: Annotated[PlanOptions, Options] = FILLED,
) -> int:
    """Choose the ZeRO stage (or FSDP2, or DDP) for a model on some hardware, with the reason and the memory.

    Examples: shardwright plan meta-llama/Llama-3.1-8B --hardware 8xA100-80GB --output-dir plan ;
    shardwright plan MODEL --hardware 1xRTX4090 --method qlora --seq-len 2048 ;
    shardwright plan MODEL --hardware 4x8xH100-80GB --strategy zero3 --format json

    Parameters
    ----------
    model
        Hub id, local directory, or config.json. Only config.json and safetensors headers are read.
    """
    if options.trust_remote_code:
        note("--trust-remote-code has no effect here: planning never runs a model's own code")
    question_faults(settings)
    as_json, output_dir = options.as_json, options.output_dir
    if options.dry_run and not as_json:
        from ..show import show_settings

        show_settings(settings.model_dump(), settings.origins())
    if settings.hardware is None:
        raise UsageError(
            Fault(where="hardware", rule="is missing", fix="give --hardware, such as 8xA100-80GB, or local")
        )
    try:
        known, traced = options.calibration, options.trace_activations
        plan = plan_stated(model, settings.hardware, settings, notify=note, calibration=known, trace_activations=traced)
    except PlanDoesNotFitError as error:
        layouts = _layouts(error.model, error.hardware, error.job) if options.explain_tensor_parallel else None
        if as_json:
            found = _does_not_fit(error) | ({} if layouts is None else {"tensor_layouts": layouts.to_dict()})
            print(json.dumps(found, indent=2))
            for line in str(error).splitlines():
                print(f"error: {line}", file=sys.stderr)
            return error.exit_code
        if layouts is not None:
            layouts.show()
        raise
    layouts = _layouts(plan.model, plan.hardware, plan.job) if options.explain_tensor_parallel else None
    answered = answers(plan, settings)
    written = [] if output_dir is None or options.dry_run else _written(plan, output_dir, force=options.force)
    if as_json:
        shown = plan_to_dict(plan) | {"files": [str(path) for path in written] or list(plan.file_names)}
        if answered:
            shown["answers"] = answered
        if layouts is not None:
            shown["tensor_layouts"] = layouts.to_dict()
        print(json.dumps(shown))
        return 0
    from ..show import show_plan

    show_plan(plan, output_dir if written else None)
    if written:
        print(f"Report: {written[-1]}")
    for line in shown_answers(answered):
        print(line)
    if layouts is not None:
        layouts.show()
    return 0


def _written(plan: Plan, directory: Path, *, force: bool) -> list[Path]:
    """Write the plan's files and its report."""
    from ...trainers.reports.make import write_html

    files = replace(plan, command=command_line()).write(directory, force=force)
    return [*files, write_html(directory)]


def _layouts(model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> ComparedLayouts | None:
    """Return the compared layouts of tensor parallelism; `None`, with a note, for mixtures of experts."""
    from ..planning.tensor_layouts import compared_layouts

    if model.dimensions.num_experts:
        note(f"--explain-tensor-parallel compares dense layers, and {model.architecture} has experts")
        return None
    return compared_layouts(model, hardware, job)


def _does_not_fit(error: PlanDoesNotFitError) -> dict[str, object]:
    return {
        "schema_version": 1,
        "model": model_summary(error.model, error.job),
        "hardware": asdict(error.hardware),
        "job": job_dict(error.job),
        "error": {"exit_code": error.exit_code, "message": str(error).splitlines()[0], "faults": []},
        "chosen": None,
        "rejected": [rejected_dict(candidate) for candidate in error.tried],
        "would_fit": [
            {
                "change": suggestion.change,
                "strategy": suggestion.strategy,
                "high_bytes": suggestion.high_bytes,
                "capacity_bytes": suggestion.capacity_bytes,
            }
            for suggestion in error.suggestions
        ],
    }
