"""One way into every engine: from a prepared quantization to a quantized model in memory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ...ds_configs.quantization.methods import METHODS
from ...plugins.llm_compressor.loading import load_for_quantization
from ...plugins.transformers.quantized_model import QuantizedModel, ReportProgress
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


def quantize_in_memory(
    prepared: Prepared, *, journal: Path | None, device: str, report: ReportProgress
) -> QuantizedModel:
    """Load the model and quantize it by the chosen method.

    Raises:
        ShardwrightError: the model cannot be loaded, or the engine refuses it.
    """
    engine = METHODS[prepared.resolved.method].engine
    if engine == "bitsandbytes":
        from ...plugins.bitsandbytes.checkpoint import quantize_with_bitsandbytes

        chosen = {layer.name for layer in prepared.layers}
        return quantize_with_bitsandbytes(
            prepared.source.directory,
            prepared.scheme,
            quantized=chosen,
            dense=[layer.name for layer in prepared.source.layers if layer.name not in chosen],
            dtype=prepared.source.dtype,
            device=device,
            options=prepared.settings.method_options,
        )
    model = load_for_quantization(prepared.source)
    if engine == "auto-round":
        return _auto_round(prepared, model, report)
    if engine == "shardwright":
        return _own_method(prepared, model, journal, report)
    return _llm_compressor(prepared, model, journal, report)


def _llm_compressor(prepared: Prepared, model: Any, journal: Path | None, report: ReportProgress) -> QuantizedModel:
    from ...plugins.llm_compressor.engine import EngineRequest, quantize_with_llm_compressor

    settings = prepared.settings
    request = EngineRequest(
        model=model,
        tokenizer=prepared.tokenizer,
        scheme=prepared.scheme,
        method=prepared.resolved.method,  # type: ignore[arg-type]
        calibration=prepared.calibration,
        batch_size=settings.batch_size,
        method_options=settings.method_options,
        journal=journal if prepared.calibration else None,
        run_key=run_key(prepared),
        seed=settings.seed,
        stored_names=prepared.source.tensors.keys(),
    )
    return quantize_with_llm_compressor(request, report)


def _auto_round(prepared: Prepared, model: Any, report: ReportProgress) -> QuantizedModel:
    from ...plugins.auto_round.engine import quantize_with_auto_round

    settings = prepared.settings
    return quantize_with_auto_round(
        model,
        prepared.tokenizer,
        prepared.scheme,
        calibration=prepared.calibration,
        batch_size=settings.batch_size,
        options=settings.method_options,
        seed=settings.seed,
        report=report,
        stored_names=prepared.source.tensors.keys(),
    )


def _own_method(prepared: Prepared, model: Any, journal: Path | None, report: ReportProgress) -> QuantizedModel:
    from .spqr import quantize_with_low_rank, quantize_with_spqr

    settings = prepared.settings
    run = quantize_with_spqr if prepared.resolved.method == "spqr" else quantize_with_low_rank
    return run(
        model,
        prepared.tokenizer,
        prepared.scheme,
        layers=[layer.name for layer in prepared.layers],
        calibration=prepared.calibration,
        batch_size=settings.batch_size,
        options=settings.method_options,
        journal=journal,
        report=report,
        run_key=run_key(prepared),
    )
