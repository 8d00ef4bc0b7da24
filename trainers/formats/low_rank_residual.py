"""`W ≈ L·R + Q + S`: low-bit codes, corrected by a product of low rank and by a few single weights in 16 bit.

L and R come from a singular value decomposition of what Q and S leave over, weighted by the inputs' second moments as
in CALDERA (arXiv 2405.18886) and LQER (arXiv 2402.02446). Shapes: O output channels, I input channels, G groups of
input channels, K the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...ds_configs.specs.errors import Fault, UsageError
from .bit_packing import SparseRows, pack_bits, packed_size, sparse_rows, unpack_bits
from .hessians import ErrorFeedback, check_matrix, inverse_factor, weighted_error

if TYPE_CHECKING:
    import torch

# A group of equal weights has no range; its scale stays above zero, so that no code becomes NaN.
_SMALLEST_RANGE = 1e-30
_EXACT_SVD_SIZE = 512
"""Smaller side up to which all singular values are found; above, the largest by random projections."""
# Columns beyond the rank; Halko, Martinsson and Tropp (arXiv:0909.4061) advise at least 5 to 10.
_OVERSAMPLING = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRankMatrix:
    """A matrix [O, I] as a sum of codes, a low-rank product and a sparse matrix."""

    shape: tuple[int, int]
    """Output and input channels."""
    bits: int
    """Bits of a code."""
    group_size: int
    """Neighbouring input channels that share a scale; the last group may have fewer."""
    symmetric: bool
    """Without zero points: the code `2^(bits-1)` means 0."""
    dtype: torch.dtype
    """Type of the dense matrix."""
    codes: torch.Tensor
    """Codes of Q, packed, row by row."""
    scales: torch.Tensor
    """Scales of Q, 16 bit [O, G]."""
    zeros: torch.Tensor
    """Codes that mean 0, packed, [O, G] row by row; empty when symmetric."""
    left: torch.Tensor
    """L, 16 bit [O, K]."""
    right: torch.Tensor
    """R, 16 bit [K, I]."""
    sparse: SparseRows
    """S, which is added."""

    @property
    def rank(self) -> int:
        """K."""
        return int(self.left.shape[1])

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def bits_per_weight(self) -> float:
        """All stored bits over the number of weights."""
        return 8 * self.stored_bytes / (self.shape[0] * self.shape[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what is stored, by name."""
        return {
            "low_rank_codes": self.codes,
            "low_rank_scales": self.scales,
            "low_rank_zeros": self.zeros,
            "low_rank_left": self.left,
            "low_rank_right": self.right,
            "low_rank_sparse_offsets": self.sparse.offsets,
            "low_rank_sparse_columns": self.sparse.columns,
            "low_rank_sparse_values": self.sparse.values,
        }

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that follow from the settings; those of S follow from the number of its elements."""
        rows, columns = self.shape
        groups = -(-columns // self.group_size)
        return {
            "low_rank_codes": (packed_size(rows * columns, self.bits),),
            "low_rank_scales": (rows, groups),
            "low_rank_zeros": (0 if self.symmetric else packed_size(rows * groups, self.bits),),
            "low_rank_left": (rows, self.rank),
            "low_rank_right": (self.rank, columns),
            "low_rank_sparse_offsets": (rows + 1,),
        }

    def quantized(self) -> torch.Tensor:
        """Return Q alone, fp32 [O, I]."""
        import torch

        rows, columns = self.shape
        codes_OI = unpack_bits(self.codes, self.bits, rows * columns).view(rows, columns).float()
        if self.symmetric:
            zeros_OG = torch.full(self.scales.shape, 2.0 ** (self.bits - 1), device=codes_OI.device)
        else:
            zeros_OG = unpack_bits(self.zeros, self.bits, self.scales.numel()).view(self.scales.shape).float()
        group_I = torch.arange(columns, device=codes_OI.device) // self.group_size
        return self.scales.float()[:, group_I] * (codes_OI - zeros_OG[:, group_I])

    def dequantize(self) -> torch.Tensor:
        """Return the dense matrix: `Q + L·R + S`, added in fp32, as `dtype`."""
        dense_OI = self.quantized()
        if self.rank:
            dense_OI += self.left.float() @ self.right.float()
        rows, columns = self.sparse.positions()
        dense_OI[rows, columns] += self.sparse.values.float()
        return dense_OI.to(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRankOptions:
    """Settings of the low-rank correction."""

    bits: int = 4
    """Bits of a code, 2 to 8."""
    group_size: int = 128
    """Input channels that share a scale; -1 for all."""
    symmetric: bool = True
    """Without zero points."""
    rank: int = 16
    """Columns of L; no more than the matrix has are used."""
    sparse_fraction: float = 0.0
    """Share of weights that S corrects."""
    iterations: int = 3
    """Times that Q, L·R and S are fitted in turn; the best of them is kept."""
    dampening: float = 0.01
    """Share of the mean diagonal that is added to the Hessian's."""

    def faults(self) -> list[Fault]:
        """Return the settings out of range."""
        found = []
        if not 2 <= self.bits <= 8:
            found.append(Fault(where="bits", value=self.bits, rule="must be 2 to 8"))
        if self.group_size < 1 and self.group_size != -1:
            found.append(Fault(where="group_size", value=self.group_size, rule="must be 1 or more, or -1 for all"))
        for name, least in (("rank", 0), ("iterations", 1)):
            if getattr(self, name) < least:
                found.append(Fault(where=name, value=getattr(self, name), rule=f"must be {least} or more"))
        if not 0 <= self.sparse_fraction < 1:
            found.append(Fault(where="sparse_fraction", value=self.sparse_fraction, rule="must be 0 or more, under 1"))
        if not 0 <= self.dampening <= 1:
            found.append(Fault(where="dampening", value=self.dampening, rule="must be 0 to 1"))
        return found


def low_rank_residual(
    weight_OI: torch.Tensor, hessian_II: torch.Tensor | None, options: LowRankOptions | None = None
) -> LowRankMatrix:
    """Find codes, a low-rank product and a sparse matrix whose sum is near a weight.

    Q is rounded to nearest, or with error feedback where a Hessian is given; L·R is the best product of its rank for
    what is left over, S the weights that then cost most. They are fitted in turn, and the sum with the least
    `trace(D H Dᵀ)` is kept; Q alone is among them, so the error is never above that of Q alone.

    Args:
        weight_OI: Weights, of any floating type.
        hessian_II: Mean of `x xᵀ` over the layer's inputs; the identity when `None`.
        options: Settings.

    Raises:
        UsageError: options out of range.
        RefusedInputError: NaN or infinity, or a Hessian of another shape.
    """
    import torch

    options = options or LowRankOptions()
    if faults := options.faults():
        raise UsageError(faults)
    check_matrix(weight_OI, hessian_II)
    fit = _Fit(weight_OI.detach(), hessian_II, options)
    rows, columns = fit.weight_OI.shape
    best = fit.assemble(torch.zeros(rows, 0), torch.zeros(0, columns), None)
    least, starts = fit.error(best), [best]
    if options.rank:
        # Where the weight itself has large terms of low rank, correcting codes that had to hold them comes too late.
        starts.append(fit.assemble(*fit.product(fit.weight_OI), None))
    for start in starts:
        latest = start
        for _ in range(options.iterations):
            sparse_OI = fit.sparse_part(latest)
            left_OK, right_KI = fit.product(fit.weight_OI - latest.quantized() - sparse_OI)
            corrected = fit.corrected(latest, left_OK, right_KI)
            latest = fit.assemble(left_OK, right_KI, sparse_OI)
            for candidate in (corrected, latest):
                error = fit.error(candidate)
                if error < least:
                    best, least = candidate, error
    return best


class _Fit:
    """One matrix with what does not change while its parts are fitted."""

    def __init__(self, weight_OI: torch.Tensor, hessian_II: torch.Tensor | None, options: LowRankOptions) -> None:
        import torch

        self.options, self.dtype = options, weight_OI.dtype
        self.kept_dtype = torch.float16 if weight_OI.dtype == torch.float16 else torch.bfloat16
        self.weight_OI = weight_OI.float()
        self.hessian_II = self.root_II = self.upper_II = None
        self.sparse_count = int(options.sparse_fraction * weight_OI.numel())
        self.group_size = (
            weight_OI.shape[1] if options.group_size == -1 else min(options.group_size, weight_OI.shape[1])
        )
        if hessian_II is not None:
            self.hessian_II = hessian_II.to(weight_OI.device).float()
            self.upper_II = inverse_factor(self.hessian_II, options.dampening)
            # (UᵀU)⁻¹ = U⁻¹U⁻ᵀ, so U⁻¹ is a root of the damped Hessian.
            eye_II = torch.eye(len(self.upper_II), device=weight_OI.device)
            self.root_II = torch.linalg.solve_triangular(self.upper_II, eye_II, upper=True)

    def error(self, matrix: LowRankMatrix) -> float:
        """Return the error of a candidate, as it will be read."""
        return weighted_error(matrix.dequantize().float() - self.weight_OI, self.hessian_II)

    def product(self, rest_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return L and R, of which `‖(rest - L·R)·root‖` is least."""
        import torch

        rank = min(self.options.rank, *rest_OI.shape)
        weighted_OI = rest_OI if self.root_II is None else rest_OI @ self.root_II
        if min(rest_OI.shape) <= _EXACT_SVD_SIZE:
            left_OK, values_K, right_KI = torch.linalg.svd(weighted_OI, full_matrices=False)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                columns = min(rank + _OVERSAMPLING, *rest_OI.shape)
                left_OK, values_K, right_IK = torch.svd_lowrank(weighted_OI, q=columns, niter=4)
            right_KI = right_IK.t()
        share_K = values_K[:rank].sqrt()
        left_OK, right_KI = left_OK[:, :rank] * share_K, right_KI[:rank] * share_K.unsqueeze(1)
        if self.upper_II is not None:
            right_KI = right_KI @ self.upper_II
        return left_OK.to(self.kept_dtype), right_KI.to(self.kept_dtype)

    def sparse_part(self, matrix: LowRankMatrix) -> torch.Tensor:
        """Return what S has to add to a candidate's Q and L·R where that helps most, dense."""
        rest_OI = self.weight_OI - matrix.quantized() - matrix.left.float() @ matrix.right.float()
        return rest_OI * self._costliest(rest_OI)

    def corrected(self, matrix: LowRankMatrix, left_OK: torch.Tensor, right_KI: torch.Tensor) -> LowRankMatrix:
        """Return a candidate with its own codes, another product, and the sparse part that goes with it."""
        rest_OI = self.weight_OI - matrix.quantized() - left_OK.float() @ right_KI.float()
        return LowRankMatrix(
            shape=matrix.shape,
            bits=matrix.bits,
            group_size=matrix.group_size,
            symmetric=matrix.symmetric,
            dtype=matrix.dtype,
            codes=matrix.codes,
            scales=matrix.scales,
            zeros=matrix.zeros,
            left=left_OK,
            right=right_KI,
            sparse=sparse_rows(rest_OI, self._costliest(rest_OI), self.kept_dtype),
        )

    def assemble(self, left_OK: torch.Tensor, right_KI: torch.Tensor, sparse_OI: torch.Tensor | None) -> LowRankMatrix:
        """Return codes for what a product and a sparse part leave over, with both."""
        import torch

        device = self.weight_OI.device
        left_OK, right_KI = left_OK.to(device, self.kept_dtype), right_KI.to(device, self.kept_dtype)
        target_OI = self.weight_OI - left_OK.float() @ right_KI.float()
        if sparse_OI is not None:
            target_OI = target_OI - sparse_OI
        codes_OI, scales_OG, zeros_OG = self._round(target_OI)
        options, rows = self.options, len(codes_OI)
        symmetric = options.symmetric
        nothing = torch.zeros_like(codes_OI, dtype=torch.bool)
        matrix = LowRankMatrix(
            shape=(rows, codes_OI.shape[1]),
            bits=options.bits,
            group_size=self.group_size,
            symmetric=symmetric,
            dtype=self.dtype,
            codes=pack_bits(codes_OI, options.bits),
            scales=scales_OG,
            zeros=pack_bits(zeros_OG[:, :0] if symmetric else zeros_OG, options.bits),
            left=left_OK,
            right=right_KI,
            sparse=sparse_rows(target_OI, nothing, self.kept_dtype),
        )
        return matrix if sparse_OI is None else self.corrected(matrix, left_OK, right_KI)

    def _costliest(self, rest_OI: torch.Tensor) -> torch.Tensor:
        import torch

        mask_OI = torch.zeros_like(rest_OI, dtype=torch.bool)
        if self.sparse_count:
            cost_OI = rest_OI.square()
            if self.hessian_II is not None:
                cost_OI = cost_OI * self.hessian_II.diagonal()
            mask_OI.view(-1)[cost_OI.flatten().topk(self.sparse_count).indices] = True
        return mask_OI

    def _round(self, target_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes, scales and zeros; scales are of the range before any feedback."""
        import torch

        most = 2**self.options.bits - 1
        groups = target_OI.split(self.group_size, dim=1)
        low_OG = torch.stack([group.amin(dim=1) for group in groups], dim=1).clamp(max=0)
        high_OG = torch.stack([group.amax(dim=1) for group in groups], dim=1).clamp(min=0)
        if self.options.symmetric:
            high_OG = torch.maximum(-low_OG, high_OG)
            low_OG = -high_OG
        scales_OG = ((high_OG - low_OG).clamp(min=_SMALLEST_RANGE) / most).to(torch.bfloat16)
        middle = 2 ** (self.options.bits - 1)
        zeros_OG = torch.full_like(low_OG, middle)
        if not self.options.symmetric:
            zeros_OG = (-low_OG / scales_OG.float()).round().clamp(0, most)
        group_I = torch.arange(target_OI.shape[1], device=target_OI.device) // self.group_size
        scale_OI, zero_OI = scales_OG.float()[:, group_I], zeros_OG[:, group_I]
        if self.upper_II is None:
            return (target_OI / scale_OI + zero_OI).round().clamp(0, most), scales_OG, zeros_OG
        codes_IO = torch.empty_like(target_OI.t())
        feedback = ErrorFeedback(target_OI, self.upper_II)
        scale_IO, zero_IO = scale_OI.t(), zero_OI.t()
        for column in feedback.columns():
            codes_O = (feedback.weight_IO[column] / scale_IO[column] + zero_IO[column]).round().clamp(0, most)
            codes_IO[column] = codes_O
            feedback.settle(column, scale_IO[column] * (codes_O - zero_IO[column]))
        return codes_IO.t(), scales_OG, zeros_OG
