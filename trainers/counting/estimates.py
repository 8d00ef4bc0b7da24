"""Means over the tokens of a text with their standard errors, from one sum for each window.

Tokens of one window depend on each other, so windows are treated as independent samples. Windows of one document are
still related, so the errors are rather too small than too large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STANDARD_ERROR = "standard_error"
"""Suffix of the standard error's name in logs and results."""
SIGNIFICANT_STANDARD_ERRORS = 2.0
"""Standard errors above which a difference is not explained by the choice of text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over a text, in the unit of the averaged values."""

    value: float
    """The mean over all evaluated tokens."""
    standard_error: float | None
    """Of that mean, over windows; `None` with a single window."""

    @property
    def is_significant(self) -> bool | None:
        """Whether it is more than two standard errors away from 0; `None` without a standard error."""
        if self.standard_error is None:
            return None
        return abs(self.value) > SIGNIFICANT_STANDARD_ERRORS * self.standard_error


def token_mean(sums: Sequence[float], counts: Sequence[float]) -> Estimate:
    """Return ``m = Σ sᵢ / Σ tᵢ`` over windows i with sum sᵢ over tᵢ tokens, with the standard error of a ratio.

    ``SE = √(n / (n - 1) · Σ (sᵢ - m tᵢ)²) / Σ tᵢ`` over the n windows that have tokens (Cochran, Sampling Techniques,
    3rd ed., eq. 6.13 without the finite population); with equal tᵢ it is the standard deviation of the windows' means
    over √n. For the paired error of a difference between two models, pass the differences of the sums.
    """
    total = sum(counts)
    mean = math.fsum(sums) / total
    windows = sum(count > 0 for count in counts)
    if windows < 2:
        return Estimate(value=mean, standard_error=None)
    scatter = math.fsum((total_loss - mean * count) ** 2 for total_loss, count in zip(sums, counts, strict=True))
    return Estimate(value=mean, standard_error=math.sqrt(windows / (windows - 1) * scatter) / total)


def exponential(loss: Estimate) -> Estimate:
    """Return ``exp(m)`` of a mean loss in nats, with the first-order standard error ``exp(m) · SE``."""
    value = math.exp(min(loss.value, 700.0))
    error = None if loss.standard_error is None else value * loss.standard_error
    return Estimate(value=value, standard_error=error)
