"""Files beside a quantized checkpoint: `REPORT.md`, `quantization.json`, a model card and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...ds_configs.quantization.methods import METHODS
from ...ds_configs.specs.units import gigabytes
from ...plugins.huggingface_hub.cards import CARD_FILE
from ...plugins.planning.from_names import installed_versions
from ..evaluation.report import CHART_FILE, chart, report_section
from ..evaluation.result import Evaluation
from ..formats.rendering import render
from ..reports.make import REPORT_FILE as HTML_FILE
from ..runs.report import REPORT_FILE, card_text
from ..verify.checkpoint import Verification
from .inputs import Prepared

SCHEMA_VERSION = 1
"""Version of `quantize --format json` and of `quantization.json`."""
RESULT_FILE = "quantization.json"


@dataclass(frozen=True, kw_only=True)
class QuantizationOutcome:
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
    command: str = ""
    """Command line that asked for it; empty where a Python program did."""

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
            "versions": dict(installed_versions()),
            "command": self.command,
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


def quantization_file_names(*, evaluated: bool) -> tuple[str, ...]:
    """Return the names of the files beside weights, configuration and tokenizer."""
    return (CARD_FILE, REPORT_FILE, RESULT_FILE, HTML_FILE, *((CHART_FILE,) if evaluated else ()))


def quantization_files(outcome: QuantizationOutcome) -> dict[str, str | bytes]:
    """Return report, numbers, model card and picture by name."""
    files: dict[str, str | bytes] = {
        REPORT_FILE: quantization_report(outcome),
        RESULT_FILE: json.dumps(outcome.to_dict(), indent=2, default=str) + "\n",
        CARD_FILE: quantized_card(outcome),
    }
    if outcome.evaluation is not None:
        files[CHART_FILE] = chart(outcome.evaluation)
    return files


def quantization_report(outcome: QuantizationOutcome) -> str:
    """Return `REPORT.md`."""
    prepared, memory = outcome.prepared, outcome.prepared.memory
    terms = [(f"host: {name}", f"{gigabytes(size)} GB") for name, size in memory.host_terms.items()]
    terms += [(f"device: {name}", f"{gigabytes(size)} GB") for name, size in memory.device_terms.items()]
    return render(
        "quantization/templates/report.md.j2",
        **_named(prepared),
        outcome=outcome,
        how=METHODS[prepared.resolved.method],
        reason=prepared.resolved.method_reason,
        calibration=_calibration_sentence(outcome),
        evaluation=None if outcome.evaluation is None else report_section(outcome.evaluation),
        terms=terms,
        seconds=[(name, f"{value:.1f} s") for name, value in outcome.seconds.items()],
        settings=prepared.settings.model_dump(),
    )


def _named(prepared: Prepared) -> dict[str, Any]:
    """Return what report and card call alike."""
    return {"source": prepared.source, "scheme": prepared.scheme, "method": prepared.resolved.method}


def quantized_card(outcome: QuantizationOutcome) -> str:
    """Return the checkpoint's `README.md`, with the metadata that the Hub reads."""
    prepared = outcome.prepared
    return card_text(
        "quantization/templates/card.md.j2",
        prepared.source.name,
        "quantized",
        "transformers",
        (prepared.scheme.storage, prepared.resolved.method),
        **_named(prepared),
        loads=outcome.verification.largest_logit_difference is not None,
        adapter=None,
    )


def _calibration_sentence(outcome: QuantizationOutcome) -> str:
    found = outcome._calibration()
    if found is None:
        return "No text was needed."
    return f"Calibrated on {found['samples']} samples, {found['tokens']:,} tokens, of {found['source']}."
