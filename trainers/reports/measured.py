"""Page of a run of one's own script under a plan: what `PlanCallback` left."""

from __future__ import annotations

from ...ds_configs.plan.measurement import FILE_NAME, PredictedMemory, RankMeasurement, RunMeasurement
from ..charts.kinds import columns
from .page import Chart, Page, Section, Table, Tile
from .words import gb, gb_range, short_name, significant


def measurement_page(found: RunMeasurement) -> Page:
    """Return the report of `plan_measurement.json`: each rank beside what was predicted for the fullest."""
    full, predicted, planned = found.fullest, found.predicted, found.plan
    seconds = found.step_seconds
    as_planned = not found.differences
    peak = "not measured" if full.peak_allocated_bytes is None else gb(full.peak_allocated_bytes)
    step = "not measured" if seconds is None else f"{significant(seconds, 3)} s"
    tiles = (
        Tile(label="Run as planned", value="yes" if as_planned else "no", state="good" if as_planned else "bad"),
        Tile(label="Tensors on the fullest rank", value=peak, detail=f"predicted {gb(predicted.allocated_bytes)}"),
        Tile(label="Step, median of the slowest rank", value=step),
        Tile(label="Ranks and steps", value=f"{len(found.measured)} × {full.steps}"),
    )
    medians = {f"rank {rank.rank}": rank.median_step_seconds for rank in found.measured}
    drawn = {name: value for name, value in medians.items() if value is not None}
    chart = Chart(title="Step by rank, seconds", draw=columns(drawn, "seconds"), note="Medians without the first two.")
    charts = (chart,) if 1 < len(drawn) <= 16 else ()
    texts = tuple(f"Not as planned: {difference}." for difference in found.differences)
    return Page(
        kind="Measured run",
        title=short_name(planned.model),
        subtitle=f"{planned.layout} on {planned.world_size} x {planned.gpu}",
        tiles=tiles,
        sections=(
            Section(heading="Predicted and measured", texts=texts, tables=(_memory(predicted, full),)),
            Section(heading="Ranks", charts=charts, tables=(_ranks(found),)),
        ),
        versions=found.versions,
        files=(FILE_NAME,),
        measures={} if seconds is None else {"seconds of a step": seconds},
    )


def _memory(predicted: PredictedMemory, full: RankMeasurement) -> Table:
    interval = f"{gb(predicted.peak_bytes)} ({gb_range(predicted.low_bytes, predicted.high_bytes)})"
    rows = [
        (name, expected, "–" if measured is None else gb(measured))
        for name, expected, measured in (
            ("tensors (peak allocated)", gb(predicted.allocated_bytes), full.peak_allocated_bytes),
            ("allocator (peak reserved)", gb(predicted.reserved_bytes), full.peak_reserved_bytes),
            ("device (in use at the end)", interval, full.device_used_bytes),
        )
    ]
    return Table(headings=("", "predicted, with its interval", "measured"), rows=rows, caption="On the fullest rank.")


def _ranks(found: RunMeasurement) -> Table:
    rows = []
    for rank in found.measured:
        sizes = (rank.peak_allocated_bytes, rank.peak_reserved_bytes)
        median, mean = rank.median_step_seconds, rank.mean_step_seconds
        times = ("–" if value is None else f"{value:.4g} s" for value in (median, mean))
        rows.append((str(rank.rank), rank.device, *("–" if size is None else gb(size) for size in sizes), *times))
    headings = ("rank", "device", "peak allocated", "peak reserved", "median step", "mean step")
    return Table(headings=headings, rows=rows)
