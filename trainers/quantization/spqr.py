"""Quantization of a model by SpQR or low-rank correction, one decoder layer at a time."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ...ds_configs.quantization.scheme import MethodName, QuantizationScheme
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins.safetensors.reading import load_tensors
from ...plugins.transformers.quantized_model import ReportProgress
from ..formats.spqr import (
    SMALL_DIRECTORY,
    LowRankOptions,
    SmallMatrix,
    SpQROptions,
    low_rank_residual,
    matrix_settings,
    read_matrix,
    save_small_format,
    spqr_quantize,
)

_FROM_SCHEME = ("bits", "group_size", "symmetric")
_SETTINGS = "matrix_settings"
Options = SpQROptions | LowRankOptions


@dataclass(kw_only=True)
class SmallFormatModel:
    """A model with its quantized matrices; its weights in memory are their dequantized values."""

    model: Any
    """Transformers model."""
    matrices: Mapping[str, SmallMatrix]
    """Quantized matrices by module name."""

    @property
    def quantized_layers(self) -> tuple[str, ...]:
        """Names of the quantized layers."""
        return tuple(self.matrices)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of all quantized matrices divided by the number of their weights."""
        weights = sum(matrix.shape[0] * matrix.shape[1] for matrix in self.matrices.values())
        return 8 * sum(matrix.stored_bytes for matrix in self.matrices.values()) / weights

    def save(self, directory: Path) -> None:
        """Write a dense checkpoint, which Transformers and vLLM load, and the small format in `small/`."""
        self.model.save_pretrained(directory)
        save_small_format(self.model, self.matrices, Path(directory) / SMALL_DIRECTORY)


def quantize_to_small_format(
    model: Any,
    tokenizer: Any,
    scheme: QuantizationScheme,
    *,
    method: MethodName,
    layers: Sequence[str],
    calibration: Sequence[Mapping[str, Sequence[int]]],
    batch_size: int,
    options: Mapping[str, Any],
    journal: Path | None,
    report: ReportProgress,
    run_key: str = "",
) -> SmallFormatModel:
    """Quantize linear layers of a model by SpQR or low-rank correction, in place.

    SpQR takes bits and group size from the scheme, but not the group size 128, which is too large for SpQR. Low-rank
    correction uses all weight settings of the scheme.

    Args:
        model: Transformers model with dense weights.
        tokenizer: May be `None`: samples are token ids.
        scheme: Number format of the weights.
        method: `spqr` or `low-rank`.
        layers: Names of plain linear layers to quantize.
        calibration: Samples with `input_ids`.
        batch_size: Samples per forward pass.
        options: Fields of `SpQROptions` or `LowRankOptions`.
        journal: Directory for finished layers, from which an interrupted run resumes.
        report: Receives the progress.
        run_key: Identifies the model, so that a journal of another run is rejected.

    Raises:
        UsageError: unknown options, values out of range, or no samples.
        RefusedInputError: weights or inputs contain NaN or infinity.
    """
    from ...plugins.llm_compressor.journal import Journal, run_identity
    from ...plugins.llm_compressor.layer_visits import visit_layers

    selected = _options(scheme, method, options)
    if not calibration:
        rule, fix = f"{method} needs text for calibration", "pass --dataset, such as python-help"
        raise UsageError(ConfigError(where="dataset", rule=rule, fix=fix))
    record = None
    if journal is not None:
        identity = run_identity(
            run_key=run_key,
            scheme=scheme,
            method=method,
            method_options=asdict(selected),
            calibration=calibration,
            batch_size=batch_size,
            seed=0,
        )
        record = Journal(journal, identity)
    matrices: dict[str, SmallMatrix] = {}
    if record is not None:
        for entry in record.entries:
            tensors = load_tensors(record.directory / entry.file)
            for name, settings in json.loads(bytes(tensors.pop(_SETTINGS).tolist())).items():
                matrices[name] = read_matrix(name, settings, tensors, where=entry.file)
                weight = model.get_submodule(name).weight
                weight.data = matrices[name].dequantize().to(weight.device)
    pending: dict[str, SmallMatrix] = {}

    def visit(name: str, weight_OI: Any, hessian_II: Any) -> Any:
        if isinstance(selected, SpQROptions):
            matrices[name] = spqr_quantize(weight_OI, hessian_II, selected)
        else:
            matrices[name] = low_rank_residual(weight_OI, hessian_II, selected)
        pending[name] = matrices[name]
        return matrices[name].dequantize()

    def finish_part(part: int) -> None:
        import torch

        if record is not None:
            settings = json.dumps({name: matrix_settings(matrix) for name, matrix in pending.items()})
            tensors = {
                f"{layer}.{name}": tensor
                for layer, matrix in pending.items()
                for name, tensor in matrix.tensors().items()
            }
            tensors[_SETTINGS] = torch.tensor(list(settings.encode()), dtype=torch.uint8)
            record.record(phase=0, part=part, tensors=tensors)
        pending.clear()

    visit_layers(
        model,
        tokenizer,
        layers,
        calibration=calibration,
        batch_size=batch_size,
        visit=visit,
        finish_part=finish_part,
        finished_parts=0 if record is None else len(record.entries),
        report=report,
    )
    return SmallFormatModel(model=model, matrices={name: matrices[name] for name in layers})


def _options(scheme: QuantizationScheme, method: MethodName, options: Mapping[str, Any]) -> Options:
    """Return the options of a method, from the scheme and `method_options`."""
    weights = scheme.weights
    kind: type[Options]
    from_scheme: dict[str, Any]
    if method == "spqr":
        kind, from_scheme = SpQROptions, {"bits": weights.bits}
        if weights.group_size not in (None, 128):
            from_scheme["group_size"] = weights.group_size
    else:
        kind = LowRankOptions
        group_size = weights.group_size if weights.strategy == "group" else -1
        from_scheme = {"bits": weights.bits, "group_size": group_size, "symmetric": weights.symmetric}
    allowed = {field.name for field in fields(kind)} - set(_FROM_SCHEME)
    errors = []
    for name, value in options.items():
        if name in _FROM_SCHEME:
            rule, fix = "is set by the scheme", "use --scheme, --group-size or symmetric"
            errors.append(ConfigError(where=f"method_options.{name}", value=value, rule=rule, fix=fix))
        elif name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(sorted(allowed))}"
            errors.append(
                ConfigError(where="method_options", value=name, rule=f"is not an option of {method}", fix=fix)
            )
        elif isinstance(value, bool) or not isinstance(value, int | float | None):
            errors.append(ConfigError(where=f"method_options.{name}", value=value, rule="must be a number"))
    if errors:
        raise UsageError(errors)
    try:
        selected = kind(**{**from_scheme, **options})
        errors = selected.errors()
    except TypeError as error:
        errors = [ConfigError(where="method_options", value=dict(options), rule=f"cannot be used ({error})")]
    if errors:
        raise UsageError(errors)
    return selected
