"""What a comparison of quantized training with quantization afterwards found.

A way's share of the gap is ``(L_rtn - L_way) / (L_rtn - L_ft)``, L the mean cross-entropy of held-out text in nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, Literal, get_args

from shardwright.trainers.counting.estimates import Estimate, exponential, token_mean

Way = Literal["ft", "ft-rtn", "ft-gptq", "qat", "qat-learned", "qad", "qad-ft"]
WAYS: tuple[Way, ...] = get_args(Way)
ENDS: tuple[Way, ...] = ("ft", "ft-rtn")
"""The two ends of the gap, which are always measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One way with one order of the samples."""

    way: Way
    """How the model was made."""
    seed: int
    """Of the order of samples and of everything random."""
    loss_sums: tuple[float, ...]
    """Cross-entropy in nats, summed over the judged tokens of each held-out window."""
    exported_loss_sums: tuple[float, ...] | None
    """The same of the checkpoint that was written and loaded again; `None` where none was."""
    seconds: float
    """Wall time of training and of what quantization came after it; without evaluation."""
    seconds_per_step: float
    """Median wall time of an optimizer step."""
    peak_bytes: int
    """Largest bytes of tensors that lived in a training step, weights and optimizer included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All ways beside one another; figures are means over seeds, errors are over held-out windows."""

    scheme: str
    """Name of the numbers."""
    steps: int
    """Optimizer steps of every way."""
    learning_rate: float
    """Largest, of every way."""
    seeds: tuple[int, ...]
    """One run of every way for each."""
    token_counts: tuple[int, ...]
    """Judged tokens of each held-out window."""
    untrained_loss_sums: tuple[float, ...]
    """Cross-entropy in nats of the model before training, summed over each window."""
    measurements: tuple[Measurement, ...]
    """Every way and seed."""

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways that were measured, in the order of `WAYS`."""
        found = {each.way for each in self.measurements}
        return tuple(way for way in WAYS if way in found)

    def seeds_of(self, way: Way) -> tuple[int, ...]:
        """Return the seeds with which a way was measured."""
        return tuple(each.seed for each in self._of(way))

    def perplexity(self, way: Way | None) -> Estimate:
        """Return ``exp`` of the mean cross-entropy; of the untrained model for `None`."""
        sums = self.untrained_loss_sums if way is None else self._sums(way, self.seeds)
        return exponential(token_mean(sums, self.token_counts))

    def excess(self, way: Way) -> Estimate:
        """Return the cross-entropy above that of the fine-tuned model in nats per token, with its paired error."""
        return self.advantage("ft", way)

    def recovered(self, way: Way, seed: int | None = None) -> Estimate | None:
        """Return the share of the gap between rounding and fine-tuning that a way closes, with its paired error.

        `None` if rounding costs no more than chance does, so that there is nothing to share.

        Args:
            way: Which.
            seed: One run; `None`: the mean of all.
        """
        seeds = self.seeds_of(way) if seed is None else (seed,)
        rounded, dense, own = (self._sums(name, seeds) for name in ("ft-rtn", "ft", way))
        gap = token_mean(_minus(rounded, dense), self.token_counts)
        if gap.value <= 0 or gap.is_significant is False:
            return None
        return token_mean(_minus(rounded, own), _minus(rounded, dense))

    def recovered_by_seed(self, way: Way) -> tuple[float, ...]:
        """Return the share of each run; runs without a gap are skipped."""
        found = (self.recovered(way, seed) for seed in self.seeds_of(way))
        return tuple(each.value for each in found if each is not None)

    def advantage(self, way: Way, rival: Way) -> Estimate:
        """Return how far a way's cross-entropy lies below a rival's, in nats per token, with its paired error.

        Over the seeds that both have.
        """
        seeds = tuple(seed for seed in self.seeds_of(way) if seed in self.seeds_of(rival))
        return token_mean(_minus(self._sums(rival, seeds), self._sums(way, seeds)), self.token_counts)

    def export_difference(self, way: Way) -> float | None:
        """Return the largest difference in nats per token between trained and exported model; `None` without export."""
        total = sum(self.token_counts)
        pairs = [(each.exported_loss_sums, each.loss_sums) for each in self._of(way)]
        found = [abs(sum(written) - sum(own)) / total for written, own in pairs if written is not None]
        return max(found) if found else None

    def seconds(self, way: Way) -> float:
        """Return the median wall time."""
        return median(each.seconds for each in self._of(way))

    def seconds_per_step(self, way: Way) -> float:
        """Return the median wall time of a step."""
        return median(each.seconds_per_step for each in self._of(way))

    def peak_bytes(self, way: Way) -> int:
        """Return the largest bytes of tensors in a training step."""
        return max(each.peak_bytes for each in self._of(way))

    def to_json(self) -> dict[str, Any]:
        """Return values for `json.dumps`."""
        return {"schema_version": 1, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Comparison:
        """Return what `to_json` was called on."""
        values = {name: _tuples(value) for name, value in data.items() if name != "schema_version"}
        rows = tuple(
            Measurement(**{name: _tuples(value) for name, value in row.items()}) for row in data["measurements"]
        )
        return cls(**(values | {"measurements": rows}))

    def _of(self, way: Way) -> list[Measurement]:
        return [each for each in self.measurements if each.way == way]

    def _sums(self, way: Way, seeds: tuple[int, ...]) -> tuple[float, ...]:
        found = [each.loss_sums for each in self._of(way) if each.seed in seeds]
        return tuple(fmean(column) for column in zip(*found, strict=True))


def _minus(left: Sequence[float], right: Sequence[float]) -> tuple[float, ...]:
    return tuple(a - b for a, b in zip(left, right, strict=True))


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
