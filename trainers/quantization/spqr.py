"""Quantization of a model by SpQR or low-rank correction, one decoder layer at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.quantization.scheme import MethodName, QuantizationScheme
from ...ds_configs.specs.errors import ConfigError, UsageError, collecting
from ...ds_configs.specs.settings import settings_of
from ..formats.spqr import (
    SMALL_DIRECTORY,
    LowRankOptions,
    SmallMatrix,
    SpQROptions,
    low_rank_residual,
    save_small_format,
    spqr_quantize,
)


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

    def save(self, directory: Path) -> None:
        """Write a dense checkpoint, which Transformers and vLLM load, and the small format in `small/`."""
        self.model.save_pretrained(directory)
        save_small_format(self.model, self.matrices, Path(directory) / SMALL_DIRECTORY)


def quantize_to_small_format(
    model: Any,
    scheme: QuantizationScheme,
    *,
    method: MethodName,
    layers: Sequence[str],
    calibration: Sequence[Mapping[str, Sequence[int]]],
    batch_size: int,
    options: Mapping[str, Any],
) -> SmallFormatModel:
    """Quantize linear layers of a model by SpQR or low-rank correction, in place.

    SpQR takes bits and group size from the scheme, but not the group size 128, which is too large for SpQR. Low-rank
    correction uses all weight settings of the scheme.

    Args:
        model: Transformers model with dense weights.
        scheme: Number format of the weights.
        method: `spqr` or `low-rank`.
        layers: Names of plain linear layers to quantize.
        calibration: Samples with `input_ids`.
        batch_size: Samples per forward pass.
        options: Fields of `SpQROptions` or `LowRankOptions`.

    Raises:
        UsageError: unknown options, values out of range, or no samples.
        RefusedInputError: weights or inputs contain NaN or infinity.
    """
    from ...plugins.llm_compressor.engine import visit_layers

    weights = scheme.weights
    kind: type[SpQROptions] | type[LowRankOptions] = LowRankOptions
    from_scheme = {"bits": weights.bits, "group_size": weights.group_size or -1, "symmetric": weights.symmetric}
    rule, fix = "is set by the scheme", "use --scheme, --group-size or symmetric"
    errors = [
        ConfigError(where=name, value=options[name], rule=rule, fix=fix) for name in from_scheme if name in options
    ]
    if method == "spqr":
        kind = SpQROptions
        del from_scheme["symmetric"]
        if weights.group_size in (None, 128):
            del from_scheme["group_size"]
    with collecting(errors):
        selected = settings_of(kind, {**options, **from_scheme})
    if errors:
        raise UsageError(errors)
    if not calibration:
        rule, fix = f"{method} needs text for calibration", "pass --dataset, such as python-help"
        raise UsageError(ConfigError(where="dataset", rule=rule, fix=fix))
    matrices: dict[str, SmallMatrix] = {}

    def visit(name: str, weight_OI: Any, hessian_II: Any) -> Any:
        if isinstance(selected, SpQROptions):
            matrices[name] = spqr_quantize(weight_OI, hessian_II, selected)
        else:
            matrices[name] = low_rank_residual(weight_OI, hessian_II, selected)
        return matrices[name].dequantize()

    visit_layers(model, layers, calibration=calibration, batch_size=batch_size, visit=visit)
    return SmallFormatModel(model=model, matrices={name: matrices[name] for name in layers})
