"""`shardwright train`: plan, launch and report a training on the user's data with one command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...trainers.training.settings import TrainSettings
from ..machines import TrainingMachineOptions
from ..options import TrainingOptions
from ..settings import FILLED, Options, grouped
from ..training_shown import launched_command

if TYPE_CHECKING:
    from ...trainers.training.inputs import PreparedTrain
    from ...trainers.training.report import TrainOutcome


grouped(TrainSettings)
grouped(TrainingMachineOptions)
grouped(TrainingOptions)


def train_command(
    model: str,
    *,
    settings: Annotated[TrainSettings, Options] = FILLED,
    options: Annotated[TrainingOptions, Options],
    machines: Annotated[TrainingMachineOptions, Options] = FILLED,
) -> int:
    """Train a model on your data: plan, launch, evaluate before and after, save with a model card.

    Examples: shardwright train Qwen/Qwen3-0.6B --dataset chats.jsonl --method lora --output-dir tuned ;
    shardwright train MODEL --plan plan --dataset chats.jsonl --output-dir tuned ;
    shardwright train MODEL --dataset notes.csv --text-column body --max-steps 100 --output-dir tuned

    Parameters
    ----------
    model
        Hub id or directory, or a config.json for random weights.
    """
    from ...trainers.training.inputs import prepare_train

    def prepare(**how: Any) -> PreparedTrain:
        return prepare_train(settings, model, options.output_dir, **how)

    return launched_command(prepare, options, machines, settings, show_training)


def show_training(outcome: TrainOutcome, output_dir: Path) -> None:
    """Print how good the model was before and after, and where everything lies."""
    from rich.text import Text

    from ...plugins.huggingface_hub.cards import CARD_FILE
    from ...trainers.runs.report import REPORT_FILE
    from ...trainers.training.report import CHART_FILE, measures
    from ..show import console, print_rows, show_next

    out = console()
    label, hardware = outcome.plan.chosen.strategy.label, outcome.plan.hardware.name
    out.print(Text.assemble((outcome.model, "bold"), f"  on {outcome.statistics.source}, {label} on {hardware}"))
    out.print()
    figures = ("before", "after")
    rows = [(name, before, Text(after, style="bold green")) for name, before, after in measures(outcome.result)]
    on = f"{outcome.statistics.evaluation_samples} held-out samples"
    print_rows(out, (on, *figures), rows, block_title=on, figures=figures)
    out.print()
    out.print(outcome.speed_line(outcome.result))
    files = ", ".join(str(output_dir / name) for name in (REPORT_FILE, CARD_FILE, CHART_FILE))
    out.print(f"Model in {output_dir}; see {files}", markup=False)
    if outcome.settings.method == "full":
        show_next("shardwright", "quantize", output_dir, "--scheme", "W4A16", "--output-dir", f"{output_dir}-w4")
    else:
        show_next("vllm", "serve", outcome.model, "--enable-lora", "--lora-modules", f"tuned={output_dir}")
