"""One way into every engine: from a prepared quantization to a quantized model in memory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ...plugins.llm_compressor.loading import load_for_quantization
from ...plugins.quantized_model import QuantizedModel, ReportProgress
from .inputs import Prepared


def run_key(prepared: Prepared) -> str:
    """Return a text that names the model of a run: its revision on the Hub, or name, size and time of its files."""
    source = prepared.source
    if source.revision is not None:
        return f"{source.name}@{source.revision}"
    facts = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(source.directory.glob("*.safetensors"))
    ]
    return f"{source.directory.resolve()}#{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"


def quantize_in_memory(prepared: Prepared, *, journal: Path | None, device: str, report: ReportProgress) -> QuantizedModel:
    """Load the model and quantize it by the chosen method.

    Raises:
        ShardwrightError: the model cannot be loaded, or the engine refuses it.
    """
    method = prepared.resolved.method
    if method == "bitsandbytes":
        return _bitsandbytes(prepared, device)
    model = load_for_quantization(prepared.source, device=device)
    if method == "autoround":
        return _auto_round(prepared, model, report)
    if method in ("spqr", "low-rank"):
        return _own(prepared, model, journal, report)
    from ...plugins.llm_compressor.engine import EngineRequest, quantize_with_llm_compressor

    settings = prepared.settings
    request = EngineRequest(
        model=model,
        tokenizer=prepared.tokenizer,
        scheme=prepared.scheme,
        method=method,
        calibration=prepared.calibration,
        batch_size=settings.batch_size,
        method_options=settings.method_options,
        journal=journal if prepared.calibration else None,
        run_key=run_key(prepared),
        seed=settings.seed,
    )
    return quantize_with_llm_compressor(request, report)
