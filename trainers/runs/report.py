"""Pieces of `REPORT.md` and of model cards that every launched training has, and of the chart of its steps."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.units import gigabytes
from ..data.samples import SampleStatistics
from ..formats.markdown import table
from .settings import METRICS_FILE, LaunchedSettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPORT_FILE, CARD_FILE = "REPORT.md", "README.md"
_LICENSE = re.compile(r"^license:\s*(\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the ranks measured of their steps, as it stands in `result.json`."""

    steps: int
    """Optimizer steps of the whole training."""
    step_seconds: float
    """Seconds inside these steps; after resuming, of the steps since."""
    tokens: int
    """Tokens trained on, without padding."""
    timed_tokens: int
    """Those of the steps that `step_seconds` counts."""
    peak_bytes: int | None
    """Largest allocation on any accelerator, evaluation included; `None` on CPU ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedOutcome:
    """A training that ended well."""

    plan: Plan
    """Where everything went."""
    statistics: SampleStatistics
    """What was trained on."""
    metrics: Sequence[Mapping[str, float]]
    """The logged steps."""
    seconds: float
    """Wall-clock seconds from the launch to the report."""

    def where_and_what(self, settings: LaunchedSettings) -> dict[str, Any]:
        """Return layout, settings and data as JSON values."""
        return {
            "strategy": self.plan.chosen.strategy.label,
            "hardware": self.plan.hardware.name,
            "settings": settings.model_dump(),
            "dataset": asdict(self.statistics),
        }

    def speed(self, result: StepResult) -> dict[str, Any]:
        """Return steps, tokens and seconds as JSON values."""
        return {
            "steps": result.steps,
            "tokens": result.tokens,
            "tokens_per_second": round(tokens_per_second(result), 1),
            "seconds": round(self.seconds, 1),
        }

    def speed_sentence(self, result: StepResult) -> str:
        """Return what the steps took, in words."""
        return (
            f"{result.steps} steps, {result.tokens:,} tokens in {result.step_seconds:.1f} s of training steps "
            f"({tokens_per_second(result):,.0f} tokens/s over all ranks), {self.seconds:.0f} s in all."
        )

    def card_measures(self, result: StepResult, settings: LaunchedSettings, measured: Sequence[str]) -> list[str]:
        """Return what a model card says of the held-out samples and of training, up to the heading of its licence."""
        return [
            f"On {self.statistics.evaluation_samples} held-out samples of the same dataset:",
            "",
            *measured,
            "",
            f"{result.steps} optimizer steps, {result.tokens:,} tokens, sequences of {settings.seq_len} tokens; the "
            f"settings are in [{REPORT_FILE}]({REPORT_FILE}), every logged step in [{METRICS_FILE}]({METRICS_FILE}).",
            "",
            "## License",
            "",
        ]

    def speed_line(self, result: StepResult) -> str:
        """Return the same for a terminal."""
        return (
            f"{result.steps} steps, {result.tokens:,} tokens, {tokens_per_second(result):,.0f} tokens/s, "
            f"{self.seconds:.0f} s in all"
        )


def tokens_per_second(result: StepResult) -> float:
    """Return the tokens of all ranks for each second of training steps."""
    return result.timed_tokens / result.step_seconds if result.step_seconds else 0.0


def number(value: float) -> str:
    """Return nats with four decimals."""
    return f"{value:.4f}"


def perplexity(nats: float) -> str:
    """Return ``exp(cross-entropy)``."""
    return f"{math.exp(min(nats, 700)):.4g}"


def read_metrics(directory: Path) -> list[dict[str, float]]:
    """Return the logged steps of a run."""
    return [json.loads(line) for line in (directory / METRICS_FILE).read_text(encoding="utf-8").splitlines()]


def where_it_ran(plan: Plan, peak_bytes: int | None) -> list[str]:
    """Return the section with the layout and its memory, predicted and measured."""
    chosen = plan.chosen
    gpu = chosen.memory.gpu
    predicted = f"{gigabytes(gpu.peak_bytes)} GB ({gigabytes(gpu.low_bytes)} to {gigabytes(gpu.high_bytes)})"
    measured = "not measured on CPU ranks" if peak_bytes is None else f"{gigabytes(peak_bytes)} GB of tensors"
    return [
        "## Where it ran",
        "",
        f"{plan.hardware.name}, {chosen.strategy.label}. {chosen.reason}",
        "",
        *([f"Teacher: {chosen.teacher.reason}", ""] if chosen.teacher is not None else []),
        *table(("", "predicted", "measured"), [("largest memory of an accelerator", predicted, measured)]),
        "",
    ]


def data_and_settings(statistics: SampleStatistics, settings: Mapping[str, Any], plan: Plan) -> list[str]:
    """Return the sections with what was read, all settings that have a value, and the versions."""
    named = {name: value for name, value in settings.items() if value is not None}
    return [
        "## Data",
        "",
        *table(
            ("", ""),
            [
                (name.replace("_", " "), f"{value:,}" if isinstance(value, int) else value)
                for name, value in asdict(statistics).items()
            ],
        ),
        "",
        "## Settings",
        "",
        *table(("setting", "value"), [(f"`{name}`", f"`{value}`") for name, value in named.items()]),
        "",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in plan.versions) + ".",
    ]


def card_front(models: Sequence[str], *, library: str, tags: Sequence[str]) -> list[str]:
    """Return the metadata of a model card that the Hub reads; models that lie on this machine are not named."""
    front = [f"library_name: {library}", "pipeline_tag: text-generation", "tags:", *(f"- {tag}" for tag in tags)]
    on_hub = [name for name in dict.fromkeys(models) if not Path(name).exists()]
    if on_hub:
        front += ["base_model:", *(f"- {json.dumps(name)}" for name in on_hub)]
    return ["---", *front, "---"]


def license_of(model: str) -> str:
    """Return what the card beside a local model says, without asking the Hub."""
    card = Path(model) / CARD_FILE
    found = _LICENSE.search(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    return found[1] if found else f"see the card of `{model}`"


def title_of(model: str) -> str:
    """Return the name of a model without what stands before it; of a `config.json` that of its directory.

    >>> title_of("Qwen/Qwen3-0.6B"), title_of("students/half/config.json"), title_of("half.json")
    ('Qwen3-0.6B', 'half', 'half')
    """
    path = Path(model)
    if path.name == "config.json":
        return path.absolute().parent.name or path.stem
    if path.suffix == ".json":
        return path.stem
    return path.resolve().name if path.name in ("", "..") else path.name


def empty_figure() -> tuple[Figure, Axes, Axes]:
    """Return a chart with two fields side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(drawn)
    left, right = drawn.subplots(1, 2)
    return drawn, left, right


def draw_steps(axes: Axes, metrics: Sequence[Mapping[str, float]], curves: Mapping[str, tuple[str, str]]) -> None:
    """Draw logged values over optimizer steps; `curves` holds a label and a colour by the value's name."""
    for key, (label, colour) in curves.items():
        points = [(entry["step"], entry[key]) for entry in metrics if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, color=colour, marker="." if len(points) < 30 else "")
    axes.set_xlabel("optimizer step")


def finish_axes(axes: Axes, name: str) -> None:
    """Name the vertical axis, and explain the curves where there are any."""
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def png(drawn: Figure) -> bytes:
    """Return a chart as a PNG file."""
    output = io.BytesIO()
    drawn.savefig(output, format="png", dpi=120)
    return output.getvalue()
