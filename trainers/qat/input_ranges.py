"""Stored ranges of activations: one for each matrix that rounds its inputs, and for keys and values of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

from ...ds_configs.errors import Fault, UsageError
from ...ds_configs.quantization.scheme import ActivationQuantization
from ...plugins.compressed_tensors import code_range, range_scale_and_zero_point
from ...plugins.quantized_cache import float8_scale
from ...plugins.recomputation import in_backward_pass
from .observers import METHODS, ObserverMethod, RangeObserver, Reduction, close_step, observer_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .attach import Attachment
    from .config import InputRanges

_WAYS = (
    "give QATCallback(calibration=batches), call calibrate_inputs or load_ranges before training, or let observers "
    "find ranges with ranges = moving_average"
)


class InputRange:
    """The range of what comes into one matrix, and the scale and zero point that a checkpoint stores of it.

    A plain object beside the parameters: nothing of it is in a state dict. Low and high are kept in fp32; the scale is
    rounded to the stored type before anything is computed with it.
    """

    def __init__(
        self,
        quantization: ActivationQuantization,
        *,
        method: InputRanges = "calibrated",
        stored_dtype: torch.dtype,
        name: str = "",
    ) -> None:
        """Create a range that is not known yet.

        Args:
            quantization: Numbers that inputs are rounded to; ranges are stored.
            method: Where the range comes from; `calibrated` and `learned` ones are not observed while training runs.
            stored_dtype: Type of scales in the checkpoint.
            name: Of the matrix, for messages.
        """
        self.quantization = quantization
        self.stored_dtype = stored_dtype
        self.name = name
        self.observer: RangeObserver | None = None
        """Sees inputs while training or calibration runs; `None` where the range stays as it is."""
        if method in METHODS:
            self.observer = observer_of(quantization, cast(ObserverMethod, method))
        self._bounds: tuple[Tensor, Tensor] | None = None
        self._stored: tuple[Tensor, Tensor | None] | None = None

    @property
    def scale(self) -> Tensor | None:
        """[1] in the stored type; `None` before anything was seen. A new tensor whenever the range moves."""
        found = self._known()
        return None if found is None else found[0]

    @property
    def zero_point(self) -> Tensor | None:
        """int8 [1]; `None` if symmetric."""
        found = self._known()
        return None if found is None else found[1]

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Least and largest value of the range; `None` before all ranks agreed on one."""
        return None if self._bounds is None else (float(self._bounds[0]), float(self._bounds[1]))

    def on(self, device: Any) -> tuple[Tensor, Tensor | None]:
        """Return scale and zero point on a device, where they stay.

        Raises:
            UsageError: the range is not known yet.
        """
        found = self._known()
        if found is None:
            rule = "is not known, and the layer is to round its inputs"
            raise UsageError(Fault(where=f"input range of {self.name or 'a layer'}", rule=rule, fix=_WAYS))
        scale, zero_point = found
        if scale.device != device:
            zero_point = None if zero_point is None else zero_point.to(device)
            self._stored = scale.to(device), zero_point
        assert self._stored is not None, "a known range is stored"
        return self._stored

    def observe(self, inputs: Tensor) -> None:
        """See the inputs of a forward pass; a pass that gradient checkpointing repeats is not counted again."""
        if self.observer is None or in_backward_pass():
            return
        import torch

        device = inputs.device.type
        if torch.is_autocast_enabled(device):
            inputs = inputs.detach().to(torch.get_autocast_dtype(device))
        self.observer.add(inputs)

    def set_bounds(self, low: Tensor | float, high: Tensor | float) -> None:
        """Take a range, which is extended to hold 0."""
        import torch

        ends = [torch.as_tensor(end, dtype=torch.float32).detach().reshape(1) for end in (low, high)]
        zero = torch.zeros_like(ends[0])
        self._bounds = torch.minimum(ends[0], zero), torch.maximum(ends[1], zero)
        self._stored = self._stored_numbers(*self._bounds)

    def initial_values(self) -> tuple[Tensor, Tensor | None]:
        """Return what a learned scale and zero point start from, fp32 [1] each: neither is rounded yet.

        Rounded, they are the stored ones: ``z = -2^(b-1) - low / scale`` with the stored scale, clamped to the codes.

        Raises:
            UsageError: the range is not known yet.
        """
        import torch

        scale, zero_point = self.on(self._bounds[0].device if self._bounds else torch.device("cpu"))
        if self._bounds is None or zero_point is None or self.quantization.number_type == "float":
            return scale.float(), None if zero_point is None else zero_point.float()
        least, largest = code_range(self.quantization.bits)
        low, high = self._bounds
        exact, _ = range_scale_and_zero_point(
            low, high, bits=self.quantization.bits, symmetric=False, stored_dtype=torch.float32
        )
        return exact, (least - low / scale.float()).clamp(least, largest)

    def record(self) -> dict[str, Any]:
        """Return what a resumed run must know, as JSON holds it; fp32 numbers are exact there."""
        found: dict[str, Any] = {"bounds": None if self.bounds is None else list(self.bounds)}
        return found if self.observer is None else found | self.observer.record()

    def take_up(self, record: Mapping[str, Any]) -> None:
        """Go on from a record."""
        if record["bounds"] is not None:
            self.set_bounds(*record["bounds"])
            if self.observer is not None and self._bounds is not None:
                self.observer.start_from(*self._bounds)
        if self.observer is not None:
            self.observer.take_up(dict(record))

    def follow(self) -> None:
        """Take the range that the observer has found, if it has any."""
        found = None if self.observer is None else self.observer.range()
        if found is not None:
            self.set_bounds(*found)

    def _known(self) -> tuple[Tensor, Tensor | None] | None:
        # Before the first step ends, a layer that rounds already takes the range of what this rank has seen of it.
        if self._stored is None and self.observer is not None:
            found = self.observer.local_range()
            if found is not None:
                self._stored = self._stored_numbers(*found)
        return self._stored

    def _stored_numbers(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.quantization.number_type == "float":
            return float8_scale(low, high, self.stored_dtype), None
        return range_scale_and_zero_point(
            low,
            high,
            bits=self.quantization.bits,
            symmetric=self.quantization.symmetric,
            stored_dtype=self.stored_dtype,
        )


def synchronise(ranges: Iterable[InputRange], *, reduction: Reduction | None = None) -> None:
    """Close an optimizer step: all ranks agree on what it saw, and observed ranges move.

    Every rank must call it with the same layers in the same order, also after steps that overflowed.

    Args:
        ranges: All ranges of a model; those without an observer stay as they are.
        reduction: Over ranks; `None` for the default process group, if there is one.
    """
    observed = [one for one in ranges if one.observer is not None]
    close_step([one.observer for one in observed if one.observer is not None], reduction or _over_ranks)
    for one in observed:
        one.follow()


def _over_ranks(tensor: Tensor, operation: Literal["min", "sum"]) -> Tensor:
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


def calibrate_inputs(
    model: Any,
    attachment: Attachment,
    batches: Iterable[Any],
    *,
    method: ObserverMethod | None = None,
    rounded_weights: bool = False,
) -> int:
    """Fill all stored ranges from a pass over batches, without gradients and in evaluation mode; return their number.

    By default nothing rounds meanwhile, as in post-training quantization: llm-compressor 0.14.0.1 observes with
    quantization disabled. With `rounded_weights` layers round as they will in training, their inputs to the range of
    the first batch until the pass is over.

    Args:
        model: What `attach` was given; whole, on any device.
        attachment: What `attach` returned.
        batches: Mappings of the model's arguments, or tensors of token ids [B, S]. All ranks need the same number of
            them if the model is sharded.
        method: How ranges are found; `None` for the scheme's `range_method`.
        rounded_weights: Whether layers round while the pass runs.

    Raises:
        UsageError: ZeRO-3 has partitioned the weights, there are no batches, or a layer saw nothing or no finite
            numbers; all faults at once.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        rule = "ZeRO-3 has partitioned the weights, and ranges are found on a whole model"
        fix = "load, attach and calibrate in a script without DeepSpeed, save_ranges, then QATCallback(calibration=file)"
        raise UsageError(Fault(where="calibrate_inputs", value=type(model).__name__, rule=rule, fix=fix))
    ranges = attachment.ranges
    before = {name: one.observer for name, one in ranges.items()}
    for one in ranges.values():
        one.observer = observer_of(one.quantization, method or one.quantization.range_method)
    try:
        with _calibrating(model, attachment, rounded_weights=rounded_weights):
            count = _run(model, batches)
        synchronise(ranges.values())
        faults = _calibration_faults(ranges, count)
        for one in ranges.values():
            _finish(one)
    finally:
        for name, one in ranges.items():
            one.observer = before[name]
    if faults:
        raise UsageError(faults)
    for one in ranges.values():
        if one.observer is not None and one.bounds is not None:
            one.observer.start_from(*(_tensor(end) for end in one.bounds))
    return count
