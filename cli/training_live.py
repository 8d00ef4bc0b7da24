"""Live view of a launched training on a terminal: a bar, and below it what its ranks tell beside what was planned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.table import Table
from rich.text import Text

from ..ds_configs.plan.plan import Plan
from .progress import Bar

if TYPE_CHECKING:
    from ..trainers.runs.progress import Figures

_LAGS = 1.1
"""Times the median from which on a rank is said to lag: less is the noise of a step."""
_SLOW = 0.8
"""Share of the planned speed below which it is shown as a warning."""


class TrainingView(Bar):
    """Bar of optimizer steps with loss, speed, memory and lag below it, each beside the plan's."""

    def __init__(self, begins: str, console: Console, plan: Plan) -> None:
        self._plan = plan
        self._told: Figures | None = None
        super().__init__(begins, console)

    def tell_figures(self, figures: object) -> None:
        """Show the figures of a running training from now on."""
        self._told = figures  # type: ignore[assignment]

    def _progress(self, *columns: ProgressColumn, **how: Any) -> Progress:
        return _WithFigures(self, *columns, **how)

    def rows(self) -> list[tuple[str, Text]]:
        """Return what is known, by name."""
        if self._told is None:
            return []
        told = self._told
        found = [("loss", None if told.loss is None else Text(f"{told.loss:.4f}"))]
        found += [("tokens/s", self._speed(told)), ("memory", self._memory(told)), ("ranks", _lag(told))]
        return [(name, text) for name, text in found if text is not None]

    def _speed(self, told: Figures) -> Text | None:
        speed, planned = told.tokens_per_second, self._plan.chosen.time.tokens_per_second
        if speed is None:
            return None
        share = speed / planned
        beside = f" of {planned:,.0f} planned ({100 * share:.0f} %)"
        # What a plan counts on for CPU ranks are orders of magnitude.
        slow = share < _SLOW and self._plan.hardware.gpu != "CPU"
        return Text.assemble(f"{speed:,.0f}", (beside, "yellow" if slow else "dim"))

    def _memory(self, told: Figures) -> Text | None:
        if told.peak_allocated_gb is None:
            return None
        gpu = self._plan.chosen.memory.gpu
        planned = gpu.allocated_bytes / 1e9
        over = told.peak_allocated_gb > 1.05 * planned
        beside = f" GB of tensors, {planned:.1f} planned, {gpu.capacity_bytes / 1e9:.1f} there"
        return Text.assemble(f"{told.peak_allocated_gb:.1f}", (beside, "yellow" if over else "dim"))


def _lag(told: Figures) -> Text | None:
    if told.slowest_rank is None or told.slowest_rank_ratio is None:
        return None
    ratio = f"{told.slowest_rank_ratio:.2f} times the median"
    if told.slowest_rank_ratio < _LAGS:
        return Text(f"even; the slowest takes {ratio}", style="dim")
    return Text(f"rank {told.slowest_rank} lags: {ratio} to load and for a forward pass", style="yellow")


class _WithFigures(Progress):
    """Progress of rich with the rows of a view below its bar."""

    def __init__(self, view: TrainingView, *columns: ProgressColumn, **how: Any) -> None:
        self._view = view
        super().__init__(*columns, **how)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bar, and the rows below it."""
        yield from super().get_renderables()
        if rows := self._view.rows():
            table = Table.grid(padding=(0, 2))
            for name, text in rows:
                table.add_row(Text(name, style="bold"), text)
            yield table
