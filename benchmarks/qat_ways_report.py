"""A comparison as one table, one picture and one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from qat_ways_result import Comparison, Way
from shardwright.trainers.counting.estimates import Estimate
from shardwright.trainers.reports.markdown import table

LABELS: Mapping[Way, str] = MappingProxyType(
    {
        "ft": "fine-tuned (FT)",
        "ft-rtn": "FT → RTN",
        "ft-gptq": "FT → GPTQ",
        "qat": "QAT",
        "qat-learned": "QAT, learned scales",
        "qad": "QAD",
        "qad-ft": "QAD, taught by FT",
    }
)
_COLUMNS = (
    "",
    "perplexity",
    "nats a token above FT",
    "gap recovered",
    "each seed",
    "seconds",
    "ms a step",
    "peak MB",
    "exported − trained",
)


def comparison_table(found: Comparison) -> list[str]:
    """Return the lines of a Markdown table: one row for each way, and one for the model before training."""
    before = ["before training", _perplexity(found.perplexity(None))]
    rows = [[*before, *[""] * (len(_COLUMNS) - len(before))]]
    return table(_COLUMNS, [*rows, *(_row(found, way) for way in found.ways)]).splitlines()


def comparison_page(found: Comparison, picture: str | None = None) -> str:
    """Return a page of Markdown with the table, and what it says in words.

    Args:
        found: What was measured.
        picture: Name of the picture's file beside the page; `None` shows none.
    """
    runs = f"{len(found.seeds)} seed{'s' if len(found.seeds) > 1 else ''}"
    lines = [
        f"# {found.scheme}: quantized training against training and quantizing",
        "",
        f"{found.steps} steps of every way, learning rate {found.learning_rate:g}, {runs}, judged on "
        f"{sum(found.token_counts):,} held-out tokens. Errors are one standard error over held-out windows, of the "
        "difference to the fine-tuned model window by window.",
        "",
        *comparison_table(found),
        "",
        *(["", f"![Gap recovered by each way]({picture})", ""] if picture else []),
        *verdicts(found),
    ]
    return "\n".join(lines) + "\n"


def verdicts(found: Comparison) -> list[str]:
    """Return one sentence for each trained way on how it compares with quantizing afterwards."""
    rival: Way = "ft-gptq" if "ft-gptq" in found.ways else "ft-rtn"
    lines = []
    for way in found.ways:
        if not way.startswith("qa"):
            continue
        difference = found.advantage(way, rival)
        side = "below" if difference.value >= 0 else "above"
        # One window has no error.
        chance = {True: "more than chance", False: "which may be chance", None: "with no error known"}
        amount = _thousandths(Estimate(value=abs(difference.value), standard_error=difference.standard_error))
        lines.append(
            f"- {LABELS[way]} ends {amount} thousandths of a nat {side} {LABELS[rival]}, "
            f"{chance[difference.is_significant]}."
        )
    return lines


def draw_comparison(found: Comparison, path: Path, *, costs: bool = True) -> None:
    """Draw the gap recovered with two standard errors and every seed.

    Args:
        found: What was measured.
        path: Where the picture goes, as PNG.
        costs: Whether to add time and bytes of a step, relative to fine-tuning.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11 if costs else 6.5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 1 + costs, squeeze=False)[0]
    _draw_shares(panels[0], found)
    if costs:
        _draw_costs(panels[1], found)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_shares(axes: Any, found: Comparison) -> None:
    shares = {way: share for way in found.ways if (share := found.recovered(way)) is not None}
    for place, (way, share) in enumerate(shares.items()):
        error = 200 * (share.standard_error or 0)
        axes.bar(place, 100 * share.value, color=f"C{place}", alpha=0.7, yerr=error, capsize=3)
        seeds = found.recovered_by_seed(way)
        axes.plot([place] * len(seeds), [100 * each for each in seeds], "k.", markersize=4)
    _name_ways(axes, list(shares))
    axes.set(ylabel="% of the gap FT → RTN recovered", title=f"{found.scheme}, {found.steps} steps, 2 standard errors")


def _draw_costs(axes: Any, found: Comparison) -> None:
    trained = [way for way in found.ways if not way.startswith("ft-")]
    for offset, name, amounts in (
        (-0.2, "time of a step", [found.seconds_per_step(way) / found.seconds_per_step("ft") for way in trained]),
        (0.2, "peak bytes", [found.peak_bytes(way) / found.peak_bytes("ft") for way in trained]),
    ):
        axes.bar([place + offset for place in range(len(trained))], amounts, width=0.38, label=name)
    _name_ways(axes, trained)
    axes.set(title="cost beside fine-tuning")
    axes.axhline(1, color="k", linewidth=0.5)
    axes.legend(fontsize=8)


def _name_ways(axes: Any, ways: Sequence[Way]) -> None:
    axes.set_xticks(range(len(ways)), [LABELS[way] for way in ways], rotation=25, ha="right", fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def _row(found: Comparison, way: Way) -> list[Any]:
    share, difference = found.recovered(way), found.export_difference(way)
    seeds = found.recovered_by_seed(way) if way not in ("ft", "ft-rtn") else ()
    return [
        LABELS[way],
        _perplexity(found.perplexity(way)),
        "0" if way == "ft" else f"{found.excess(way).value:.4f} ± {found.excess(way).standard_error or 0:.4f}",
        _share(way, share),
        ", ".join(f"{100 * each:.0f}" for each in seeds) if len(seeds) > 1 else "",
        f"{found.seconds(way):.0f}",
        f"{1e3 * found.seconds_per_step(way):.0f}",
        f"{found.peak_bytes(way) / 1e6:.1f}",
        "" if difference is None else f"{difference:.1e}" if difference else "0",
    ]


def _share(way: Way, share: Estimate | None) -> str:
    if share is None:
        return "no gap"
    if way in ("ft", "ft-rtn"):
        return f"{100 * share.value:.0f} %"
    return f"{100 * share.value:.1f} ± {100 * (share.standard_error or 0):.1f} %"


def _perplexity(found: Estimate) -> str:
    return f"{found.value:.3f}"


def _thousandths(found: Estimate) -> str:
    error = "" if found.standard_error is None else f" ± {1000 * found.standard_error:.1f}"
    return f"{1000 * found.value:.1f}{error}"
