"""What a quantization leaves beside its checkpoint: `REPORT.md`, `quantization.json`, a model card and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.quantization.methods import METHODS
from ...ds_configs.specs.units import gigabytes
from ..evaluation.report import CHART_FILE, chart, report_section
from ..evaluation.result import Evaluation
from ..formats.markdown import table
from ..verify.checkpoint import Verification
from .inputs import Prepared

SCHEMA_VERSION = 1
"""Version of `quantize --format json` and of `quantization.json`."""
REPORT_FILE, RESULT_FILE, CARD_FILE = "REPORT.md", "quantization.json", "README.md"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A quantization whose checkpoint passed its checks."""

    prepared: Prepared
    """What was asked for."""
    quantized_layers: tuple[str, ...]
    """Names of the matrices that were quantized."""
    verification: Verification
    """What a fresh process found in the checkpoint."""
    evaluation: Evaluation | None
    """The checkpoint beside its model; `None` when it was not asked for."""
    seconds: Mapping[str, float]
    """Wall-clock time of each stage."""

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        prepared = self.prepared
        return {
            "schema_version": SCHEMA_VERSION,
            "model": prepared.source.name,
            "revision": prepared.source.revision,
            "scheme": asdict(prepared.scheme) | {"format": prepared.scheme.format},
            "method": prepared.resolved.method,
            "method_reason": prepared.resolved.method_reason,
            "settings": prepared.settings.model_dump(),
            "calibration": self._calibration(),
            "quantized_layers": list(self.quantized_layers),
            "memory_estimate": asdict(prepared.memory),
            "checkpoint_bytes": prepared.checkpoint_bytes,
            "verification": asdict(self.verification),
            "evaluation": None if self.evaluation is None else self.evaluation.to_dict(),
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
        }

    def _calibration(self) -> dict[str, Any] | None:
        samples = self.prepared.calibration
        if not samples:
            return None
        return {
            "source": self.prepared.settings.dataset,
            "samples": len(samples),
            "tokens": sum(len(sample["input_ids"]) for sample in samples),
            "seq_len": self.prepared.seq_len,
        }


def file_names(*, evaluated: bool) -> tuple[str, ...]:
    """Return the names of the files beside weights, configuration and tokenizer."""
    return (CARD_FILE, REPORT_FILE, RESULT_FILE, *((CHART_FILE,) if evaluated else ()))


def report_files(outcome: Outcome) -> dict[str, str | bytes]:
    """Return report, numbers, model card and picture by name."""
    files: dict[str, str | bytes] = {
        REPORT_FILE: report(outcome),
        RESULT_FILE: json.dumps(outcome.to_dict(), indent=2, default=str) + "\n",
        CARD_FILE: model_card(outcome),
    }
    if outcome.evaluation is not None:
        files[CHART_FILE] = chart(outcome.evaluation)
    return files


def report(outcome: Outcome) -> str:
    """Return `REPORT.md`."""
    prepared, memory = outcome.prepared, outcome.prepared.memory
    method = METHODS[prepared.resolved.method]
    seconds = [(name, f"{value:.1f} s") for name, value in outcome.seconds.items()]
    lines = [
        "# Quantization report",
        "",
        f"`{prepared.source.name}` as {prepared.scheme.name} by {method.name}, which {method.summary} "
        f"({method.source}). {_reason(prepared)}{_calibration_sentence(outcome)}",
        "",
        "## Checks before it counted as done",
        "",
        *table(("", ""), [(name, value) for name, value in outcome.verification.facts()]),
        "",
    ]
    if outcome.evaluation is not None:
        lines += ["## What it cost", "", *report_section(outcome.evaluation), ""]
    lines += ["## Serving", "", *serving_lines(prepared), "", "## Memory and time", ""]
    terms = [(f"host: {name}", f"{gigabytes(size)} GB") for name, size in memory.host_terms.items()]
    terms += [(f"device: {name}", f"{gigabytes(size)} GB") for name, size in memory.device_terms.items()]
    lines += table(("estimated before the start", ""), terms)
    lines += ["", *table(("stage", "took"), seconds), "", "## Settings", ""]
    named = {name: value for name, value in prepared.settings.model_dump().items() if value is not None}
    lines += table(("setting", "value"), [(f"`{name}`", f"`{value}`") for name, value in named.items()])
    lines += ["", f"## The {len(outcome.quantized_layers)} quantized matrices", ""]
    lines += [", ".join(f"`{name}`" for name in outcome.quantized_layers)]
    return "\n".join(lines) + "\n"


def serving_lines(prepared: Prepared) -> list[str]:
    """Return how to load and serve the checkpoint."""
    storage, method = prepared.scheme.storage, prepared.resolved.method
    if method in ("spqr", "low-rank"):
        return [
            "The weights stand in a small format of Shardwright and, dense, in the checkpoint that Transformers, vLLM "
            "and SGLang load; no engine multiplies with the small format.",
        ]
    lines = ["    vllm serve DIRECTORY", ""]
    if storage == "bitsandbytes":
        return [*lines, "vLLM and Transformers read the format through bitsandbytes. Only Transformers was run here."]
    return [*lines, "vLLM, SGLang and Transformers read the format. Only Transformers was run here."]


def model_card(outcome: Outcome) -> str:
    """Return the checkpoint's `README.md`, with the metadata that the Hub reads."""
    prepared = outcome.prepared
    front = ["library_name: transformers", "pipeline_tag: text-generation"]
    # A card is published with the checkpoint: of a local model it tells the name, not the place.
    is_local = Path(prepared.source.name).exists()
    origin = Path(prepared.source.name).resolve().name if is_local else prepared.source.name
    if not is_local:
        front += [f"base_model: {json.dumps(prepared.source.name)}", "base_model_relation: quantized"]
    front += ["tags:", f"- {prepared.scheme.storage}", f"- {prepared.resolved.method}", "- shardwright"]
    lines = [
        "---",
        *front,
        "---",
        f"# {origin.rpartition('/')[2]}, {prepared.scheme.name}",
        "",
        f"Quantized from `{origin}`"
        + (f" at `{prepared.source.revision}`" if prepared.source.revision else "")
        + f" by {prepared.resolved.method}. What it cost is in [{REPORT_FILE}]({REPORT_FILE}).",
        "",
        *serving_lines(prepared),
        "",
        "## License",
        "",
        f"That of `{origin}`: read its card before you publish this one.",
    ]
    return "\n".join(lines) + "\n"


def _reason(prepared: Prepared) -> str:
    reason = prepared.resolved.method_reason
    return "" if reason == "named" else f"The method was chosen because {reason}. "


def _calibration_sentence(outcome: Outcome) -> str:
    found = outcome._calibration()
    if found is None:
        return "No text was needed."
    return f"Calibrated on {found['samples']} samples, {found['tokens']:,} tokens, of {found['source']}."
