"""`shardwright qat`: train a model with the numbers of its quantized checkpoint, and write that checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...ds_configs.quantization.compression_training import REMOVED_BLOCKS, message
from ...ds_configs.specs.errors import Fault, UsageError
from ...ds_configs.specs.yaml_file import read_small_file, yaml_mapping
from ...trainers.qat.command.request import QATSettings
from ..machines import TrainingMachineOptions
from ..options import TrainingOptions
from ..settings import FILLED, Options, grouped
from ..training_shown import launched_command

if TYPE_CHECKING:
    from ...trainers.qat.command.inputs import PreparedQAT
    from ...trainers.qat.command.run_report import QATOutcome


grouped(QATSettings)
grouped(TrainingMachineOptions)


@grouped
class QATOptions(TrainingOptions):
    """Launch of a quantization-aware training."""

    @classmethod
    def read_config(cls, name: str) -> dict[str, Any]:
        """Return the settings in a file.

        Raises:
            UsageError: it is a DeepSpeed configuration with a removed compression block, whose equivalent is named.
        """
        values = super().read_config(name)
        if any(block in values for block in REMOVED_BLOCKS):
            stated = yaml_mapping(read_small_file(Path(name), what="config"), name=name, what="config")
            rule = "is a DeepSpeed configuration with a block that DeepSpeed 0.19.8 has removed"
            raise UsageError(Fault(where="config", value=name, rule=rule, fix=message(stated)))
        return values


def qat_command(
    model: str,
    *,
    settings: Annotated[QATSettings, Options] = FILLED,
    options: Annotated[QATOptions, Options],
    machines: Annotated[TrainingMachineOptions, Options] = FILLED,
) -> int:
    """Train a model with the numbers of its quantized checkpoint, and write exactly these numbers.

    Example: shardwright qat Qwen/Qwen3-0.6B --scheme W4A16 --dataset python-help --output-dir trained-w4

    Parameters
    ----------
    model
        Hub id or directory; weights are read from safetensors.
    """
    from ...trainers.qat.command.inputs import prepare_qat

    def prepare(**how: Any) -> PreparedQAT:
        return prepare_qat(settings, model, options.output_dir, **how)

    return launched_command(prepare, options, machines, settings, show_qat, _described)


def _described(prepared: PreparedQAT, *, as_json: bool) -> dict[str, Any]:
    """Return what a dry run shows of the quantization."""
    scheme, calibrates = prepared.config.rounded_scheme, prepared.needs_calibration
    if as_json:
        layers = [layer.name for layer in prepared.layers]
        return {"scheme": asdict(scheme) | {"format": scheme.format}, "layers": layers, "calibration": calibrates}
    return {
        "scheme": f"{scheme.name}, {scheme.format}",
        "layers": f"{len(prepared.layers)} are quantized",
        "calibration": "before training" if calibrates else "none needed",
    }


def show_qat(outcome: QATOutcome, output_dir: Path) -> None:
    """Print what the model was worth before, rounded and trained, and how the checkpoint was proven."""
    from rich.text import Text

    from ...plugins.huggingface_hub.cards import CARD_FILE
    from ...trainers.qat.command.request import is_own_teacher
    from ...trainers.qat.command.run_report import CHART_FILE, checkpoint_facts, stages
    from ...trainers.runs.report import REPORT_FILE
    from ..show import console, print_rows, show_next

    out = console()
    label, hardware = outcome.plan.chosen.strategy.label, outcome.plan.hardware.name
    own = is_own_teacher(outcome.settings, outcome.model)
    teacher = "itself in full precision" if own else outcome.teacher
    taught = "" if teacher is None else f", taught by {teacher}"
    out.print(Text.assemble((outcome.model, "bold"), f"  as {outcome.scheme.name}{taught}, {label} on {hardware}"))
    out.print()
    figures = ("nats a token", "perplexity")
    rows = [
        [Text(value, style="bold green" if stage.key == "trained" else "") for value in stage.row]
        for stage in stages(outcome.result)
    ]
    on = f"{outcome.statistics.evaluation_samples} held-out samples"
    print_rows(out, (on, *figures), rows, block_title=on, figures=figures)
    out.print()
    for name, value in checkpoint_facts(outcome):
        out.print(f"  {name}: {value}", markup=False)
    out.print(outcome.speed_line(outcome.result))
    files = ", ".join(str(output_dir / name) for name in (REPORT_FILE, CARD_FILE, CHART_FILE))
    out.print(f"Checkpoint in {output_dir}; see {files}", markup=False)
    show_next("shardwright", "evaluate", output_dir, "--baseline", outcome.model)
