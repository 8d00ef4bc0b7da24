"""`plan --explain-tensor-parallel`: compare 1D, 2D, 2.5D and 3D tensor parallelism (analysis only)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..ds_configs.legality.axes import tensor_parallel_errors
from ..ds_configs.search.tensor_layouts import (
    TensorLayout,
    compare_tensor_layouts,
    where_one_dimension_stops_paying,
)
from ..ds_configs.specs.hardware import HardwareSpec
from ..ds_configs.specs.job import TrainingJob
from ..ds_configs.specs.layout import Layout
from ..ds_configs.specs.model import ModelSpec

_RANKS = (4, 8, 16, 64)
"""Squares, cubes and multiples of squares, so that each layout occurs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedLayouts:
    """The layouts at several numbers of ranks."""

    layouts: tuple[TensorLayout, ...]
    """By number of ranks, 1D first."""
    first_ranks: int | None
    """Smallest number of ranks at which another layout communicates faster than 1D; `None` when none does."""
    reason: str
    """The comparison in one sentence, with the largest size that a plan may have."""
    legal_ranks: frozenset[int]
    """Numbers of ranks at which the planner can use 1D, with AutoTP."""

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "layouts": [
                asdict(layout) | {"analysis_only": layout.analysis_only, "label": self._label(layout)}
                for layout in self.layouts
            ],
            "one_dimension_stops_paying_at_ranks": self.first_ranks,
            "reason": self.reason,
        }

    def _label(self, layout: TensorLayout) -> str:
        if layout.analysis_only:
            return "analysis only"
        return "AutoTP" if layout.ranks in self.legal_ranks else "not planned here"

    def show(self) -> None:
        """Print the comparison as a table."""
        from rich.table import Table
        from rich.text import Text

        from .show import console

        out = console()
        table = Table(
            title="Tensor parallelism: one layer, one micro-batch per rank",
            title_justify="left",
            box=None,
            pad_edge=False,
        )
        for column in ("ranks", "layout", "shape", "weights MB", "activations MB", "received MB", "ms", ""):
            table.add_column(column, justify="left" if column in ("layout", "shape", "") else "right")
        for layout in self.layouts:
            table.add_row(
                str(layout.ranks),
                Text(layout.name),
                " x ".join(map(str, layout.shape)),
                f"{layout.weight_bytes / 1e6:.1f}",
                f"{layout.activation_bytes / 1e6:.1f}",
                f"{layout.communication_bytes / 1e6:.1f}",
                f"{layout.communication_seconds * 1e3:.2f}",
                self._label(layout),
            )
        out.print()
        out.print(table)
        out.print(self.reason, markup=False)


def compared_layouts(model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> ComparedLayouts:
    """Return the layouts of tensor parallelism at 4, 8, 16 and 64 ranks, on these links."""
    layouts = tuple(layout for ranks in _RANKS for layout in compare_tensor_layouts(model, hardware, job, ranks))
    first, reason = where_one_dimension_stops_paying(model, hardware, job)
    legal = [
        ranks
        for ranks in range(2, hardware.gpus_per_node + 1)
        if not tensor_parallel_errors(
            model.traits,
            Layout(engine="deepspeed", zero_stage=0, tp=ranks),
            world_size=hardware.world_size,
            ranks_per_node=hardware.gpus_per_node,
            method=job.method,
        )
    ]
    if legal:
        shown = f"AutoTP shards this model over up to {legal[-1]} ranks"
    else:
        shown = "AutoTP cannot shard this model on this hardware"
    return ComparedLayouts(
        layouts=layouts, first_ranks=first, reason=f"{reason}; {shown}", legal_ranks=frozenset(legal)
    )
