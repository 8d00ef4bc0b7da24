"""`shardwright qat`: train a model with the numbers of its quantized checkpoint, and write that checkpoint."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from ..ds_configs.quantization.compression_training import REMOVED_BLOCKS, message
from ..ds_configs.specs.errors import Fault, UsageError
from .model_settings import resolve_model
from .training_flags import ENVIRONMENT, TrainingFlags
from .training_shown import note, progress_on_stderr, show_dry_run

if TYPE_CHECKING:
    from ..trainers.qat.command.inputs import PreparedQAT
    from ..trainers.qat.command.run_report import Outcome


def qat_command(
    model: str,
    /,
    *,
    scheme: str | None = None,
    group_size: int | None = None,
    symmetric: Annotated[bool | None, Parameter(negative="--asymmetric")] = None,
    targets: str | None = None,
    ignore: str | None = None,
    weight_rule: Literal["minmax", "learned", "ternary", "binary"] | None = None,
    ranges: Literal["calibrated", "minmax", "moving_average", "percentile", "l2", "learned"] | None = None,
    calibration_samples: int | None = None,
    start_step: int | None = None,
    freeze_step: int | None = None,
    bit_schedule: str | None = None,
    lora: Literal["merged", "on_quantized_base"] | None = None,
    kv_cache: Literal["fp8", "int8"] | None = None,
    teacher: str | None = None,
    flags: TrainingFlags,
) -> int:
    """Train a model with the numbers of its quantized checkpoint, and write exactly these numbers.

    Example: shardwright qat Qwen/Qwen3-0.6B --scheme W4A16 --dataset python-help --output-dir trained-w4

    Parameters
    ----------
    model
        Hub id or directory; weights are read from safetensors.
    scheme
        Named scheme of integers, such as W4A16, W8A8, W8A8_STATIC or W2A16. Default W4A16.
    group_size
        Input channels that share a scale; -1 for a whole output channel. Default: by the scheme.
    symmetric
        Without zero points. Default: by the scheme.
    targets
        Layers to quantize, separated by commas: Linear, names, or re: patterns. Default Linear.
    ignore
        Layers that stay dense, likewise. Default: output head and routers.
    weight_rule
        Where scales of weights come from: their own range, training (LSQ), or mean magnitudes with three or two values.
    ranges
        Where stored ranges of activations come from: a pass before training, observers during it, or learning.
    calibration_samples
        Training samples that calibrated ranges are found on. Default 128.
    start_step
        Optimizer steps in full precision before numbers are rounded. Default 0.
    freeze_step
        Optimizer step from which observed ranges stay. Default: never.
    bit_schedule
        STEP:BITS pairs such as 0:8,100:4; the last are the scheme's. Default: the scheme's from the start.
    lora
        With --method lora: round weight and adapter as one and merge them, or round the frozen weight alone.
    kv_cache
        Train with rounded keys and values too, and store their ranges.
    teacher
        Hub id or directory to learn from, or self for the model in full precision. Default: none, labels alone.
    """
    given = locals() | vars(flags)
    if flags.config is not None:
        _refuse_removed_blocks(flags.config)
    from ..trainers.qat.command.inputs import prepare_qat
    from ..trainers.qat.command.request import QATSettings
    from ..trainers.runs.run import run_training

    settings = resolve_model(QATSettings, given, file=flags.config, environment=ENVIRONMENT)
    output_dir, as_json = flags.output_dir, flags.format == "json"
    # Libraries that log to stdout must not stand in the report.
    with redirect_stdout(sys.stderr):
        prepared = prepare_qat(settings, model, output_dir, notify=note, **flags.how)
    if flags.dry_run:
        _show_prepared(prepared, output_dir, as_json=as_json)
        return 0
    with redirect_stdout(sys.stderr), progress_on_stderr() as on_step:
        outcome = run_training(prepared, output_dir, resume=flags.resume, notify=note, on_step=on_step)
    if as_json:
        print(json.dumps(outcome.to_dict() | {"output_dir": str(output_dir)}))
    else:
        show_outcome(outcome, output_dir)
    return 0


def _refuse_removed_blocks(file: Path) -> None:
    """Name the equivalent command where a file is a DeepSpeed configuration with a removed compression block.

    Raises:
        UsageError: it is one.
    """
    import yaml

    try:
        stated = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        # What is wrong with it is told where settings are read.
        return
    if not isinstance(stated, dict) or not any(name in stated for name in REMOVED_BLOCKS):
        return
    rule = "is a DeepSpeed configuration with a block that DeepSpeed 0.19.8 has removed"
    raise UsageError(Fault(where="config", value=str(file), rule=rule, fix=message(stated)))


def _show_prepared(prepared: PreparedQAT, output_dir: Path, *, as_json: bool) -> None:
    scheme, calibrates = prepared.config.rounded_scheme, prepared.needs_calibration
    more: dict[str, Any] = {
        "scheme": f"{scheme.name}, {scheme.format}",
        "layers": f"{len(prepared.layers)} are quantized",
        "calibration": "before training" if calibrates else "none needed",
    }
    if as_json:
        layers = [layer.name for layer in prepared.layers]
        more = {"scheme": asdict(scheme) | {"format": scheme.format}, "layers": layers, "calibration": calibrates}
    files = [output_dir / name for name in prepared.file_names]
    show_dry_run(prepared.settings, prepared.plan, prepared.samples, files, as_json=as_json, **more)


def show_outcome(outcome: Outcome, output_dir: Path) -> None:
    """Print what the model was worth before, rounded and trained, and how the checkpoint was proven."""
    from rich.table import Table
    from rich.text import Text

    from ..trainers.qat.command.request import is_own_teacher
    from ..trainers.qat.command.run_report import CHART_FILE, checkpoint_facts, stages
    from ..trainers.runs.report import CARD_FILE, REPORT_FILE
    from .show import console

    out = console()
    label, hardware = outcome.plan.chosen.strategy.label, outcome.plan.hardware.name
    own = is_own_teacher(outcome.settings, outcome.model)
    teacher = "itself in full precision" if own else outcome.teacher
    taught = "" if teacher is None else f", taught by {teacher}"
    out.print(Text(outcome.model, style="bold") + Text(f"  as {outcome.scheme.name}{taught}, {label} on {hardware}"))
    out.print()
    table = Table(box=None, pad_edge=False)
    table.add_column(f"{outcome.statistics.evaluation_samples} held-out samples")
    for name in ("nats a token", "perplexity"):
        table.add_column(name, justify="right")
    for stage in stages(outcome.result):
        table.add_row(*stage.row, style="bold green" if stage.key == "trained" else None)
    out.print(table)
    out.print()
    for name, value in checkpoint_facts(outcome):
        out.print(f"  {name}: {value}", markup=False)
    out.print(outcome.speed_line(outcome.result))
    files = ", ".join(str(output_dir / name) for name in (REPORT_FILE, CARD_FILE, CHART_FILE))
    out.print(f"Checkpoint in {output_dir}; see {files}", markup=False)
