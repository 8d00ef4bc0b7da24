"""SpQR: low-bit codes in small groups whose scales are codes too, and the few weights that matter most in 16 bit.

Own implementation of arXiv 2306.03078 (algorithm 1). Shapes: O output channels, I input channels, G groups of input
channels, B blocks of output channels that share a second-level scale, C input channels of one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, UsageError
from .bit_packing import SparseRows, pack_bits, packed_size, sparse_rows, unpack_bits
from .hessians import ErrorFeedback, check_matrix, inverse_factor

if TYPE_CHECKING:
    import torch

# A group of equal weights has no range; its scale stays above zero, so that no code becomes NaN.
_SMALLEST_RANGE = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True)
class SpQRMatrix:
    """A matrix [O, I] as SpQR stores it; `dequantize` says how to read it."""

    shape: tuple[int, int]
    """Output and input channels."""
    bits: int
    """Bits of a weight's code."""
    group_size: int
    """Neighbouring input channels that share scale and zero; the last group may have fewer."""
    scale_bits: int
    """Bits of the code of a scale, and of a zero."""
    scale_group_size: int
    """Neighbouring output channels whose scales share the second level; the last block may have fewer."""
    dtype: torch.dtype
    """Type of the dense matrix."""
    codes: torch.Tensor
    """Codes of the weights, packed, row by row."""
    scale_codes: torch.Tensor
    """Codes of the scales, packed, [O, G] row by row."""
    zero_codes: torch.Tensor
    """Codes of the zeros, packed, [O, G] row by row."""
    levels: torch.Tensor
    """Lowest scale, step of scales, lowest zero, step of zeros: [4, B, G] in bf16."""
    outliers: SparseRows
    """Weights in 16 bit, which take the place of what the codes say."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def bits_per_weight(self) -> float:
        """All stored bits over the number of weights."""
        return 8 * self.stored_bytes / (self.shape[0] * self.shape[1])

    @property
    def outlier_fraction(self) -> float:
        """Share of weights that are kept in 16 bit."""
        return self.outliers.count / (self.shape[0] * self.shape[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what is stored, by name."""
        return {
            "spqr_codes": self.codes,
            "spqr_scale_codes": self.scale_codes,
            "spqr_zero_codes": self.zero_codes,
            "spqr_levels": self.levels,
            "spqr_outlier_offsets": self.outliers.offsets,
            "spqr_outlier_columns": self.outliers.columns,
            "spqr_outlier_values": self.outliers.values,
        }

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that follow from the settings; those of outliers follow from their number."""
        rows, columns = self.shape
        groups, blocks = -(-columns // self.group_size), -(-rows // self.scale_group_size)
        return {
            "spqr_codes": (packed_size(rows * columns, self.bits),),
            "spqr_scale_codes": (packed_size(rows * groups, self.scale_bits),),
            "spqr_zero_codes": (packed_size(rows * groups, self.scale_bits),),
            "spqr_levels": (4, blocks, groups),
            "spqr_outlier_offsets": (rows + 1,),
        }

    def weight_codes(self) -> torch.Tensor:
        """Return the codes of the weights, uint8 [O, I]."""
        return unpack_bits(self.codes, self.bits, self.shape[0] * self.shape[1]).view(self.shape)

    def scales_and_zeros(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero of every group, fp32 [O, G]."""
        rows, groups = self.shape[0], self.levels.shape[2]
        found = []
        for packed, low_BG, step_BG in (
            (self.scale_codes, self.levels[0], self.levels[1]),
            (self.zero_codes, self.levels[2], self.levels[3]),
        ):
            codes_OG = unpack_bits(packed, self.scale_bits, rows * groups).view(rows, groups)
            found.append(_from_level(codes_OG, low_BG, step_BG, self.scale_group_size))
        return found[0], found[1]

    def dequantize(self) -> torch.Tensor:
        """Return the dense matrix: `scale·(code - zero)` in fp32, then the outliers, as `dtype`."""
        import torch

        scale_OG, zero_OG = self.scales_and_zeros()
        group_I = torch.arange(self.shape[1], device=self.codes.device) // self.group_size
        codes_OI = self.weight_codes().float()
        dense_OI = (scale_OG[:, group_I] * (codes_OI - zero_OG[:, group_I])).to(self.dtype)
        rows, columns = self.outliers.positions()
        dense_OI[rows, columns] = self.outliers.values.to(self.dtype)
        return dense_OI


@dataclass(frozen=True, kw_only=True, slots=True)
class SpQROptions:
    """Settings of SpQR; the defaults are the paper's."""

    bits: int = 3
    """Bits of a weight's code, 2 to 8."""
    group_size: int = 16
    """Input channels that share scale and zero."""
    scale_bits: int = 3
    """Bits of the code of a scale, 2 to 8."""
    scale_group_size: int = 16
    """Output channels whose scales share the second level."""
    outlier_threshold: float | None = 0.2
    """A weight is an outlier when rounding it costs over this share of what losing an average weight costs; `None`
    keeps none."""
    outlier_fraction: float | None = None
    """Share of weights to keep about; when given, the threshold is found from it."""
    dampening: float = 0.01
    """Share of the mean diagonal that is added to the Hessian's."""

    def faults(self) -> list[Fault]:
        """Return the settings out of range."""
        found = []
        for name in ("bits", "scale_bits"):
            if not 2 <= getattr(self, name) <= 8:
                found.append(Fault(where=name, value=getattr(self, name), rule="must be 2 to 8"))
        for name in ("group_size", "scale_group_size"):
            if getattr(self, name) < 1:
                found.append(Fault(where=name, value=getattr(self, name), rule="must be 1 or more"))
        if self.outlier_threshold is not None and not self.outlier_threshold > 0:
            fix = "null keeps no outliers"
            found.append(Fault(where="outlier_threshold", value=self.outlier_threshold, rule="must be over 0", fix=fix))
        if self.outlier_fraction is not None and not 0 <= self.outlier_fraction < 1:
            found.append(
                Fault(where="outlier_fraction", value=self.outlier_fraction, rule="must be 0 or more, under 1")
            )
        if not 0 <= self.dampening <= 1:
            found.append(Fault(where="dampening", value=self.dampening, rule="must be 0 to 1"))
        return found


def spqr_quantize(
    weight_OI: torch.Tensor, hessian_II: torch.Tensor | None, options: SpQROptions | None = None
) -> SpQRMatrix:
    """Quantize a matrix by SpQR.

    Group after group: fit scale and zero without the weights whose absence helps their group most, store scale and
    zero as codes, round column by column, keep in 16 bit what still errs more than the threshold, and spread every
    column's error over the columns that follow.

    Args:
        weight_OI: Weights, of any floating type.
        hessian_II: Mean of `x xᵀ` over the layer's inputs; the identity when `None`.
        options: Settings; the paper's by default.

    Raises:
        UsageError: options out of range.
        RefusedInputError: NaN or infinity, or a Hessian of another shape.
    """
    import torch

    options = options or SpQROptions()
    if faults := options.faults():
        raise UsageError(faults)
    check_matrix(weight_OI, hessian_II)
    weight_OI = weight_OI.detach()
    size = weight_OI.shape[1]
    if hessian_II is None:
        upper_II = torch.eye(size, device=weight_OI.device)
    else:
        hessian_II = hessian_II.to(weight_OI.device)
        weight_OI = weight_OI.masked_fill(hessian_II.diagonal() <= 0, 0)
        upper_II = inverse_factor(hessian_II, options.dampening)
    return _Quantization(weight_OI, upper_II, options).run()


class _Quantization:
    """The state of one matrix while its columns are rounded."""

    def __init__(self, weight_OI: torch.Tensor, upper_II: torch.Tensor, options: SpQROptions) -> None:
        import torch

        self.options, self.dtype, self.shape = options, weight_OI.dtype, (weight_OI.shape[0], weight_OI.shape[1])
        self.kept_dtype = torch.float16 if weight_OI.dtype == torch.float16 else torch.bfloat16
        self.feedback = ErrorFeedback(weight_OI, upper_II)
        self.cost_I = upper_II.diagonal().square().reciprocal()
        self.threshold = self._threshold(weight_OI)

    def run(self) -> SpQRMatrix:
        import torch

        options, (rows, size) = self.options, self.shape
        codes_IO = torch.empty(size, rows, dtype=torch.uint8, device=self.cost_I.device)
        mask_IO = torch.zeros_like(codes_IO, dtype=torch.bool)
        scale_codes, zero_codes, levels = [], [], []
        scale_O = zero_O = self.cost_I
        for column in self.feedback.columns():
            if column % options.group_size == 0:
                columns = range(column, min(column + options.group_size, size))
                scale, zero = self._fit(self.feedback.look_ahead(columns), columns)
                scale_O, zero_O = scale[0], zero[0]
                scale_codes.append(scale[1])
                zero_codes.append(zero[1])
                levels.append(torch.stack([scale[2], scale[3], zero[2], zero[3]]))
            weight_O = self.feedback.weight_IO[column]
            codes_O = _round(weight_O, scale_O, zero_O, options.bits)
            stored_O = (scale_O * (codes_O - zero_O)).to(self.dtype).float()
            if self.threshold is not None:
                mask_O = (weight_O - stored_O).square() * self.cost_I[column] > self.threshold
                mask_IO[column] = mask_O
                stored_O = torch.where(mask_O, weight_O.to(self.kept_dtype).float(), stored_O)
            codes_IO[column] = codes_O.to(torch.uint8)
            self.feedback.settle(column, stored_O)
        return SpQRMatrix(
            shape=self.shape,
            bits=options.bits,
            group_size=options.group_size,
            scale_bits=options.scale_bits,
            scale_group_size=options.scale_group_size,
            dtype=self.dtype,
            codes=pack_bits(codes_IO.t(), options.bits),
            scale_codes=pack_bits(torch.stack(scale_codes, dim=1), options.scale_bits),
            zero_codes=pack_bits(torch.stack(zero_codes, dim=1), options.scale_bits),
            levels=torch.stack(levels, dim=2),
            outliers=sparse_rows(self.feedback.weight_IO.t(), mask_IO.t(), self.kept_dtype),
        )

    def _threshold(self, weight_OI: torch.Tensor) -> float | None:
        """Return the cost of an error from which on a weight is kept."""
        options = self.options
        if options.outlier_fraction is not None:
            return self._threshold_of_fraction(weight_OI, options.outlier_fraction)
        if options.outlier_threshold is None:
            return None
        variance_I = weight_OI.float().var(dim=0, correction=0)
        return options.outlier_threshold * float((variance_I * self.cost_I).mean())

    def _threshold_of_fraction(self, weight_OI: torch.Tensor, fraction: float) -> float | None:
        """Return the cost that this share of weights exceeds when each is rounded in its own group, uncorrected."""
        import torch

        count = int(fraction * weight_OI.numel())
        if count == 0:
            return None
        weight_IO, size = weight_OI.t().float(), self.shape[1]
        costs = []
        for start in range(0, size, self.options.group_size):
            columns = range(start, min(start + self.options.group_size, size))
            costs.append(self._removal_gain(weight_IO[start : columns.stop], columns).flatten())
        return float(torch.cat(costs).kthvalue(weight_OI.numel() - count).values)

    def _fit(self, weight_CO: torch.Tensor, columns: range) -> tuple[Any, Any]:
        """Return scales and zeros of a group as stored, with their codes and levels."""
        low_O, high_O = _range(weight_CO, None)
        if self.threshold is not None:
            likely_CO = self._removal_gain(weight_CO, columns) > self.threshold
            low_O, high_O = _range(weight_CO, likely_CO)
        options = self.options
        scale_O, zero_O = _scale_and_zero(low_O, high_O, options.bits)
        scale = _to_level(scale_O, options.scale_bits, options.scale_group_size)
        # Zeros are counted in steps of the scale, so they are found again for the scale as it is stored.
        zero_O = (-low_O / scale[0]).clamp(0, 2**options.bits - 1)
        return scale, _to_level(zero_O, options.scale_bits, options.scale_group_size)

    def _removal_gain(self, weight_CO: torch.Tensor, columns: range) -> torch.Tensor:
        """Return by how much the group's cost falls when a weight is taken out of it, [C, O]."""
        import torch

        cost_C = self.cost_I[columns.start : columns.stop].unsqueeze(1)
        bits = self.options.bits
        error_CO = _rounding_error(weight_CO, *_range(weight_CO, None), bits) * cost_C
        gain_CO = torch.empty_like(weight_CO)
        all_O = error_CO.sum(dim=0)
        taken_CO = torch.zeros_like(weight_CO, dtype=torch.bool)
        for index in range(len(weight_CO)):
            taken_CO[index] = True
            without_CO = _rounding_error(weight_CO, *_range(weight_CO, taken_CO), bits) * cost_C
            gain_CO[index] = all_O - (without_CO.sum(dim=0) - without_CO[index])
            taken_CO[index] = False
        return gain_CO


def _range(weight_CO: torch.Tensor, left_out_CO: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lowest and highest weight of each output channel, with 0 between them."""
    if left_out_CO is not None:
        weight_CO = weight_CO.masked_fill(left_out_CO, 0)
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


def _to_level(
    value_O: torch.Tensor, bits: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values as stored, their codes, and lowest value and step of each block of output channels."""
    import torch

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
    import torch

    block_O = torch.arange(codes_OG.shape[0], device=codes_OG.device) // block
    return low_BG.float()[block_O] + step_BG.float()[block_O] * codes_OG.float()
