"""Schedule of the share of zeros over the steps of a training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...ds_configs.specs.errors import Fault


@dataclass(frozen=True, kw_only=True, slots=True)
class PruningSchedule:
    """Zeros from a first to a last optimizer step, fast at the beginning and slowly at the end.

    ``s(t) = s_f + (s_i - s_f) · (1 - (t - t_0) / (t_1 - t_0))³`` (Zhu & Gupta, arXiv 1710.01878, eq. 1), kept between
    updates, which happen at t_0, t_0 + every, … and at t_1.
    """

    final_sparsity: float
    """Share of zeros from `end_step` on, s_f."""
    end_step: int
    """Optimizer steps taken when the last zeros are chosen, t_1."""
    start_step: int = 0
    """Optimizer steps taken when the first zeros are chosen, t_0; 0: before training."""
    every: int = 100
    """Optimizer steps between two choices."""
    initial_sparsity: float = 0.0
    """Share of zeros at `start_step`, s_i."""

    def is_update(self, step: int) -> bool:
        """Return whether zeros are chosen after this many optimizer steps."""
        if not self.start_step <= step <= self.end_step:
            return False
        return step == self.end_step or (step - self.start_step) % self.every == 0

    def sparsity_at(self, step: int) -> float:
        """Return the share of zeros after this many optimizer steps."""
        if step < self.start_step:
            return 0.0
        if step >= self.end_step:
            return self.final_sparsity
        last = step - (step - self.start_step) % self.every
        left = 1 - (last - self.start_step) / (self.end_step - self.start_step)
        return self.final_sparsity + (self.initial_sparsity - self.final_sparsity) * left**3

    def faults(self) -> list[Fault]:
        """Return what is wrong with the numbers, all at once."""
        return [*self._share_faults(), *self._step_faults()]

    def _share_faults(self) -> Iterator[Fault]:
        shares = {"final_sparsity": self.final_sparsity, "initial_sparsity": self.initial_sparsity}
        for where, share in shares.items():
            if not (math.isfinite(share) and 0 <= share < 1):
                fix = f"write {share / 100:g} for {share:g} %" if 1 < share <= 99 else ""
                yield Fault(where=where, value=share, rule="is a share of zeros, at least 0 and below 1", fix=fix)
        if self.initial_sparsity > self.final_sparsity:
            rule = f"must not exceed final_sparsity = {self.final_sparsity}: zeros stay zeros"
            yield Fault(where="initial_sparsity", value=self.initial_sparsity, rule=rule)

    def _step_faults(self) -> Iterator[Fault]:
        if self.start_step < 0:
            yield Fault(where="start_step", value=self.start_step, rule="must be at least 0")
        if self.every < 1:
            yield Fault(where="every", value=self.every, rule="must be at least 1")
        if self.end_step < self.start_step:
            rule = f"must not come before start_step = {self.start_step}"
            yield Fault(where="end_step", value=self.end_step, rule=rule)
