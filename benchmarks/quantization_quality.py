"""Held-out perplexity of a small Llama by method and scheme: `python benchmarks/quantization_quality.py [--write]`.

The model is the one that `tests/small_llama.py` trains, on one CPU core in a minute; the rest takes two more. With
`--write` the figures, the tables in docs/measurements/quantization.md and its picture are replaced.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from page_parts import with_part
from shardwright.ds_configs.quantization.scheme import ActivationQuantization, QuantizationScheme, scheme_named
from shardwright.plugins.llm_compressor.engine import EngineRequest, quantize_with_llm_compressor

ROOT = Path(__file__).parents[1]
MEASURED = Path(__file__).with_name("quantization_quality.json")
DOCUMENT = ROOT / "docs" / "measurements" / "quantization.md"
PICTURE = ROOT / "docs" / "measurements" / "quantization.png"
CALIBRATION_ROWS = 64
OUTLIER_CHANNELS, OUTLIER_FACTOR = range(0, 256, 16), 50.0
RANGES = ("minmax", "percentile", "l2", "kl")


@dataclass(frozen=True, kw_only=True)
class QualityCase:
    """One quantization of the model."""

    group: str
    """`weights`, `outliers` or `ranges`."""
    scheme: str
    """Preset."""
    method: str
    """As of `shardwright quantize --method`."""
    input_bits: int | None = None
    """Bits of static activations with a searched range; `None` leaves the preset's."""
    ranges: str | None = None
    """How the range is found."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the method."""
    calibration_rows: int = CALIBRATION_ROWS
    """Rows of 128 tokens; fewer for AWQ, which runs every layer for every candidate."""

    def full_scheme(self) -> QuantizationScheme:
        """Return what the engine takes."""
        if self.input_bits is None:
            return scheme_named(self.scheme)
        inputs = ActivationQuantization(bits=self.input_bits, dynamic=False, range_method=self.ranges or "minmax")  # type: ignore[arg-type]
        return replace(scheme_named(self.scheme), activations=inputs)


@dataclass(frozen=True, kw_only=True)
class QualityResult:
    """What one quantization costs, on rows of held-out text."""

    case: QualityCase
    """What was measured."""
    perplexity: float
    """Per token."""
    excess_nats: float
    """Mean cross-entropy above that of the model before quantization, per token."""
    excess_standard_error: float
    """Of that difference, over rows."""


def cases() -> list[QualityCase]:
    """Return everything that is measured."""
    awq: dict[str, Any] = {"options": {"n_grid": 8}, "calibration_rows": 16}
    weights = [
        QualityCase(group="weights", scheme=scheme, method=method, **(awq if method == "awq" else {}))
        for scheme in ("W2A16", "W2A16_ASYM", "W3A16", "W3A16_ASYM", "W4A16", "W4A16_ASYM")
        for method in ("rtn", "awq", "gptq")
    ]
    inputs = [
        QualityCase(group="weights", scheme=scheme, method=method)
        for scheme, method in (("W8A8", "rtn"), ("W8A8", "gptq"), ("W8A8_STATIC", "rtn"), ("FP8_DYNAMIC", "rtn"))
    ]
    outliers = [
        QualityCase(group="outliers", scheme=scheme, method=method, **(awq if method == "awq" else {}))
        for scheme, methods in (
            ("W3A16", ("rtn", "awq", "gptq")),
            ("W4A16", ("rtn", "awq", "gptq")),
            ("W8A8", ("rtn", "smoothquant")),
            ("W8A8_STATIC", ("rtn", "smoothquant", "smoothquant-gptq")),
        )
        for method in methods
    ]
    ranges = [
        QualityCase(group="ranges", scheme="W8A8_STATIC", method="rtn", input_bits=bits, ranges=name)
        for bits in (8, 6, 5, 4)
        for name in RANGES
    ]
    return [*weights, *inputs, *outliers, *ranges]


def measure(chosen: Sequence[QualityCase], model_dir: Path) -> tuple[dict[str, float], list[QualityResult]]:
    """Train the model unless `model_dir` has it, quantize it in every format, and return its facts and the results."""
    sys.path.insert(0, str(ROOT / "tests"))
    from small_llama import inject_outliers, row_losses, trained_llama, unigram_perplexity

    llama = trained_llama(model_dir)
    dense_N = row_losses(llama.model, llama.evaluation_NS)
    facts = {
        "perplexity": float(dense_N.mean().exp()),
        "loss_standard_error": float(dense_N.std() / len(dense_N) ** 0.5),
        "unigram_perplexity": unigram_perplexity(llama.train_NS, llama.evaluation_NS),
        "parameters": sum(parameter.numel() for parameter in llama.model.parameters()),
        "evaluation_tokens": llama.evaluation_NS.numel(),
        "calibration_tokens": llama.train_NS[:CALIBRATION_ROWS].numel(),
    }
    results = []
    for case in chosen:
        model = llama.copy()
        if case.group == "outliers":
            inject_outliers(model, OUTLIER_CHANNELS, factor=OUTLIER_FACTOR)
        request = EngineRequest(
            model=model,
            tokenizer=llama.tokenizer,
            scheme=case.full_scheme(),
            method=case.method,  # type: ignore[arg-type]
            calibration=[{"input_ids": row.tolist()} for row in llama.train_NS[: case.calibration_rows]],
            batch_size=8,
            method_options=case.options,
        )
        losses_N = row_losses(quantize_with_llm_compressor(request, lambda progress: None).model, llama.evaluation_NS)
        excess_N = losses_N - dense_N
        result = QualityResult(
            case=case,
            perplexity=float(losses_N.mean().exp()),
            excess_nats=float(excess_N.mean()),
            excess_standard_error=float(excess_N.std() / len(excess_N) ** 0.5),
        )
        results.append(result)
        print(case.group, *_labels(case), _cell(result), file=sys.stderr, flush=True)
    return facts, results


def _labels(case: QualityCase) -> tuple[str, str]:
    if case.input_bits is not None:
        return f"{case.input_bits} bit inputs", str(case.ranges)
    return case.scheme, case.method


def _cell(result: QualityResult) -> str:
    excess, error = 1000 * result.excess_nats, 1000 * result.excess_standard_error
    return (
        f"{result.perplexity:.2f} (+{excess:.1f} ± {error:.1f})"
        if excess >= 0
        else (f"{result.perplexity:.2f} ({excess:.1f} ± {error:.1f})")
    )


def table(results: Sequence[QualityResult]) -> str:
    """Return a Markdown table with a row for each scheme and a column for each method."""
    cells = {_labels(result.case): _cell(result) for result in results}
    rows, columns = (list(dict.fromkeys(label[axis] for label in cells)) for axis in (0, 1))
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture(results: Sequence[QualityResult], path: Path) -> None:
    """Draw excess cross-entropy with its standard error: weights by bits, outliers, and ranges by bits."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {
        "weights": "quantized weights",
        "outliers": "the same function with 16 outlier channels",
        "ranges": "static ranges of inputs",
    }
    for axes, (group, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        members = [result for result in results if result.case.group == group]
        rows, columns = (list(dict.fromkeys(_labels(r.case)[axis] for r in members)) for axis in (0, 1))
        for place, column in enumerate(columns):
            shown = [result for result in members if _labels(result.case)[1] == column]
            axes.errorbar(
                [rows.index(_labels(r.case)[0]) + 0.12 * (place - len(columns) / 2) for r in shown],
                [max(r.excess_nats, 1e-5) for r in shown],
                yerr=[2 * r.excess_standard_error for r in shown],
                fmt="o",
                capsize=2,
                label=column,
            )
        axes.set(title=title, yscale="log", ylim=(1e-4, 0.3))
        axes.set_xticks(range(len(rows)), rows, rotation=45, ha="right", fontsize=8)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=8)
    figure.supylabel("nats per token lost (2 standard errors)", fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def updated(document: str, results: Sequence[QualityResult]) -> str:
    """Return the document with its tables replaced."""
    for group in ("weights", "outliers", "ranges"):
        document = with_part(document, group, table([result for result in results if result.case.group == group]))
    return document


def stored() -> tuple[dict[str, float], list[QualityResult]]:
    """Return the figures that were written last."""
    data = json.loads(MEASURED.read_text(encoding="utf-8"))
    return data["model"], [QualityResult(**(row | {"case": QualityCase(**row["case"])})) for row in data["results"]]


def main() -> None:
    """Measure, print the tables, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace figures, tables and picture")
    parser.add_argument("--model-dir", type=Path, help="where the trained model is kept for the next run")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        facts, results = measure(cases(), flags.model_dir or Path(temporary))
    for group in ("weights", "outliers", "ranges"):
        print(table([result for result in results if result.case.group == group]), end="\n\n")
    print(json.dumps(facts, indent=2))
    if flags.write:
        data = {"model": facts, "results": [asdict(result) for result in results]}
        MEASURED.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8"), results), encoding="utf-8")
        picture(results, PICTURE)


if __name__ == "__main__":
    main()
