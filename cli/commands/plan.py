"""`shardwright plan`: select a layout, explain it, write its files."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ...ds_configs.plan.plan import PlanDoesNotFitError, evaluated_dict, job_dict, model_summary, plan_to_dict
from ...ds_configs.search.run_estimates import run_estimate
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.hardware import HardwareSpec
from ...ds_configs.specs.job import TrainingJob
from ...ds_configs.specs.model import ModelSpec
from ..options import OutputDirectory, PlanSettings
from ..progress import note
from ..settings import FILLED, Options, command_line

if TYPE_CHECKING:
    from ...ds_configs.search.tensor_layouts import TensorLayout


class Flags(OutputDirectory):
    dry_run: bool = Field(False, description="Check and print everything; write nothing")
    explain_tensor_parallel: bool = Field(
        False,
        description="Compare 1D, 2D, 2.5D and 3D tensor parallelism (analysis only)",
    )
    verbose: bool = Field(False, description="Print every term of memory and time, and every alternative")
    calibration: bool = Field(True, description="Use runs stored by `shardwright calibrate` for the memory interval")
    trust_remote_code: bool = Field(False, description="No effect: planning never runs the code of a model")


def plan_command(model: str, *, settings: Options[PlanSettings] = FILLED, options: Options[Flags] = FILLED) -> int:
    """Select a layout (ZeRO, FSDP2, DDP) for a model and hardware, with its memory, time and reason.

    Parameters
    ----------
    model
        Hub id, local directory, or config.json; reads config.json and safetensors headers only.
    """
    from ...plugins.planning import plan as select_plan

    if options.trust_remote_code:
        note("--trust-remote-code has no effect: planning never runs the code of a model")
    if settings.hardware is None:
        fix = "pass --hardware, such as 8xA100-80GB, or local"
        raise UsageError(ConfigError(where="hardware", rule="is missing", fix=fix))
    as_json, output_dir = options.as_json, options.output_dir
    if options.dry_run and not as_json:
        from ..show import show_settings

        show_settings(settings.model_dump(), settings.origins())
    try:
        calibration: Literal["user"] | None = "user" if options.calibration else None
        plan = select_plan(model, settings.hardware, settings, calibration=calibration)
    except PlanDoesNotFitError as error:
        layouts = _layouts(error.model, error.hardware, error.job) if options.explain_tensor_parallel else None
        if as_json:
            misfit = {
                "schema_version": 2,
                "model": model_summary(error.model, error.job),
                "hardware": asdict(error.hardware),
                "job": job_dict(error.job),
                "error": {"exit_code": error.exit_code, "message": str(error).splitlines()[0], "errors": []},
                "chosen": None,
                "rejected": [evaluated_dict(candidate) for candidate in error.tried],
                "would_fit": [asdict(suggestion) for suggestion in error.suggestions],
            }
            if layouts is not None:
                misfit["tensor_layouts"] = list(map(asdict, layouts))
            print(json.dumps(misfit, indent=2))
            for line in str(error).splitlines():
                print(f"error: {line}", file=sys.stderr)
            return error.exit_code
        if layouts is not None:
            _show_tensor_layouts(layouts)
        raise
    layouts = _layouts(plan.model, plan.hardware, plan.job) if options.explain_tensor_parallel else None
    tokens = settings.tokens
    run = None if tokens is None else run_estimate(plan.chosen.time, plan.hardware, tokens=tokens)
    written: list[Path] = []
    if output_dir is not None and not options.dry_run:
        from ...trainers.reports.runs import write_html

        written = replace(plan, command=command_line()).write(output_dir, force=options.force)
        written = [*written, write_html(output_dir)]
    if as_json:
        shown = plan_to_dict(plan) | {"files": [str(path) for path in written] or list(plan.file_names)}
        if run is not None:
            shown["run"] = asdict(run)
        if layouts is not None:
            shown["tensor_layouts"] = list(map(asdict, layouts))
        print(json.dumps(shown))
        return 0
    from ..show import show_plan

    show_plan(plan, output_dir if written else None, verbose=options.verbose)
    if run is not None:
        print(f"The run: {run}.")
    if layouts is not None:
        _show_tensor_layouts(layouts)
    return 0


def _layouts(model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> tuple[TensorLayout, ...] | None:
    """Return the tensor layouts of 4, 8, 16 and 64 ranks; `None`, with a note, for mixtures of experts."""
    from ...ds_configs.search.tensor_layouts import compare_tensor_layouts

    if model.dimensions.num_experts:
        note(f"--explain-tensor-parallel is for dense layers, but {model.architecture} has experts")
        return None
    # Squares, cubes and multiples of squares, so that each layout occurs.
    return tuple(layout for ranks in (4, 8, 16, 64) for layout in compare_tensor_layouts(model, hardware, job, ranks))


def _show_tensor_layouts(layouts: tuple[TensorLayout, ...]) -> None:
    """Print the costs of 1D, 2D, 2.5D and 3D tensor parallelism, of which only 1D runs."""
    from ..show import console, print_rows

    title = "Tensor parallelism: one layer, one micro-batch per rank; all but 1D are analysis only"
    rows: list[tuple[str, ...]] = []
    for layout in layouts:
        sizes = (layout.weight_bytes, layout.activation_bytes, layout.communication_bytes)
        name = f"{layout.name} {' x '.join(map(str, layout.shape))}"
        milliseconds = f"{layout.communication_seconds * 1e3:.2f}"
        rows.append((name, str(layout.ranks), *(f"{size / 1e6:.1f}" for size in sizes), milliseconds))
    headings = ("layout", "ranks", "weights MB", "activations MB", "received MB", "ms")
    out = console()
    out.print()
    print_rows(out, headings, rows, title=title, figures=headings[1:])
