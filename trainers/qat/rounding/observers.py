"""Ranges of rounded inputs in quantization-aware training: observed by minimum and maximum, or by percentiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Literal

import torch
from torch import Tensor

from ....ds_configs.quantization.scheme import ActivationQuantization
from ....ds_configs.specs.errors import ConfigError, UsageError
from ....plugins.activation_ranges import ActivationHistogram, percentile_range
from ....plugins.compressed_tensors.codes import range_scale_and_zero_point
from ....plugins.transformers.gradient_checkpointing import in_backward_pass
from .config import ObserverMethod

AVERAGING_CONSTANT = 0.01
"""Weight of the newest step in a moving average."""
Reduction = Callable[["Tensor", Literal["min", "sum"]], "Tensor"]
"""Reduces a tensor elementwise over all ranks."""


class InputRange:
    """Range of the inputs of one matrix, with the scale and zero point that the checkpoint stores.

    A plain object, not part of any state dict. Both bounds are one tensor (low, -high), fp32 [2], so that one minimum
    updates both; the scale is rounded to the stored dtype before it is used. A step's bounds are its minimum and
    maximum, or its percentiles; over steps they are combined by their minimum and maximum, or by a moving average.
    """

    def __init__(
        self,
        quantization: ActivationQuantization,
        *,
        method: ObserverMethod,
        stored_dtype: torch.dtype,
        name: str = "",
    ) -> None:
        """Create a range without values.

        Args:
            quantization: Number format of the rounded inputs, with stored ranges.
            method: Method that observes the range.
            stored_dtype: Dtype of scales in the checkpoint.
            name: Name of the matrix, for messages.
        """
        self.quantization = quantization
        self.method = method
        self.stored_dtype = stored_dtype
        self.name = name
        self._ends: Tensor | None = None
        self._stored: tuple[Tensor, Tensor | None] | None = None
        self._open: Tensor | None = None
        """Bounds of the open step of this rank."""
        self._histogram: ActivationHistogram | None = None
        """Values of the open step of this rank, for percentiles."""

    @property
    def scale(self) -> Tensor | None:
        """[1] in the stored dtype; `None` before any values. Each update of the range creates a new tensor."""
        stored = self._scale_and_zero_point()
        return None if stored is None else stored[0]

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Low and high; `None` before all ranks have agreed on them."""
        return None if self._ends is None else (float(self._ends[0]), -float(self._ends[1]))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Move scale and zero point to a device and return them.

        Raises:
            UsageError: the range has no values yet.
        """
        stored = self._scale_and_zero_point()
        if stored is None:
            where = f"input range of {self.name or 'a layer'}"
            rule = "has no values, and the layer rounds its inputs"
            fix = "train before you evaluate: forward passes in training mode observe ranges"
            raise UsageError(ConfigError(where=where, rule=rule, fix=fix))
        scale, zero_point = stored
        if scale.device != device:
            # Autograd cannot save tensors that were created in inference mode.
            with torch.inference_mode(False):
                stored = self._stored = scale.to(device), None if zero_point is None else zero_point.to(device)
        return stored

    def observe(self, inputs: Tensor) -> None:
        """Observe the inputs of a forward pass; ignores the repeated pass of gradient checkpointing.

        Minimum and maximum do not synchronize with the accelerator; a histogram does.
        """
        if inputs.numel() == 0 or in_backward_pass():
            return
        device, inputs = inputs.device.type, inputs.detach()
        if torch.is_autocast_enabled(device):
            inputs = inputs.to(torch.get_autocast_dtype(device))
        if self.method == "percentile":
            histogram = self._histogram or ActivationHistogram()
            # A batch with infinities must not move ranges, see below.
            with suppress(ValueError):
                histogram.add(inputs)
                self._histogram = histogram
            return
        low, high = torch.aminmax(inputs)
        ends = torch.stack([low, -high]).float()
        # fp16 gradient scaling produces infinities and skips the step: such a batch must not move ranges.
        ends = torch.where(torch.isfinite(ends).all(), ends, torch.full_like(ends, math.inf))
        self._open = ends if self._open is None else torch.minimum(self._open, ends)

    def set_bounds(self, low: float, high: float) -> None:
        """Set the range, extended to contain 0."""
        _set_ends([self], torch.tensor([[low, -high]], dtype=torch.float32))

    def open_step(self) -> Tensor:
        """Return (low, -high, -exponent of a histogram's bins) of the open step, fp32 [3]; infinity without values."""
        if self._open is not None:
            return torch.nn.functional.pad(self._open, (0, 1), value=math.inf)
        if self._histogram is None:
            return torch.full((3,), math.inf)
        exponent = math.inf if self._histogram.exponent is None else -self._histogram.exponent
        return torch.tensor([self._histogram.low, -self._histogram.high, exponent], dtype=torch.float32)

    def percentiles(self, histogram: ActivationHistogram) -> list[float]:
        """Return (low, -high) of the values in a histogram."""
        numbers = self.quantization
        values = percentile_range(histogram, percentile=numbers.percentile, symmetric=numbers.symmetric)
        return [values.low, -values.high]

    def _scale_and_zero_point(self) -> tuple[Tensor, Tensor | None] | None:
        # Before the first step is closed, a rounding layer uses the range of the values that this rank saw.
        if self._stored is None and (self._open is not None or self._histogram is not None):
            ends = self._open
            if self._histogram is not None:
                ends = torch.tensor(self.percentiles(self._histogram), dtype=torch.float32)
            assert ends is not None
            self._stored = _scales_and_zero_points([self], ends.unsqueeze(0).clamp(max=0))
        return self._stored


def _scales_and_zero_points(ranges: Sequence[InputRange], ends_N2: Tensor) -> tuple[Tensor, Tensor | None]:
    return range_scale_and_zero_point(
        ends_N2[:, 0],
        -ends_N2[:, 1],
        bits=ranges[0].quantization.bits,
        symmetric=ranges[0].quantization.symmetric,
        stored_dtype=ranges[0].stored_dtype,
    )


def _set_ends(ranges: Sequence[InputRange], ends_N2: Tensor) -> None:
    """Set the bounds of ranges, which have the same number format."""
    with torch.inference_mode(False), torch.no_grad():
        ends_N2 = ends_N2.clamp(max=0)
        scale_N, zero_point_N = _scales_and_zero_points(ranges, ends_N2)
        for index, input_range in enumerate(ranges):
            own = slice(index, index + 1)
            input_range._ends = ends_N2[index]
            input_range._stored = scale_N[own], None if zero_point_N is None else zero_point_N[own]


def synchronise(ranges: Iterable[InputRange], *, reduction: Reduction | None = None) -> None:
    """Close an optimizer step: combine the values of all ranks and update observed ranges.

    Every rank must call it with the same layers in the same order, also after steps that overflowed. The number of
    collectives does not depend on the number of layers.

    Args:
        ranges: All ranges of a model.
        reduction: Reduces a tensor over ranks; `None`: the default process group, if there is one.
    """
    observed = list(ranges)
    if not observed:
        return
    reduction = reduction or _reduce_over_ranks
    rows = [input_range.open_step() for input_range in observed]
    device = next((row.device for row in rows if row.device.type != "cpu"), rows[0].device)
    step_N3 = reduction(torch.stack([row.to(device) for row in rows]), "min").to(device)
    has_values = torch.isfinite(step_N3[:, 0]).tolist()
    ends_N2 = step_N3[:, :2].clone()
    counted = [index for index, each in enumerate(observed) if each.method == "percentile" and has_values[index]]
    if counted:
        steps = [step_N3[index].tolist() for index in counted]
        exponents = [None if math.isinf(negative) else int(-negative) for *_, negative in steps]
        histograms = [observed[index]._histogram or ActivationHistogram() for index in counted]
        own = [each.counts_at(exponent, device) for each, exponent in zip(histograms, exponents, strict=True)]
        # One reduction for all layers, of 64 KB each: one per layer would pay the latency each time.
        counts = reduction(torch.stack(own), "sum").cpu()
        for index, (low, high, _), exponent, row in zip(counted, steps, exponents, counts, strict=True):
            histogram = ActivationHistogram.of_counts(row, exponent=exponent, low=low, high=-high)
            ends_N2[index] = torch.tensor(observed[index].percentiles(histogram))
    for input_range in observed:
        input_range._open = input_range._histogram = None
    if not any(has_values):
        return
    # All ranges of a model have one number format and method: separately they would take a dozen tiny kernels each.
    changed = [input_range for input_range, any_values in zip(observed, has_values, strict=True) if any_values]
    new_N2 = ends_N2[torch.tensor(has_values, device=device)]
    before = [each._ends if each._ends is not None else new for each, new in zip(changed, new_N2, strict=True)]
    old_N2 = torch.stack([ends.to(device) for ends in before])
    is_minmax = changed[0].method == "minmax"
    _set_ends(changed, torch.minimum(old_N2, new_N2) if is_minmax else old_N2 + AVERAGING_CONSTANT * (new_N2 - old_N2))


def _reduce_over_ranks(tensor: Tensor, operation: Literal["min", "sum"]) -> Tensor:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor
    device = tensor.device
    if device.type == "cpu" and "gloo" not in dist.get_backend():
        device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    reduced = tensor.to(device, copy=True)
    dist.all_reduce(reduced, op=dist.ReduceOp.MIN if operation == "min" else dist.ReduceOp.SUM)
    return reduced
