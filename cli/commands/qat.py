"""`shardwright qat`: train a model with quantized weights, and export that checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...trainers.qat.command.settings import QATSettings
from ..options import TrainingRun
from ..settings import FILLED, Options
from ..training import launched_command, show_outcome

if TYPE_CHECKING:
    from ...trainers.qat.command.report import QATOutcome
    from ...trainers.qat.command.task import PreparedQAT


def qat_command(model: str, *, settings: Options[QATSettings] = FILLED, options: Options[TrainingRun]) -> int:
    """Train a model with the quantized values of its checkpoint, and export exactly these values.

    Parameters
    ----------
    model
        Hub id or directory; weights are read from safetensors.
    """
    from ...trainers.qat.command.task import prepare_qat

    return launched_command(partial(prepare_qat, settings, model), options, show_qat, _described)


def _described(prepared: PreparedQAT, *, as_json: bool) -> dict[str, Any]:
    scheme = prepared.config.rounded_scheme
    if as_json:
        layers = [layer.name for layer in prepared.layers]
        return {"scheme": asdict(scheme) | {"format": scheme.format}, "layers": layers}
    return {
        "scheme": f"{scheme.name}, {scheme.format}",
        "layers": f"{len(prepared.layers)} quantized",
    }


def show_qat(outcome: QATOutcome, output_dir: Path) -> None:
    from rich.text import Text

    from ...trainers.qat.command.settings import is_own_teacher
    from ...trainers.reports.runs import checkpoint_facts
    from ..show import show_next

    own = is_own_teacher(outcome.settings, outcome.model)
    teacher = "itself in full precision" if own else outcome.teacher
    made = f"as {outcome.scheme.name}" + ("" if teacher is None else f", distilled from {teacher}")
    trained, *before = outcome.measures()[1]
    rows: list[Sequence[str | Text]] = [*reversed(before), [Text(value, style="bold green") for value in trained]]
    show_outcome(
        outcome,
        output_dir,
        name=outcome.model,
        made=made,
        noun="Checkpoint",
        rows=rows,
        facts=checkpoint_facts(outcome.to_dict()),
    )
    show_next("shardwright", "evaluate", output_dir, "--baseline", outcome.model)
