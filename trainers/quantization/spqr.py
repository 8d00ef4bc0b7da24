"""SpQR and low-rank correction of a whole model, one decoder layer at a time, and what they write."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ...ds_configs.quantization.scheme import QuantizationScheme
from ...ds_configs.specs.errors import Fault, UsageError
from ...plugins.transformers.quantized_model import ReportProgress
from ..formats.low_rank_residual import LowRankOptions, low_rank_residual
from ..formats.spqr_format import SMALL_DIRECTORY, SmallMatrix, save_small_format
from ..formats.spqr_matrix import SpQROptions, spqr_quantize

_FROM_SCHEME = ("bits", "group_size", "symmetric")

Options = TypeVar("Options", SpQROptions, LowRankOptions)


@dataclass(kw_only=True)
class SmallFormatModel:
    """A model with dense weights in memory that stand for its quantized matrices."""

    model: Any
    """Transformers model; its weights are the matrices' dense form."""
    matrices: Mapping[str, SmallMatrix]
    """Quantized matrices by module name."""

    @property
    def quantized_layers(self) -> tuple[str, ...]:
        """Names of the layers that were quantized."""
        return tuple(self.matrices)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of all quantized matrices over the number of their weights."""
        weights = sum(matrix.shape[0] * matrix.shape[1] for matrix in self.matrices.values())
        return 8 * sum(matrix.stored_bytes for matrix in self.matrices.values()) / weights

    def save(self, directory: Path) -> None:
        """Write dense weights that Transformers and vLLM load, and the small format in `small/`."""
        self.model.save_pretrained(directory)
        save_small_format(self.model, self.matrices, Path(directory) / SMALL_DIRECTORY)


def quantize_with_spqr(
    model: Any,
    tokenizer: Any,
    scheme: QuantizationScheme,
    *,
    layers: Sequence[str],
    calibration: Sequence[Mapping[str, Sequence[int]]],
    batch_size: int,
    options: Mapping[str, Any],
    journal: Path | None,
    report: ReportProgress,
    run_key: str = "",
) -> SmallFormatModel:
    """Quantize linear layers of a model by SpQR, in place.

    Bits come from the scheme, the group size too where it is not the scheme's 128, which is no group size for SpQR.

    Args:
        model: Transformers model with dense weights.
        tokenizer: May be `None`; samples are tokens.
        scheme: Bits and group size.
        layers: Plain linear layers to quantize, by name.
        calibration: Samples with `input_ids`.
        batch_size: Samples of one forward pass.
        options: Fields of `SpQROptions`.
        journal: Directory for finished layers of an interrupted run.
        report: Told about every part of the model.
        run_key: Names model and settings, so that another run's journal is told apart.

    Raises:
        UsageError: unknown options, values out of range, or no samples.
        RefusedInputError: weights or inputs hold NaN or infinity.
    """
    stated = {"bits": scheme.weights.bits}
    if scheme.weights.group_size not in (None, 128):
        stated["group_size"] = scheme.weights.group_size
    chosen = _options(SpQROptions, stated, options)
    run = _Run(model, tokenizer, scheme, layers, "spqr", calibration, batch_size, asdict(chosen), journal, run_key)
    return run.start(lambda weight_OI, hessian_II: spqr_quantize(weight_OI, hessian_II, chosen), report)


def quantize_with_low_rank(
    model: Any,
    tokenizer: Any,
    scheme: QuantizationScheme,
    *,
    layers: Sequence[str],
    calibration: Sequence[Mapping[str, Sequence[int]]],
    batch_size: int,
    options: Mapping[str, Any],
    journal: Path | None,
    report: ReportProgress,
    run_key: str = "",
) -> SmallFormatModel:
    """Quantize as `quantize_with_spqr` does, with `options` of `LowRankOptions`; all of the scheme's weights apply."""
    weights = scheme.weights
    group_size = weights.group_size if weights.strategy == "group" else -1
    stated = {"bits": weights.bits, "group_size": group_size, "symmetric": weights.symmetric}
    chosen = _options(LowRankOptions, stated, options)
    run = _Run(model, tokenizer, scheme, layers, "low-rank", calibration, batch_size, asdict(chosen), journal, run_key)
    return run.start(lambda weight_OI, hessian_II: low_rank_residual(weight_OI, hessian_II, chosen), report)


@dataclass(frozen=True, slots=True)
class _Run:
    model: Any
    tokenizer: Any
    scheme: QuantizationScheme
    layers: Sequence[str]
    method: str
    calibration: Sequence[Mapping[str, Sequence[int]]]
    batch_size: int
    options: Mapping[str, Any]
    journal: Path | None
    run_key: str

    def start(self, quantize: Callable[[Any, Any], SmallMatrix], report: ReportProgress) -> SmallFormatModel:
        """Visit all layers and return the model."""
        from ...plugins.llm_compressor.layer_visits import visit_layers
        from .journal import MatrixJournal

        if not self.calibration:
            rule, fix = f"{self.method} needs text to calibrate on", "name one with --dataset, such as python-help"
            raise UsageError(Fault(where="dataset", rule=rule, fix=fix))
        kept = MatrixJournal(self.journal, self._identity() if self.journal is not None else {})
        matrices = dict(kept.restored)
        for name, matrix in matrices.items():
            weight = self.model.get_submodule(name).weight
            weight.data = matrix.dequantize().to(weight.device)

        def visit(name: str, weight_OI: Any, hessian_II: Any) -> Any:
            matrices[name] = quantize(weight_OI, hessian_II)
            kept.add(name, matrices[name])
            return matrices[name].dequantize()

        visit_layers(
            self.model,
            self.tokenizer,
            self.layers,
            calibration=self.calibration,
            batch_size=self.batch_size,
            visit=visit,
            finish_part=kept.finish_part,
            finished_parts=kept.parts,
            report=report,
        )
        return SmallFormatModel(model=self.model, matrices={name: matrices[name] for name in self.layers})

    def _identity(self) -> dict[str, str]:
        from ...plugins.llm_compressor.journal import run_identity

        return run_identity(
            run_key=self.run_key,
            scheme=self.scheme,
            method=self.method,
            method_options=self.options,
            calibration=self.calibration,
            batch_size=self.batch_size,
            seed=0,
        )


def _options(kind: type[Options], stated: Mapping[str, Any], options: Mapping[str, Any]) -> Options:
    known = {field.name for field in fields(kind)}
    faults = []
    for name in options:
        if name in _FROM_SCHEME:
            rule, fix = "is said by the scheme", "use --scheme, --group-size or symmetric"
            faults.append(Fault(where=f"method_options.{name}", value=options[name], rule=rule, fix=fix))
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known - set(_FROM_SCHEME)))}"
            faults.append(Fault(where="method_options", value=name, rule="is no option of this method", fix=fix))
        elif isinstance(options[name], bool) or not isinstance(options[name], int | float | None):
            rule = "must be a number"
            faults.append(Fault(where=f"method_options.{name}", value=options[name], rule=rule))
    if faults:
        raise UsageError(faults)
    try:
        chosen = kind(**{**stated, **options})
        faults = chosen.faults()
    except TypeError as error:
        faults = [Fault(where="method_options", value=dict(options), rule=f"do not fit ({error})")]
    if faults:
        raise UsageError(faults)
    return chosen
