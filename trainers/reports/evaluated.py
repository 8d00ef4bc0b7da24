"""Pages of an evaluation, and of a quantization with its evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ds_configs.specs.units import human_count
from ..charts.canvas import GREEN, GREY
from ..charts.kinds import columns, parts
from ..evaluation.estimates import Estimate
from ..evaluation.report import evaluation_charts, rows, verdict
from ..evaluation.result import Evaluation
from .page import Chart, Page, Section, Table, Tile
from .words import gb, plain, short_name, significant, unit_of, with_error


def evaluation_from(data: Mapping[str, Any]) -> Evaluation:
    """Return the evaluation whose `to_dict` was stored.

    Raises:
        ValidationError: it is not one.
    """
    from pydantic import TypeAdapter

    stated = {name: value for name, value in data.items() if name in Evaluation.__dataclass_fields__}
    found: Evaluation = TypeAdapter(Evaluation).validate_python(stated)
    return found


def evaluation_page(data: Mapping[str, Any]) -> Page:
    """Return the report of `evaluation.json`."""
    found = evaluation_from(data)
    beside = "" if found.baseline is None else f"beside {short_name(found.baseline.name)}, "
    text = found.text
    return Page(
        kind="Evaluation",
        title=short_name(found.model.name),
        subtitle=f"{beside}{text.predicted_tokens:,} tokens of {text.source}: {text.windows:,} of "
        f"{text.available_windows:,} windows of {text.seq_len_tokens:,} tokens",
        tiles=evaluation_tiles(found),
        sections=evaluation_sections(found),
        command=data.get("command", ""),
        versions=found.versions,
        files=("evaluation.json",),
        measures=evaluation_measures(found),
    )


def evaluation_tiles(found: Evaluation) -> tuple[Tile, ...]:
    """Return perplexity, distance, size and speed."""
    model, baseline, compared = found.model, found.baseline, found.comparison
    beside = "" if baseline is None else f"baseline {_estimate(baseline.perplexity)}"
    tiles = [
        Tile(label="Perplexity", value=_estimate(model.perplexity), detail=beside),
        Tile(label="Cross-entropy, nats a token", value=_estimate(model.loss_nats_per_token)),
    ]
    if compared is not None:
        agreement = compared.top1_agreement
        error = "" if agreement.standard_error is None else f" ± {100 * agreement.standard_error:.2g}"
        tiles.append(Tile(label="KL(baseline | model), nats a token", value=_estimate(compared.kl_nats_per_token)))
        tiles.append(Tile(label="Same most likely token", value=f"{100 * agreement.value:.2f}{error} %"))
    before = "" if baseline is None else f"baseline {gb(baseline.sizes.file_bytes)}"
    tiles.append(Tile(label="Safetensors on disk", value=gb(model.sizes.file_bytes), detail=before))
    if model.speed is not None and model.speed.decode_tokens_per_second is not None:
        decode = significant(model.speed.decode_tokens_per_second)
        tiles.append(Tile(label="Decode, tokens/s", value=decode, detail=model.speed.machine))
    return tuple(tiles)


def evaluation_sections(found: Evaluation) -> tuple[Section, ...]:
    """Return the measures, their distributions, and how they were taken."""
    compared = found.comparison
    headings = ("", "model", "baseline", "difference") if compared is not None else ("", "model")
    shown = [(row.name, row.model, row.baseline, row.difference)[: len(headings)] for row in rows(found)]
    caption = "± is one standard error, over windows of text."
    measures = Table(headings=headings, rows=shown, caption=caption)
    texts = (verdict(found),) if compared is not None else ()
    names = {"model": found.model.name, "baseline": plain(found.baseline and found.baseline.name)}
    how = (
        names
        | {"seconds in all": f"{found.seconds:.0f}"}
        | {name: plain(value) for name, value in found.settings.items()}
    )
    facts = Table(headings=("", "value"), rows=list(how.items()), figures=False)
    return (
        Section(heading="Measures", texts=texts, charts=_charts(found), tables=(measures,)),
        Section(heading="How it was measured", tables=(facts,), folded=True),
    )


_NOTES = (
    "Where the band does not touch zero, the difference is beyond the noise of this text.",
    "A small mean may hide few tokens that changed much.",
)


def _charts(found: Evaluation) -> tuple[Chart, ...]:
    notes = _NOTES if found.comparison is not None else ("",)
    charts = zip(evaluation_charts(found), notes, strict=True)
    return tuple(Chart(title=title, draw=draw, note=note) for (title, draw), note in charts)


def evaluation_measures(found: Evaluation) -> dict[str, float]:
    """Return what evaluations are compared by."""
    measures = {
        "perplexity": found.model.perplexity.value,
        "safetensors on disk, GB": found.model.sizes.file_bytes / 1e9,
    }
    if found.comparison is not None:
        measures["KL(baseline | model), nats a token"] = found.comparison.kl_nats_per_token.value
    if found.model.speed is not None and found.model.speed.decode_tokens_per_second is not None:
        measures["decode, tokens/s"] = found.model.speed.decode_tokens_per_second
    return measures


def quantization_page(data: Mapping[str, Any]) -> Page:
    """Return the report of `quantization.json`."""
    stored, scheme, proven = data["evaluation"], data["scheme"], data["verification"]
    found = None if stored is None else evaluation_from(stored)
    passed, differs = not proven["faults"], proven["largest_logit_difference"]
    reloaded = "not reloaded" if differs is None else f"largest difference of a logit {significant(differs)}"
    word, state = ("yes", "good") if passed else ("no", "bad")
    tiles = (
        Tile(label="Checkpoint proven", value=word, detail=reloaded, state=state),
        Tile(label="Scheme", value=plain(scheme.get("name")), detail=f"by {data['method']}"),
        Tile(label="Quantized matrices", value=f"{len(data['quantized_layers']):,}"),
        *(() if found is None else evaluation_tiles(found)),
    )
    return Page(
        kind="Quantization",
        title=short_name(data["model"]),
        subtitle=f"{plain(scheme.get('name'))} by {data['method']}: {data['method_reason']}",
        tiles=tiles,
        sections=(*(() if found is None else evaluation_sections(found)), *_quantization_sections(data, found)),
        command=data.get("command", ""),
        versions=data["versions"],
        files=("quantization.json",),
        measures={"checkpoint, GB": data["checkpoint_bytes"] / 1e9} | (evaluation_measures(found) if found else {}),
    )


def _quantization_sections(data: Mapping[str, Any], found: Evaluation | None) -> tuple[Section, ...]:
    memory = data["memory_estimate"]
    terms = {f"host: {name}": size for name, size in memory["host_terms"].items()}
    terms |= {f"device: {name}": size for name, size in memory["device_terms"].items()}
    charts = [Chart(title="Wall-clock time by stage, seconds", draw=parts(data["seconds"], "seconds"))]
    if found is not None and found.baseline is not None:
        sizes = {"before": found.baseline.sizes.file_bytes, "quantized": found.model.sizes.file_bytes}
        unit, size = unit_of(sizes.values())
        draw = columns({name: count / size for name, count in sizes.items()}, unit, colours=(GREY, GREEN))
        charts.insert(0, Chart(title=f"Safetensors on disk, {unit}", draw=draw))
    calibration = data["calibration"]
    facts = [
        ("model", data["model"]),
        ("checkpoint, predicted", gb(data["checkpoint_bytes"])),
        *([] if found is None else [("checkpoint, written", gb(found.model.sizes.file_bytes))]),
        *([] if found is None else [("parameters", human_count(found.model.sizes.parameters))]),
        *((f"calibration {name.replace('_', ' ')}", plain(value)) for name, value in (calibration or {}).items()),
        *((f"verification: {name.replace('_', ' ')}", plain(value)) for name, value in data["verification"].items()),
        *((f"predicted memory, {name}", gb(size)) for name, size in terms.items()),
    ]
    settings = [(name.replace("_", " "), plain(value)) for name, value in data["settings"].items()]
    layers = [(str(name),) for name in data["quantized_layers"]]
    return (
        Section(
            heading="Making of the checkpoint",
            charts=charts,
            tables=(Table(headings=("", "value"), rows=facts, figures=False),),
        ),
        Section(heading="Settings", tables=(Table(headings=("", "value"), rows=settings, figures=False),), folded=True),
        Section(heading="Quantized matrices", tables=(Table(headings=("name",), rows=layers),), folded=True),
    )


def _estimate(found: Estimate) -> str:
    return with_error(found.value, found.standard_error)
