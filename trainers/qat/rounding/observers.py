"""Ranges of activations in quantization-aware training: observers, and the range of each rounded input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast, get_args

from ....ds_configs.quantization.scheme import ActivationQuantization, RangeMethod
from ....ds_configs.specs.errors import ConfigError, UsageError
from ....plugins.activation_ranges import ActivationHistogram, activation_range
from ....plugins.compressed_tensors.codes import code_range, float8_scale, range_scale_and_zero_point
from ....plugins.transformers.gradient_checkpointing import in_backward_pass

if TYPE_CHECKING:
    from typing import Any

    import torch
    from torch import Tensor

    from .config import InputRanges

ObserverMethod = Literal["minmax", "moving_average", "percentile", "l2", "kl"]
METHODS: tuple[ObserverMethod, ...] = get_args(ObserverMethod)
AVERAGING_CONSTANT = 0.01
"""Weight of the newest step in a moving average."""
Reduction = Callable[["Tensor", Literal["min", "sum"]], "Tensor"]
"""Reduces a tensor elementwise over all ranks."""
# One all-reduce of 256 histograms of 8192 int64 counts is 17 MB; one per layer would pay the latency each time.
_HISTOGRAMS_PER_REDUCTION = 256


class BoundsObserver:
    """Minimum and maximum, over all steps or as a moving average over steps.

    Both bounds are one tensor (low, -high), fp32 [2], so that one minimum updates both.
    """

    def __init__(self, *, averaging_constant: float | None = None) -> None:
        """Create an empty observer; without a constant it covers every value."""
        self.averaging_constant = averaging_constant
        self.ends: Tensor | None = None
        """Bounds of the closed steps; `None` before the first step with values."""
        self._pending: Tensor | None = None
        self._refused: Tensor | None = None

    @property
    def refused(self) -> int:
        """Number of batches with infinities or NaN, which this rank ignored."""
        return 0 if self._refused is None else int(self._refused)

    def start_from(self, low: Tensor, high: Tensor) -> None:
        """Continue from a known range, fp32 [1] each."""
        import torch

        self.ends = torch.cat([low, -high])

    def add(self, values: Tensor) -> None:
        """Observe the inputs of a forward pass without synchronizing with the accelerator."""
        import torch

        if values.numel() == 0:
            return
        low, high = torch.aminmax(values.detach())
        ends = torch.stack([low, -high]).float()
        # fp16 gradient scaling produces infinities and skips the step: such a batch must not move ranges.
        finite = torch.isfinite(ends).all()
        ends = torch.where(finite, ends, torch.full_like(ends, math.inf))
        refused = (~finite).long()
        self._pending = ends if self._pending is None else torch.minimum(self._pending, ends)
        self._refused = refused if self._refused is None else self._refused + refused

    def pending(self) -> Tensor:
        """Return the bounds of the open step as (low, -high); infinity without values."""
        import torch

        return torch.full((2,), math.inf) if self._pending is None else self._pending

    def absorb(self, ends: Tensor) -> None:
        """Close a step in which some rank saw values, with the resulting bounds."""
        self._pending, self.ends = None, ends

    def range(self) -> tuple[Tensor, Tensor] | None:
        """Return low and high, fp32 [1] each; `None` before the first closed step with values."""
        return None if self.ends is None else (self.ends[0:1], -self.ends[1:2])

    def local_range(self) -> tuple[Tensor, Tensor] | None:
        """Return the range, or that of this rank's open step before the first step is closed."""
        if self.ends is not None or self._pending is None:
            return self.range()
        return self._pending[0:1], -self._pending[1:2]

    def record(self) -> dict[str, object]:
        """Return the state that a resumed run needs."""
        return {"seen": None if self.ends is None else self.ends.tolist()}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restore the state from `record()`."""
        import torch

        if record.get("seen") is not None:
            self.ends = torch.tensor(record["seen"], dtype=torch.float32)


class HistogramObserver:
    """Histogram of all values, in which the range is searched; reading it waits for the accelerator."""

    def __init__(self, quantization: ActivationQuantization, method: RangeMethod) -> None:
        """Create an empty observer."""
        self.quantization = replace(quantization, range_method=method)
        self.refused = 0
        """Number of batches with infinities or NaN, which this rank ignored."""
        self.histogram = ActivationHistogram()
        """Closed steps of all ranks."""
        self.open = ActivationHistogram()
        """The open step of this rank."""
        self.steps = 0
        """Number of closed steps."""
        self._range: tuple[Tensor, Tensor] | None = None

    def start_from(self, low: Tensor, high: Tensor) -> None:
        """Use a known range until the histogram is searched."""
        self._range = (low, high)

    def add(self, values: Tensor) -> None:
        """Observe the inputs of a forward pass."""
        try:
            self.open.add(values.detach())
        except ValueError:
            self.refused += 1

    def pending(self) -> Tensor:
        """Return (low, -high, -exponent of the bins) of the open step, fp32 [3]; infinity without values."""
        import torch

        exponent = math.inf if self.open.exponent is None else -self.open.exponent
        return torch.tensor([self.open.low, -self.open.high, exponent], dtype=torch.float32)

    def pending_counts(self, seen: Tensor) -> Tensor:
        """Return the open step's counts in bins common to all ranks, and its tokens, int64 [bins + 1]."""
        import torch

        counts = self.open.counts_at(_exponent(seen), seen.device)
        return torch.cat([counts, counts.new_tensor([self.open.tokens])])

    def absorb(self, seen: Tensor, counts: Tensor) -> None:
        """Close the step with the reduced `pending` [3] and `pending_counts` [bins + 1] of all ranks."""
        low, high = float(seen[0]), -float(seen[1])
        self.histogram.add_counts(counts[:-1], exponent=_exponent(seen), low=low, high=high, tokens=int(counts[-1]))
        self.open = ActivationHistogram()
        self.steps += 1
        # A search is expensive: run it after steps 1, 2, 4, 8, ...
        if self.histogram.tokens and self.steps & (self.steps - 1) == 0:
            self.search()

    def search(self) -> None:
        """Update the range from the histogram."""
        self._range = self._best_range(self.histogram)

    def range(self) -> tuple[Tensor, Tensor] | None:
        """Return low and high, fp32 [1] each; `None` before the first closed step with values."""
        return self._range

    def local_range(self) -> tuple[Tensor, Tensor] | None:
        """Return the range, or that of this rank's open step before the first step is closed."""
        return self._best_range(self.open) if self._range is None and self.open.tokens else self._range

    def record(self) -> dict[str, object]:
        """Return the state that a resumed run needs."""
        return {"steps": self.steps, "histogram": self.histogram.record()}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restore the state from `record()`."""
        if "histogram" in record:
            self.steps = record["steps"]
            self.histogram = ActivationHistogram.from_record(record["histogram"])

    def _best_range(self, histogram: ActivationHistogram) -> tuple[Tensor, Tensor]:
        import torch

        bounds = activation_range(histogram, self.quantization)
        return torch.tensor([bounds.low]), torch.tensor([bounds.high])


RangeObserver = BoundsObserver | HistogramObserver


def observer_of(quantization: ActivationQuantization, method: ObserverMethod) -> RangeObserver:
    """Return an empty observer."""
    if method == "minmax":
        return BoundsObserver()
    if method == "moving_average":
        return BoundsObserver(averaging_constant=AVERAGING_CONSTANT)
    return HistogramObserver(quantization, cast(RangeMethod, method))


def close_step(observers: Sequence[RangeObserver], reduction: Reduction) -> None:
    """Close a step in the observers of all ranks.

    The number of collectives does not depend on the number of layers, apart from blocks of histograms.

    Args:
        observers: Observers of the same layers in the same order on every rank.
        reduction: Reduces a tensor over ranks.
    """
    import torch

    if not observers:
        return
    rows = [observer.pending() for observer in observers]
    padded = [torch.nn.functional.pad(row, (0, 3 - len(row)), value=math.inf) for row in rows]
    device = next((row.device for row in padded if row.device.type != "cpu"), padded[0].device)
    seen_N3 = reduction(torch.stack([row.to(device) for row in padded]), "min").to(device)
    has_values = torch.isfinite(seen_N3[:, 0]).tolist()
    # Layers with the same rule are updated together: separately they would take a dozen tiny kernels each.
    kinds: dict[tuple[float | None, bool], list[tuple[BoundsObserver, Tensor]]] = {}
    for observer, seen_3, any_values in zip(observers, seen_N3.unbind(), has_values, strict=True):
        if isinstance(observer, BoundsObserver) and any_values:
            kind = (observer.averaging_constant, observer.ends is None)
            kinds.setdefault(kind, []).append((observer, seen_3[:2]))
    for (share, is_first), members in kinds.items():
        new_N2 = torch.stack([ends for _, ends in members])
        if not is_first:
            old = [observer.ends.to(new_N2.device) for observer, _ in members if observer.ends is not None]
            old_N2 = torch.stack(old)
            new_N2 = torch.minimum(old_N2, new_N2) if share is None else old_N2 + share * (new_N2 - old_N2)
        for (observer, _), ends in zip(members, new_N2.unbind(), strict=True):
            observer.absorb(ends)
    histograms = [
        (observer, seen_3)
        for observer, seen_3 in zip(observers, seen_N3.cpu().unbind(), strict=True)
        if isinstance(observer, HistogramObserver)
    ]
    for first in range(0, len(histograms), _HISTOGRAMS_PER_REDUCTION):
        block = histograms[first : first + _HISTOGRAMS_PER_REDUCTION]
        counts = reduction(torch.stack([observer.pending_counts(seen) for observer, seen in block]).to(device), "sum")
        for (observer, seen), row in zip(block, counts.cpu(), strict=True):
            observer.absorb(seen, row)


def _exponent(seen: Tensor) -> int | None:
    negative = float(seen[2])
    return None if math.isinf(negative) else int(-negative)


class InputRange:
    """Range of the inputs of one matrix, with the scale and zero point that the checkpoint stores.

    A plain object, not part of any state dict. Low and high are fp32; the scale is rounded to the stored dtype before
    it is used.
    """

    def __init__(
        self,
        quantization: ActivationQuantization,
        *,
        method: InputRanges = "calibrated",
        stored_dtype: torch.dtype,
        name: str = "",
    ) -> None:
        """Create a range without values.

        Args:
            quantization: Number format of the rounded inputs, with stored ranges.
            method: Source of the range; `calibrated` and `learned` ranges are not observed during training.
            stored_dtype: Dtype of scales in the checkpoint.
            name: Name of the matrix, for messages.
        """
        self.quantization = quantization
        self.stored_dtype = stored_dtype
        self.name = name
        self.observer: RangeObserver | None = None
        """Observes inputs during training or calibration; `None` if the range is fixed."""
        if method in METHODS:
            self.observer = observer_of(quantization, cast(ObserverMethod, method))
        self.calibrating = False
        """Whether a calibration pass is running, which uses evaluation mode."""
        self._bounds: tuple[Tensor, Tensor] | None = None
        self._stored: tuple[Tensor, Tensor | None] | None = None

    @property
    def scale(self) -> Tensor | None:
        """[1] in the stored dtype; `None` before any values. Each update of the range creates a new tensor."""
        stored = self._scale_and_zero_point()
        return None if stored is None else stored[0]

    @property
    def zero_point(self) -> Tensor | None:
        """int8 [1]; `None` if symmetric."""
        stored = self._scale_and_zero_point()
        return None if stored is None else stored[1]

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Low and high; `None` before all ranks have agreed on them."""
        return None if self._bounds is None else (float(self._bounds[0]), float(self._bounds[1]))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Move scale and zero point to a device and return them.

        Raises:
            UsageError: the range has no values yet.
        """
        stored = self._scale_and_zero_point()
        if stored is None:
            where = f"input range of {self.name or 'a layer'}"
            rule = "has no values, and the layer rounds its inputs"
            fix = (
                "pass QATCallback(calibration=batches), call calibrate_inputs or load_ranges before training, or "
                "observe ranges with ranges = moving_average"
            )
            raise UsageError(ConfigError(where=where, rule=rule, fix=fix))
        scale, zero_point = stored
        if scale.device != device:
            import torch

            # Autograd cannot save tensors that were created in inference mode.
            with torch.inference_mode(False):
                stored = self._stored = scale.to(device), None if zero_point is None else zero_point.to(device)
        return stored

    def observe(self, inputs: Tensor) -> None:
        """Observe the inputs of a forward pass; ignores the repeated pass of gradient checkpointing."""
        if self.observer is None or in_backward_pass():
            return
        import torch

        device = inputs.device.type
        if torch.is_autocast_enabled(device):
            inputs = inputs.detach().to(torch.get_autocast_dtype(device))
        self.observer.add(inputs)

    def set_bounds(self, low: Tensor | float, high: Tensor | float) -> None:
        """Set the range, extended to contain 0."""
        import torch

        _set_bounds([self], *(torch.as_tensor(end, dtype=torch.float32).detach().reshape(1) for end in (low, high)))

    def initial_values(self) -> tuple[Tensor, Tensor | None]:
        """Return the initial values of a learned scale and zero point, fp32 [1] each: the stored ones before rounding.

        Raises:
            UsageError: the range has no values yet.
        """
        import torch

        stored, zero_point = self.on(torch.device("cpu"))
        if self._bounds is None or self.quantization.number_type == "float":
            return stored.float(), None if zero_point is None else zero_point.float()
        low, high = (end.cpu() for end in self._bounds)
        bits, symmetric = self.quantization.bits, self.quantization.symmetric
        exact, _ = range_scale_and_zero_point(low, high, bits=bits, symmetric=symmetric, stored_dtype=torch.float32)
        # A range of (nearly) only zeros has the smallest scale of the stored dtype.
        scale = torch.where(exact.to(stored.dtype) == stored, exact, stored.float())
        if zero_point is None:
            return scale, None
        least, largest = code_range(bits)
        exact_zero = (least - low / stored.float()).clamp(least, largest)
        return scale, torch.where(exact_zero.round() == zero_point, exact_zero, zero_point.float())

    def record(self) -> dict[str, object]:
        """Return the state that a resumed run needs; JSON represents fp32 numbers exactly."""
        record: dict[str, object] = {"bounds": None if self.bounds is None else list(self.bounds)}
        return record if self.observer is None else record | self.observer.record()

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restore the state from `record()`."""
        if record["bounds"] is not None:
            self.set_bounds(*record["bounds"])
        self.continue_with(self.observer)
        if self.observer is not None:
            self.observer.restore(record)

    def continue_with(self, observer: RangeObserver | None) -> None:
        """Replace the observer; the new one starts from the current range."""
        self.observer = observer
        if observer is not None and self._bounds is not None:
            observer.start_from(*self._bounds)

    def _scale_and_zero_point(self) -> tuple[Tensor, Tensor | None] | None:
        # Before the first step is closed, a rounding layer uses the range of the values that this rank saw.
        if self._stored is None and self.observer is not None:
            local = self.observer.local_range()
            if local is not None:
                self._stored = _scales_and_zero_points(*local, self.quantization, self.stored_dtype)
        return self._stored


def _scales_and_zero_points(
    low: Tensor, high: Tensor, quantization: ActivationQuantization, stored_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    if quantization.number_type == "float":
        return float8_scale(low, high, stored_dtype), None
    return range_scale_and_zero_point(
        low, high, bits=quantization.bits, symmetric=quantization.symmetric, stored_dtype=stored_dtype
    )


def _set_bounds(ranges: Sequence[InputRange], low_N: Tensor, high_N: Tensor) -> None:
    """Set the bounds of ranges with the same number format."""
    import torch

    with torch.inference_mode(False), torch.no_grad():
        zero = low_N.new_zeros(())
        low_N, high_N = torch.minimum(low_N, zero), torch.maximum(high_N, zero)
        scale_N, zero_point_N = _scales_and_zero_points(low_N, high_N, ranges[0].quantization, ranges[0].stored_dtype)
        for index, input_range in enumerate(ranges):
            own = slice(index, index + 1)
            input_range._bounds = low_N[own], high_N[own]
            input_range._stored = scale_N[own], None if zero_point_N is None else zero_point_N[own]


def synchronise(ranges: Iterable[InputRange], *, reduction: Reduction | None = None) -> None:
    """Close an optimizer step: combine the values of all ranks and update observed ranges.

    Every rank must call it with the same layers in the same order, also after steps that overflowed.

    Args:
        ranges: All ranges of a model; those without an observer do not change.
        reduction: Reduces a tensor over ranks; `None`: the default process group, if there is one.
    """
    import torch

    observed = [(input_range, input_range.observer) for input_range in ranges if input_range.observer is not None]
    close_step([observer for _, observer in observed], reduction or _reduce_over_ranks)
    kinds: dict[object, list[tuple[InputRange, Tensor, Tensor]]] = {}
    for input_range, observer in observed:
        bounds = observer.range()
        if bounds is not None:
            kind = (input_range.quantization, input_range.stored_dtype, bounds[0].device)
            kinds.setdefault(kind, []).append((input_range, *bounds))
    for members in kinds.values():
        moved, low, high = zip(*members, strict=True)
        _set_bounds(moved, torch.cat(low), torch.cat(high))


def _reduce_over_ranks(tensor: Tensor, operation: Literal["min", "sum"]) -> Tensor:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor
    device = tensor.device
    if device.type == "cpu" and "gloo" not in dist.get_backend():
        device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    reduced = tensor.to(device, copy=True)
    dist.all_reduce(reduced, op=dist.ReduceOp.MIN if operation == "min" else dist.ReduceOp.SUM)
    return reduced
