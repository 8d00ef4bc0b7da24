"""SpQR and low-rank correction: matrices in low-bit codes, and the small safetensors format that stores them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field

from ...ds_configs.plan.output import write_files
from ...ds_configs.specs.errors import ConfigError, RefusedInputError
from ...ds_configs.specs.settings import Settings, settings_of
from ...plugins.safetensors import SHARD_BYTES, appearing_directory, each_tensor, read_checkpoint, save_checkpoint
from ...plugins.transformers.loading import auto_class, loading_errors

# While packed, a code takes a byte per bit. A multiple of 8, so that each block ends at a byte.
_BLOCK_CODES = 1 << 20


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes 0 to 2^bits - 1 as one stream of bits, uint8: code i starts at bit `i·bits`, lowest bit first.

    >>> pack_bits(torch.tensor([1, 2, 3]), 3).tolist()
    [209, 0]
    """
    import numpy

    flat_N, blocks = codes.reshape(-1).to("cpu", torch.uint8).numpy(), []
    for start in range(0, len(flat_N), _BLOCK_CODES):
        digits = numpy.unpackbits(flat_N[start : start + _BLOCK_CODES, None], axis=1, bitorder="little")
        blocks.append(numpy.packbits(digits[:, :bits], bitorder="little"))
    return torch.from_numpy(numpy.concatenate([flat_N[:0], *blocks])).to(codes.device)


def unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the first `count` codes of a stream of bits as uint8."""
    import numpy

    bytes_N, size, blocks = packed.cpu().numpy(), _BLOCK_CODES * bits // 8, []
    for start in range(0, len(bytes_N), size):
        digits = numpy.unpackbits(bytes_N[start : start + size], bitorder="little")
        codes = digits[: len(digits) // bits * bits].reshape(-1, bits)
        blocks.append(numpy.packbits(codes, axis=1, bitorder="little")[:, 0])
    return torch.from_numpy(numpy.concatenate([bytes_N[:0], *blocks])[:count]).to(packed.device)


def damaged(where: str, rule: str) -> RefusedInputError:
    """Return the error of a file that does not contain what quantization wrote."""
    return RefusedInputError(ConfigError(where=where, rule=rule, fix="quantize the model again"))


_FEWEST_COLUMNS = 128
"""Smallest number of columns between two updates of all later columns; it affects results only by rounding."""


def weighted_error(difference_OI: torch.Tensor, hessian_II: torch.Tensor | None) -> float:
    """Return `trace(D H Dᵀ)`, the squared error of a layer's outputs; without a Hessian the squared difference."""
    difference_OI = difference_OI.double()
    if hessian_II is None:
        return float(difference_OI.square().sum())
    return float(((difference_OI @ hessian_II.double()) * difference_OI).sum())


def check_matrix(weight_OI: torch.Tensor, hessian_II: torch.Tensor | None) -> None:
    """Check a matrix before quantization.

    Raises:
        RefusedInputError: not two-dimensional, empty, NaN or infinite, or a Hessian of another shape.
    """
    errors, size = [], weight_OI.shape[-1]
    if weight_OI.ndim != 2 or not weight_OI.numel():
        rule = "must be a matrix that is not empty"
        errors.append(ConfigError(where="weight", value=tuple(weight_OI.shape), rule=rule))
    elif not bool(weight_OI.isfinite().all()):
        rule, fix = "contains NaN or infinity", "train it again, or download an intact copy"
        errors.append(ConfigError(where="weight", rule=rule, fix=fix))
    if hessian_II is not None and tuple(hessian_II.shape) != (size, size):
        errors.append(ConfigError(where="Hessian", value=tuple(hessian_II.shape), rule=f"must be [{size}, {size}]"))
    elif hessian_II is not None and not bool(hessian_II.isfinite().all()):
        rule, fix = "contains NaN or infinity: the layer's inputs overflow", "load the model in bf16 or fp32"
        errors.append(ConfigError(where="Hessian", rule=rule, fix=fix))
    if errors:
        raise RefusedInputError(errors)


def inverse_factor(hessian_II: torch.Tensor, dampening: float) -> torch.Tensor:
    """Return the upper triangular U with `(H + λ)⁻¹ = Uᵀ U`, where H has 1 for channels that are always zero.

    λ is `dampening` times the mean diagonal, and is multiplied by 10 until the factor exists. Row j of U is the
    correction of columns after j for an error of `U[j, j]` in column j (GPTQ, arXiv 2210.17323, section 3.3).
    """
    hessian_II = hessian_II.float().clone()
    diagonal_I = hessian_II.diagonal()
    diagonal_I[diagonal_I <= 0] = 1.0
    while True:
        damped_II = hessian_II.clone()
        damped_II.diagonal().add_(dampening * diagonal_I.mean())
        factor_II, failed = torch.linalg.cholesky_ex(damped_II)
        if not int(failed):
            upper_II, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor_II), upper=True)
            if not int(failed):
                return upper_II
        # From here on the inverse is close to that of the diagonal.
        if dampening >= 1:
            return torch.diag(diagonal_I.rsqrt())
        dampening = max(10 * dampening, 1e-4)


class ErrorFeedback:
    """Iterates over the columns of a weight, and distributes each column's error over later columns, as in GPTQ."""

    def __init__(self, weight_OI: torch.Tensor, upper_II: torch.Tensor, *, group_size: int = 1) -> None:
        self.weight_IO = weight_OI.t().float().contiguous()
        self.upper_II = upper_II
        # Whole groups, so that all columns of a group have the same corrections when its first one is visited.
        self._size = -(-_FEWEST_COLUMNS // group_size) * group_size
        self._errors_CO = torch.zeros_like(self.weight_IO[: self._size])

    def columns(self) -> Iterator[int]:
        """Yield each column in turn; call `settle` for it before the next."""
        count = len(self.weight_IO)
        for start in range(0, count, self._size):
            end = min(start + self._size, count)
            self._start, self._end = start, end
            yield from range(start, end)
            errors_CO = self._errors_CO[: end - start]
            self.weight_IO[end:].addmm_(self.upper_II[start:end, end:].t(), errors_CO, alpha=-1)

    def settle(self, column: int, stored_O: torch.Tensor) -> None:
        """Set the stored values of a column, and correct later columns for the difference."""
        error_O = (self.weight_IO[column] - stored_O) / self.upper_II[column, column]
        self._errors_CO[column - self._start] = error_O
        later = slice(column + 1, self._end)
        self.weight_IO[later].addr_(self.upper_II[column, later], error_O, alpha=-1)
        self.weight_IO[column] = stored_O


# A group of equal weights has no range: a scale above zero avoids codes that are NaN.
_SMALLEST_RANGE = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True)
class _PackedMatrix:
    """What the matrices of both methods have in common: tensors, and settings that are stored as JSON."""

    kind: ClassVar[str]
    prefix: ClassVar[str]
    """Start of the names of stored tensors."""
    shape: tuple[int, int]
    """Output and input channels."""
    bits: int
    """Bits of a weight's code."""
    group_size: int
    """Consecutive input channels that share a scale; the last group may have fewer."""
    dtype: torch.dtype
    """Dtype of the dense matrix."""
    codes: torch.Tensor
    """Codes of the weights, packed, row by row."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the stored tensors by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {f"{self.prefix}{name}": value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def settings(self) -> dict[str, Any]:
        """Return the JSON settings that `read_weight` needs."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        numbers = {name: value for name, value in values.items() if isinstance(value, int)}
        return {"kind": self.kind, "shape": self.shape, "dtype": str(self.dtype).removeprefix("torch."), **numbers}

    def values(self, scale_OG: torch.Tensor, zero_OG: torch.Tensor) -> torch.Tensor:
        """Return `scale·(code - zero)` in fp32 [O, I]."""
        group_I = torch.arange(self.shape[1], device=self.codes.device) // self.group_size
        codes_OI = unpack_bits(self.codes, self.bits, self.shape[0] * self.shape[1]).view(self.shape)
        return scale_OG[:, group_I] * (codes_OI.float() - zero_OG[:, group_I])


@dataclass(frozen=True, kw_only=True, slots=True)
class SpQRMatrix(_PackedMatrix):
    """A matrix [O, I] in the form that SpQR stores."""

    kind: ClassVar[str] = "spqr"
    prefix: ClassVar[str] = "spqr_"
    scale_bits: int
    """Bits of the code of a scale or a zero."""
    scale_group_size: int
    """Consecutive output channels whose scales share the second level; the last block may have fewer."""
    scale_codes: torch.Tensor
    """Codes of the scales, packed, [O, G] row by row."""
    zero_codes: torch.Tensor
    """Codes of the zeros, packed, [O, G] row by row."""
    levels: torch.Tensor
    """Lowest scale, step of scales, lowest zero, step of zeros: [4, B, G] in bf16."""
    outlier_offsets: torch.Tensor
    """Start of each row's outliers, int32 [O + 1]; the last is their number."""
    outlier_columns: torch.Tensor
    """Column of each outlier: int16 read as unsigned (up to 65,536 columns), else int32."""
    outlier_values: torch.Tensor
    """Weights in 16 bit, which replace the values of their codes."""

    def outlier_positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows and columns of all outliers, int64."""
        offsets, columns = self.outlier_offsets.long(), self.outlier_columns.long()
        rows = torch.repeat_interleave(torch.arange(offsets.numel() - 1, device=offsets.device), offsets.diff())
        return rows, columns & 0xFFFF if self.outlier_columns.dtype == torch.int16 else columns

    def dequantize(self) -> torch.Tensor:
        """Return the dense matrix: `scale·(code - zero)` in fp32, then the outliers, converted to `dtype`."""
        rows, groups = self.shape[0], self.levels.shape[2]

        def values(packed: torch.Tensor, low_BG: torch.Tensor, step_BG: torch.Tensor) -> torch.Tensor:
            codes_OG = unpack_bits(packed, self.scale_bits, rows * groups).view(rows, groups)
            return _from_level(codes_OG, low_BG, step_BG, self.scale_group_size)

        scale_OG, zero_OG = values(self.scale_codes, *self.levels[:2]), values(self.zero_codes, *self.levels[2:])
        dense_OI = self.values(scale_OG, zero_OG).to(self.dtype)
        dense_OI[self.outlier_positions()] = self.outlier_values.to(self.dtype)
        return dense_OI


class SpQROptions(Settings):
    """Settings of SpQR; defaults are those of the paper."""

    bits: int = Field(3, ge=2, le=8, description="Bits of a weight's code")
    group_size: int = Field(16, ge=1, description="Input channels that share scale and zero")
    scale_bits: int = Field(3, ge=2, le=8, description="Bits of the code of a scale")
    scale_group_size: int = Field(16, ge=1, description="Output channels whose scales share the second level")
    outlier_threshold: float | None = Field(
        0.2, gt=0, description="Cost of a rounding error, relative to removing an average weight, from which on a "
        "weight is an outlier; null for no outliers"
    )  # fmt: skip
    dampening: float = Field(0.01, ge=0, le=1, description="Fraction of the Hessian's mean diagonal to add to it")


def spqr_quantize(
    weight_OI: torch.Tensor, hessian_II: torch.Tensor | None, options: SpQROptions | None = None
) -> SpQRMatrix:
    """Quantize a matrix by SpQR.

    For each group: fit scale and zero without the weights whose removal reduces the group's error most, and store scale
    and zero as codes. Then round column by column, store weights whose error exceeds the threshold in 16 bit, and
    distribute each column's error over the columns after it.

    Args:
        weight_OI: Weights, of any floating dtype.
        hessian_II: Mean of `x xᵀ` over the layer's inputs; `None`: the identity.
        options: Settings; default: those of the paper.

    Raises:
        RefusedInputError: NaN or infinity, or a Hessian of another shape.
    """
    options = options or settings_of(SpQROptions, {})
    check_matrix(weight_OI, hessian_II)
    weight_OI, dtype, (rows, size) = weight_OI.detach(), weight_OI.dtype, weight_OI.shape
    if hessian_II is None:
        upper_II = torch.eye(size, device=weight_OI.device)
    else:
        hessian_II = hessian_II.to(weight_OI.device)
        weight_OI = weight_OI.masked_fill(hessian_II.diagonal() <= 0, 0)
        upper_II = inverse_factor(hessian_II, options.dampening)
    stored_dtype = torch.float16 if dtype == torch.float16 else torch.bfloat16
    feedback = ErrorFeedback(weight_OI, upper_II, group_size=options.group_size)
    cost_I = upper_II.diagonal().square().reciprocal()
    # Cost of a rounding error from which a weight is an outlier.
    threshold = float("inf")
    if options.outlier_threshold is not None:
        threshold = options.outlier_threshold * float((weight_OI.float().var(dim=0, correction=0) * cost_I).mean())
    codes_IO = torch.empty(size, rows, dtype=torch.uint8, device=cost_I.device)
    mask_IO = torch.zeros_like(codes_IO, dtype=torch.bool)
    scale_codes, zero_codes, levels = [], [], []
    scale_O = zero_O = cost_I
    for column in feedback.columns():
        if column % options.group_size == 0:
            group = slice(column, min(column + options.group_size, size))
            weight_CO, likely_CO = feedback.weight_IO[group], None
            if options.outlier_threshold is not None:
                likely_CO = _removal_gain(weight_CO, cost_I[group], options.bits) > threshold
            low_O, high_O = _range(weight_CO, likely_CO)
            scale_O, _ = _scale_and_zero(low_O, high_O, options.bits)
            scale_O, *scale = _to_level(scale_O, options.scale_bits, options.scale_group_size)
            # Zeros are multiples of the scale, so they depend on its stored value.
            zero_O = (-low_O / scale_O).clamp(0, 2**options.bits - 1)
            zero_O, *zero = _to_level(zero_O, options.scale_bits, options.scale_group_size)
            scale_codes.append(scale[0])
            zero_codes.append(zero[0])
            levels.append(torch.stack([*scale[1:], *zero[1:]]))
        weight_O = feedback.weight_IO[column]
        codes_O = _round(weight_O, scale_O, zero_O, options.bits)
        stored_O = (scale_O * (codes_O - zero_O)).to(dtype).float()
        mask_IO[column] = (weight_O - stored_O).square() * cost_I[column] > threshold
        stored_O = torch.where(mask_IO[column], weight_O.to(stored_dtype).float(), stored_O)
        codes_IO[column] = codes_O.to(torch.uint8)
        feedback.settle(column, stored_O)
    rows_N, columns_N = mask_IO.t().nonzero(as_tuple=True)
    counts_O = torch.bincount(rows_N, minlength=rows)
    return SpQRMatrix(
        shape=(rows, size),
        bits=options.bits,
        group_size=options.group_size,
        scale_bits=options.scale_bits,
        scale_group_size=options.scale_group_size,
        dtype=dtype,
        codes=pack_bits(codes_IO.t(), options.bits),
        scale_codes=pack_bits(torch.stack(scale_codes, dim=1), options.scale_bits),
        zero_codes=pack_bits(torch.stack(zero_codes, dim=1), options.scale_bits),
        levels=torch.stack(levels, dim=2),
        outlier_offsets=torch.nn.functional.pad(counts_O.cumsum(0), (1, 0)).int(),
        outlier_columns=stored_columns(columns_N, size),
        outlier_values=feedback.weight_IO.t()[rows_N, columns_N].to(stored_dtype),
    )


def _removal_gain(weight_CO: torch.Tensor, cost_C: torch.Tensor, bits: int) -> torch.Tensor:
    """Return by how much the cost of a group decreases if a weight is removed from it, [C, O]."""
    cost_C1, gain_CO = cost_C.unsqueeze(1), torch.empty_like(weight_CO)
    all_O = (_rounding_error(weight_CO, *_range(weight_CO, None), bits) * cost_C1).sum(dim=0)
    removed_CO = torch.zeros_like(weight_CO, dtype=torch.bool)
    for index in range(len(weight_CO)):
        removed_CO[index] = True
        without_CO = _rounding_error(weight_CO, *_range(weight_CO, removed_CO), bits) * cost_C1
        gain_CO[index] = all_O - (without_CO.sum(dim=0) - without_CO[index])
        removed_CO[index] = False
    return gain_CO


def stored_columns(columns_N: torch.Tensor, width: int) -> torch.Tensor:
    """Return columns as they are stored. In int16, those above 32,767 wrap around and keep their bits."""
    return columns_N.int().to(torch.int16) if width <= 1 << 16 else columns_N.int()


def _range(weight_CO: torch.Tensor, removed_CO: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return minimum and maximum of each output channel, extended to contain 0."""
    if removed_CO is not None:
        weight_CO = weight_CO.masked_fill(removed_CO, 0)
    low_O, high_O = weight_CO.aminmax(dim=0)
    return low_O.clamp(max=0), high_O.clamp(min=0)


def _scale_and_zero(low_O: torch.Tensor, high_O: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    scale_O = (high_O - low_O).clamp(min=_SMALLEST_RANGE) / (2**bits - 1)
    return scale_O, -low_O / scale_O


def _round(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    return (weight / scale + zero).round().clamp(0, 2**bits - 1)


def _rounding_error(weight_CO: torch.Tensor, low_O: torch.Tensor, high_O: torch.Tensor, bits: int) -> torch.Tensor:
    scale_O, zero_O = _scale_and_zero(low_O, high_O, bits)
    return (scale_O * (_round(weight_CO, scale_O, zero_O, bits) - zero_O) - weight_CO).square()


def _to_level(value_O: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, ...]:
    """Quantize scales or zeros of a group; return stored values, codes, and lowest value and step of each block."""
    rows = value_O.numel()
    padded = torch.cat([value_O, value_O[-1:].expand(-rows % block)]).view(-1, block)
    low_B, high_B = padded.aminmax(dim=1)
    step_B = ((high_B - low_B) / (2**bits - 1)).to(torch.bfloat16)
    low_B = low_B.to(torch.bfloat16)
    steps = step_B.float().clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    codes = ((padded - low_B.float().unsqueeze(1)) / steps).round().clamp(0, 2**bits - 1)
    codes_O = codes.flatten()[:rows].to(torch.uint8)
    stored_O = _from_level(codes_O.unsqueeze(1), low_B.unsqueeze(1), step_B.unsqueeze(1), block).squeeze(1)
    return stored_O, codes_O, low_B, step_B


def _from_level(codes_OG: torch.Tensor, low_BG: torch.Tensor, step_BG: torch.Tensor, block: int) -> torch.Tensor:
    block_O = torch.arange(codes_OG.shape[0], device=codes_OG.device) // block
    return low_BG.float()[block_O] + step_BG.float()[block_O] * codes_OG.float()


_EXACT_SVD_SIZE = 512
"""Smaller side up to which all singular values are computed; above, the largest by random projections."""
# Columns in addition to the rank; Halko, Martinsson and Tropp (arXiv:0909.4061) advise at least 5 to 10.
_OVERSAMPLING = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRankMatrix(_PackedMatrix):
    """A matrix [O, I] as a sum of codes Q and a low-rank product L·R."""

    kind: ClassVar[str] = "low-rank"
    prefix: ClassVar[str] = "low_rank_"
    symmetric: bool
    """Without zero points: the code `2^(bits-1)` means 0."""
    scales: torch.Tensor
    """Scales of Q, 16 bit [O, G]."""
    zeros: torch.Tensor
    """Codes that mean 0, packed, [O, G] row by row; empty when symmetric."""
    left: torch.Tensor
    """L, 16 bit [O, K]."""
    right: torch.Tensor
    """R, 16 bit [K, I]."""

    def quantized(self) -> torch.Tensor:
        """Return Q, fp32 [O, I]."""
        zeros_OG = torch.full(self.scales.shape, 2.0 ** (self.bits - 1), device=self.scales.device)
        if not self.symmetric:
            zeros_OG = unpack_bits(self.zeros, self.bits, self.scales.numel()).view(self.scales.shape).float()
        return self.values(self.scales.float(), zeros_OG)

    def dequantize(self) -> torch.Tensor:
        """Return the dense matrix: `Q + L·R` in fp32, converted to `dtype`."""
        return (self.quantized() + self.left.float() @ self.right.float()).to(self.dtype)


class LowRankOptions(Settings):
    """Settings of the low-rank correction."""

    bits: int = Field(4, ge=2, le=8, description="Bits of a code")
    group_size: int = Field(128, ge=-1, description="Input channels that share a scale; -1 for all")
    symmetric: bool = Field(True, description="Without zero points")
    rank: int = Field(16, ge=0, description="Columns of L, limited by the size of the matrix")
    iterations: int = Field(3, ge=1, description="Times that Q and L·R are fitted in turn; the best sum is used")
    dampening: float = Field(0.01, ge=0, le=1, description="Fraction of the Hessian's mean diagonal to add to it")


def low_rank_residual(
    weight_OI: torch.Tensor, hessian_II: torch.Tensor | None, options: LowRankOptions | None = None
) -> LowRankMatrix:
    """Approximate a weight by a sum of codes and a low-rank product.

    Q is rounded to nearest, or with error feedback if there is a Hessian. L·R is the best product of its rank for the
    remaining difference. They are fitted in turn, and the sum with the least `trace(D H Dᵀ)` is returned. Q without a
    correction is a candidate, so a correction never increases the error.

    Raises:
        RefusedInputError: NaN or infinity, or a Hessian of another shape.
    """
    options = options or settings_of(LowRankOptions, {})
    check_matrix(weight_OI, hessian_II)
    fit = _Fit(weight_OI.detach(), hessian_II, options)
    rows, columns = weight_OI.shape
    best = fit.assemble(torch.zeros(rows, 0), torch.zeros(0, columns))
    least, starts = fit.error(best), [best]
    if options.rank:
        # If the weight has large terms of low rank, remove them before rounding: codes would lose precision to them.
        starts.append(fit.assemble(*fit.product(fit.weight_OI)))
    for latest in starts:
        for _ in range(options.iterations):
            left_OK, right_KI = fit.product(fit.weight_OI - latest.quantized())
            corrected = replace(latest, left=left_OK, right=right_KI)
            latest = fit.assemble(left_OK, right_KI)
            for candidate in (corrected, latest):
                if (error := fit.error(candidate)) < least:
                    best, least = candidate, error
    return best


class _Fit:
    """One matrix with the constants of fitting Q and L·R."""

    def __init__(self, weight_OI: torch.Tensor, hessian_II: torch.Tensor | None, options: LowRankOptions) -> None:
        self.options, self.dtype, size = options, weight_OI.dtype, weight_OI.shape[1]
        self.stored_dtype = torch.float16 if weight_OI.dtype == torch.float16 else torch.bfloat16
        self.weight_OI = weight_OI.float()
        self.group_size = size if options.group_size == -1 else min(options.group_size, size)
        self.hessian_II = None if hessian_II is None else hessian_II.to(weight_OI.device).float()
        self.upper_II = None
        if self.hessian_II is not None:
            self.upper_II = inverse_factor(self.hessian_II, options.dampening)

    def error(self, matrix: LowRankMatrix) -> float:
        """Return the error of a candidate after storing and reading it."""
        return weighted_error(matrix.dequantize().float() - self.weight_OI, self.hessian_II)

    def product(self, rest_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the L and R that minimize `‖(rest - L·R)·root‖` for a root of the damped Hessian."""
        rank = min(self.options.rank, *rest_OI.shape)
        if self.upper_II is not None:
            # (UᵀU)⁻¹ = U⁻¹U⁻ᵀ, so U⁻¹ is a root of the damped Hessian.
            rest_OI = torch.linalg.solve_triangular(self.upper_II, rest_OI, upper=True, left=False)
        if min(rest_OI.shape) <= _EXACT_SVD_SIZE:
            left_OK, values_K, right_KI = torch.linalg.svd(rest_OI, full_matrices=False)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                columns = min(rank + _OVERSAMPLING, *rest_OI.shape)
                left_OK, values_K, right_IK = torch.svd_lowrank(rest_OI, q=columns, niter=4)
            right_KI = right_IK.t()
        share_K = values_K[:rank].sqrt()
        left_OK, right_KI = left_OK[:, :rank] * share_K, right_KI[:rank] * share_K.unsqueeze(1)
        if self.upper_II is not None:
            right_KI = right_KI @ self.upper_II
        return left_OK.to(self.stored_dtype), right_KI.to(self.stored_dtype)

    def assemble(self, left_OK: torch.Tensor, right_KI: torch.Tensor) -> LowRankMatrix:
        """Return a candidate: the given product, and codes of the remaining difference.

        Scales are those of the range before error feedback.
        """
        device, options, most = self.weight_OI.device, self.options, 2**self.options.bits - 1
        left_OK, right_KI = left_OK.to(device, self.stored_dtype), right_KI.to(device, self.stored_dtype)
        target_OI = self.weight_OI - left_OK.float() @ right_KI.float()
        groups = target_OI.split(self.group_size, dim=1)
        low_OG = torch.stack([group.amin(dim=1) for group in groups], dim=1).clamp(max=0)
        high_OG = torch.stack([group.amax(dim=1) for group in groups], dim=1).clamp(min=0)
        if options.symmetric:
            high_OG = torch.maximum(-low_OG, high_OG)
            low_OG = -high_OG
        scales_OG = ((high_OG - low_OG).clamp(min=_SMALLEST_RANGE) / most).to(torch.bfloat16)
        zeros_OG = torch.full_like(low_OG, 2 ** (options.bits - 1))
        if not options.symmetric:
            zeros_OG = (-low_OG / scales_OG.float()).round().clamp(0, most)
        group_I = torch.arange(target_OI.shape[1], device=device) // self.group_size
        scale_OI, zero_OI = scales_OG.float()[:, group_I], zeros_OG[:, group_I]
        if self.upper_II is None:
            codes_OI = _round(target_OI, scale_OI, zero_OI, options.bits)
        else:
            codes_OI, feedback = torch.empty_like(target_OI), ErrorFeedback(target_OI, self.upper_II)
            for column in feedback.columns():
                scale_O, zero_O = scale_OI[:, column], zero_OI[:, column]
                codes_O = _round(feedback.weight_IO[column], scale_O, zero_O, options.bits)
                codes_OI[:, column] = codes_O
                feedback.settle(column, scale_O * (codes_O - zero_O))
        return LowRankMatrix(
            shape=(codes_OI.shape[0], codes_OI.shape[1]),
            bits=options.bits,
            group_size=self.group_size,
            symmetric=options.symmetric,
            dtype=self.dtype,
            codes=pack_bits(codes_OI, options.bits),
            scales=scales_OG,
            zeros=pack_bits(zeros_OG[:, :0] if options.symmetric else zeros_OG, options.bits),
            left=left_OK,
            right=right_KI,
        )


QUANT_METHOD = "shardwright_small"
"""Name of the format in `quantization_config` of `config.json`."""
SMALL_DIRECTORY = "small"
"""Directory of the small format in a checkpoint."""
INDEX, SINGLE = "small.safetensors.index.json", "small.safetensors"
"""Index and single file of its weights."""
_CONFIG = "config.json"
_SCHEMA_VERSION = 2
"""Version 1 stored the settings of matrices in a separate file."""
_FLOATS = ("bfloat16", "float16", "float32")

SmallMatrix = SpQRMatrix | LowRankMatrix
"""A quantized matrix of either method."""


def save_small_format(
    model: Any, matrices: Mapping[str, SmallMatrix], directory: Path, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write config, packed matrices and all other tensors of a model; the directory appears only when complete."""
    tensors = {
        f"{layer}.{name}": tensor for layer, matrix in matrices.items() for name, tensor in matrix.tensors().items()
    }
    dense = {f"{layer}.weight" for layer in matrices}
    tied: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if name in dense or (tensor.numel() and key in tied):
            continue
        tied.add(key)
        tensors[name] = tensor
    with appearing_directory(directory) as staging:
        save_checkpoint(tensors, staging, stem="small", shard_bytes=shard_bytes)
        section = {
            "quant_method": QUANT_METHOD,
            "schema_version": _SCHEMA_VERSION,
            "weights": INDEX if (staging / INDEX).exists() else SINGLE,
            "layers": {name: matrix.settings() for name, matrix in matrices.items()},
        }
        config = {**model.config.to_diff_dict(), "quantization_config": section}
        write_files({_CONFIG: json.dumps(config, indent=1) + "\n"}, staging, force=True)


def load_spqr(directory: str | Path) -> Any:
    """Load a model in the small format, with dense weights, from its directory or the one above.

    Raises:
        RefusedInputError: files are missing, damaged or inconsistent.
    """
    import transformers

    directory = Path(directory)
    if (directory / SMALL_DIRECTORY).is_dir():
        directory = directory / SMALL_DIRECTORY
    path = directory / _CONFIG
    try:
        section = json.loads(path.read_bytes()).get("quantization_config") or {}
        is_small = section.get("quant_method") == QUANT_METHOD
    except OSError as error:
        raise RefusedInputError(ConfigError(where=str(path), rule=f"cannot be read ({error.strerror})")) from None
    except (ValueError, AttributeError, RecursionError) as error:
        raise RefusedInputError(ConfigError(where=str(path), rule=f"is not a JSON object ({error!r})")) from None
    if not is_small:
        raise RefusedInputError(ConfigError(where=str(path), rule=f"has no quantization_config of {QUANT_METHOD}"))
    version, layers = section.get("schema_version"), section.get("layers")
    if version != _SCHEMA_VERSION:
        raise damaged(str(path), f"has schema_version {version}; this version reads {_SCHEMA_VERSION}")
    if not isinstance(layers, dict) or not all(isinstance(settings, dict) for settings in layers.values()):
        raise damaged(str(path), "contains no settings of layers")
    config = transformers.AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
    # With it, Transformers would expect packed tensors.
    del config.quantization_config
    tensors = dict(each_tensor(read_checkpoint(directory, index=INDEX, single=SINGLE)))
    for layer, settings in layers.items():
        tensors[f"{layer}.weight"] = read_weight(layer, settings, tensors, where=str(directory))
    # AutoModel requires a directory (transformers 5.17.0); the class of the model accepts tensors in memory.
    kind = auto_class(config)._model_mapping[type(config)]
    model, loading = kind.from_pretrained(
        None, config=config, state_dict=tensors, dtype=config.dtype, output_loading_info=True
    )
    errors = loading_errors(loading, str(directory))
    if unexpected := sorted(loading["unexpected_keys"]):
        errors.append(ConfigError(where=str(directory), value=unexpected[:3], rule="has unexpected tensors"))
    if errors:
        raise RefusedInputError(errors)
    return model.eval()


def read_weight(
    layer: str, settings: Mapping[str, Any], tensors: dict[str, torch.Tensor], *, where: str
) -> torch.Tensor:
    """Remove a layer's packed tensors from `tensors`, and return its dense matrix."""
    kind: type[SmallMatrix] = SpQRMatrix if settings.get("kind") == "spqr" else LowRankMatrix
    names = [name for name in tensors if name.startswith(f"{layer}.{kind.prefix}")]
    parts = {name.removeprefix(f"{layer}.{kind.prefix}"): tensors.pop(name) for name in names}
    try:
        numbers: dict[str, Any] = {
            name: int(value) for name, value in settings.items() if name not in ("kind", "shape", "dtype")
        }
        return kind(
            shape=(int(settings["shape"][0]), int(settings["shape"][1])),
            dtype=getattr(torch, _FLOATS[_FLOATS.index(settings["dtype"])]),
            **numbers,
            **parts,
        ).dequantize()
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, ArithmeticError) as error:
        rule = f"has settings that do not match its tensors ({type(error).__name__}: {error})"
        raise damaged(f"{where}: {layer}", rule) from None
