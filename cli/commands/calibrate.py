"""`shardwright calibrate`: store the measurements of a run for later plans on the same accelerators."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ...ds_configs.specs.errors import ConfigError, UsageError
from ..options import Output
from ..settings import FILLED, Options

if TYPE_CHECKING:
    from ...ds_configs.memory.estimate import MeasuredRun
    from ...ds_configs.plan.measurement import RunMeasurement
    from ...ds_configs.step_time.learning import MeasuredStep
    from ...plugins.planning import CalibrationStore

_SHOWN_DIGITS = 12


class Flags(Output):
    group = "Stored runs"

    list_runs: bool = Field(False, alias="list", description="List the stored runs")
    forget: str | None = Field(None, description="Remove a run by a prefix of its identifier, or all")


def calibrate_command(run_dir: Path | None = None, *, options: Options[Flags] = FILLED) -> int:
    """Store the measured memory and step time of a run, or a measured network, for later plans.

    Parameters
    ----------
    run_dir
        Output directory of a run with --plan (plan_measurement.json).
    """
    from ...plugins.planning import CalibrationStore

    list_runs, forget = options.list_runs, options.forget
    if (run_dir is not None) + list_runs + (forget is not None) != 1:
        rule = "pass exactly one of RUN_DIR, --list and --forget"
        raise UsageError(ConfigError(where="calibrate", rule=rule))
    store = CalibrationStore()
    as_json = options.as_json
    if run_dir is not None:
        return _store(store, run_dir, as_json=as_json)
    if forget is None:
        return _list(store, as_json=as_json)
    count = store.forget(forget)
    if as_json:
        print(json.dumps({"schema_version": 1, "forgotten": count, "database": str(store.path)}))
    else:
        print(f"Removed {count} run{'' if count == 1 else 's'}")
    return 0


def _store(store: CalibrationStore, run_dir: Path, *, as_json: bool) -> int:
    from ...ds_configs.memory.estimate import RESERVED_OVER_PREDICTED, moved_factors
    from ...ds_configs.plan.measurement import measured_run, measured_step, printable, report_lines
    from ...plugins.planning import own_release

    measurement = read_measurement(run_dir)
    step = measured_step(measurement)
    # CPU ranks have no memory peaks.
    run = None if step is not None and measurement.fullest.peak_reserved_bytes is None else measured_run(measurement)
    added = [store.add(each) for each in (run, step) if each is not None]
    answer: dict[str, Any] = {"added": added[0]}
    planned, identifier = measurement.plan, (run or step).identifier[:_SHOWN_DIGITS]  # type: ignore[union-attr]
    plans = printable(f"{planned.architecture} on {planned.gpu}")
    layout = printable(f"{planned.layout} on {len(measurement.measured)} ranks")
    lines = [f"{'Stored' if added[0] else 'Already stored:'} run {identifier}, {plans}, {layout}"]
    lines += [f"  {line}" for line in report_lines(measurement)]
    if run is None:
        lines[0] += ", which has no memory peaks"
    else:
        ratios = store.calibration().ratios(gpu=run.gpu, architecture=run.architecture)
        low, middle, high = moved_factors(RESERVED_OVER_PREDICTED, ratios)
        interval = {"low": low, "middle": middle, "high": high, "runs": len(ratios)}
        answer |= {"run": _with_ratio(run), "interval": interval}
        lines.append(f"reserved over predicted tensors: {run.ratio:.3f}")
        lines.append(f"interval of plans for {plans}: {low:.3f} to {high:.3f} ({len(ratios)} measured)")
    if step is not None:
        answer |= {"step": _with_ratio(step)}
        measured = f"measured over predicted step: {step.ratio:.2f}"
        if step.release != own_release():
            predicted = f"predicted by Shardwright {step.release or 'of an unknown release'}, not by {own_release()}"
            lines.append(f"{measured}; {printable(predicted)}: it does not correct later plans")
        else:
            like = (step.gpu, step.engine, step.flops_per_s, step.release)
            kept = [
                each.ratio for each in store.steps() if (each.gpu, each.engine, each.flops_per_s, each.release) == like
            ]
            runs = printable(f"{len(kept)} run{'' if len(kept) == 1 else 's'} of {step.engine} on {step.gpu}")
            lines.append(f"{measured}; later plans use {runs}: {min(kept):.2f} to {max(kept):.2f} times the prediction")
    answer = {"schema_version": 1, **answer, "database": str(store.path)}
    print(json.dumps(answer, indent=2) if as_json else "\n".join(lines))
    return 0


def read_measurement(run_dir: Path) -> RunMeasurement:
    """Return the measurement in the output directory of a run."""
    from ...ds_configs.plan.measurement import FILE_NAME, LARGEST_FILE_BYTES, measurement_from_text

    try:
        file = run_dir / FILE_NAME if run_dir.is_dir() else run_dir
        with file.open("rb") as stream:
            text = stream.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        detail = getattr(error, "strerror", None) or str(error)
        fix = "pass the output directory of `shardwright train`, or of a script that attaches PlanCallback"
        rule = f"has no {FILE_NAME} that can be read ({detail})"
        raise UsageError(ConfigError(where="run", value=str(run_dir), rule=rule, fix=fix)) from None
    return measurement_from_text(text, source=str(file))


def _list(store: CalibrationStore, *, as_json: bool) -> int:
    runs, steps = store.calibration().runs, store.steps()
    if as_json:
        shown: dict[str, Any] = {"runs": [*map(_with_ratio, runs)], "steps": [*map(_with_ratio, steps)]}
        print(json.dumps({"schema_version": 1, **shown, "database": str(store.path)}, indent=2))
        return 0
    if not runs and not steps:
        print("No stored runs. Store one with `shardwright calibrate RUN_DIR`.")
    if runs:
        from ...ds_configs.plan.measurement import printable
        from ...ds_configs.specs.units import gigabytes
        from ..show import console, print_rows

        numbers = ("ranks", "predicted", "allocated", "reserved", "ratio", "outside", "step s")
        rows = []
        for run in runs:
            outside = "-" if run.outside_allocator_bytes is None else gigabytes(run.outside_allocator_bytes)
            seconds = "-" if run.step_seconds is None else f"{run.step_seconds:.3g}"
            sizes = (run.predicted_allocated_bytes, run.allocated_peak_bytes, run.reserved_peak_bytes)
            words = (run.identifier[:_SHOWN_DIGITS], run.gpu, run.model.rpartition("/")[2] or run.model, run.layout)
            memory = (*map(gigabytes, sizes), f"{run.ratio:.3f}", outside)
            rows.append([printable(word) for word in (*words, str(run.ranks), *memory, seconds)])
        names = ("run", "GPU", "model", "layout", *numbers)
        print_rows(console(), names, rows, title="Stored runs, memory in GB", figures=numbers)
    if steps:
        show_steps(steps, title="Stored step times, seconds")
    print(f"file: {store.path}", file=sys.stderr)
    return 0


def show_steps(steps: Sequence[MeasuredStep], *, title: str) -> None:
    from ...ds_configs.plan.measurement import printable
    from ..show import console, print_rows

    numbers = ("ranks", "predicted", "measured", "ratio")
    rows = []
    for step in steps:
        name = step.model.removesuffix("/config.json").rpartition("/")[2] or step.model
        words = (step.identifier[:_SHOWN_DIGITS], step.gpu, step.engine, name, step.layout, str(step.ranks))
        times = (f"{step.predicted_seconds:.3g}", f"{step.measured_seconds:.3g}", f"{step.ratio:.2f}")
        rows.append([printable(word) for word in (*words, *times)])
    print_rows(console(), ("run", "GPU", "engine", "model", "layout", *numbers), rows, title=title, figures=numbers)


def _with_ratio(measured: MeasuredRun | MeasuredStep) -> dict[str, Any]:
    return asdict(measured) | {"ratio": measured.ratio}
