"""Means over all labelled tokens of what a distillation's losses know anyway, and their standard errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..evaluation.estimates import STANDARD_ERROR, token_mean
from ..losses.objective import TokenSums

if TYPE_CHECKING:
    import torch

NAMES = {
    "forward_kl": "kl_per_token",
    "divergence": "divergence",
    "agreement": "top1_agreement",
    "overlap": "speculative_acceptance",
    "student_cross_entropy": "student_cross_entropy",
    "teacher_cross_entropy": "teacher_cross_entropy",
    "hidden_states": "hidden_state_distance",
    "attention": "attention_distance",
}
"""Names of the sums, and of the means in logs."""
WEIGHT, NONFINITE = "weight", "nonfinite_teacher_rows"


def sums_by_name(sums: TokenSums, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the sums that are there, detached, by name."""
    named = {name: getattr(sums, name, None) for name in (*NAMES, WEIGHT, NONFINITE)} | more
    return {name: value.detach() for name, value in named.items() if value is not None}


class Telemetry:
    """Adds up sums on the device, and reduces them over ranks when they are read."""

    def __init__(self) -> None:
        self._totals: dict[str, torch.Tensor] = {}
        self._samples: list[dict[str, torch.Tensor]] = []

    def add(self, sums: dict[str, torch.Tensor], sample_sums: dict[str, torch.Tensor]) -> None:
        """Add the sums of one micro-batch, and keep those [B] of its samples; nothing is synchronised."""
        for name, value in sums.items():
            self._totals[name] = self._totals.get(name, 0.0) + value.double()
        if sample_sums:
            self._samples.append(sample_sums)

    def standard_errors(self, accelerator: Any) -> dict[str, float]:
        """Return those of the means over tokens, over the samples of all ranks; every rank must call it.

        None where ranks share samples, of which each would count as often as it is read.
        """
        from accelerate.utils import gather_object

        axes = getattr(accelerator, "parallelism_config", None)
        if axes is not None and axes.tp_size * axes.cp_size * axes.sp_size > 1:
            return {}
        own: list[dict[str, float]] = []
        for batch in self._samples:
            values = {name: sums_B.tolist() for name, sums_B in batch.items()}
            own += [dict(zip(values, sums, strict=True)) for sums in zip(*values.values(), strict=True)]
        samples = gather_object(own)
        weights = [sums[WEIGHT] for sums in samples]
        errors: dict[str, float] = {}
        for name, shown in NAMES.items():
            if all(name in sums for sums in samples):
                error = token_mean([sums[name] for sums in samples], weights).standard_error if any(weights) else None
                errors |= {} if error is None else {f"{shown}_{STANDARD_ERROR}": error}
        return errors

    def means(self, accelerator: Any) -> dict[str, float]:
        """Return means over all ranks and forget the sums; every rank must call it."""
        import torch

        names = (*NAMES, WEIGHT, NONFINITE)
        zero = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        # A rank whose labels are all masked knows fewer sums; all ranks reduce the same number of them.
        values = [self._totals.get(name, zero) for name in names]
        present = [zero + (name in self._totals) for name in names]
        self._totals = {}
        totals, known = accelerator.reduce(
            torch.stack([torch.stack(values), torch.stack(present)]), reduction="sum"
        ).tolist()
        by_name = {name: total for name, total, ranks in zip(names, totals, known, strict=True) if ranks}
        weight = by_name.get(WEIGHT) or 1.0
        means = {shown: by_name[name] / weight for name, shown in NAMES.items() if name in by_name}
        if by_name.get(NONFINITE):
            means[NONFINITE] = by_name[NONFINITE]
        return means
