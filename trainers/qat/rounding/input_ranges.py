"""Stored ranges of activations: one for each matrix that rounds its inputs, and for keys and values of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

from ....ds_configs.quantization.scheme import ActivationQuantization
from ....ds_configs.specs.errors import Fault, UsageError
from ....plugins.accelerate.recomputation import in_backward_pass
from ....plugins.compressed_tensors.codes import code_range, range_scale_and_zero_point
from ....plugins.compressed_tensors.quantized_cache import float8_scale
from .observers import METHODS, ObserverMethod, RangeObserver, Reduction, close_step, observer_of
from .range_files import load_ranges as load_ranges
from .range_files import save_ranges as save_ranges

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .attachment import Attachment
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
        self.calibrating = False
        """Whether a pass over calibration batches is running, which is in evaluation mode."""
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
            import torch

            # Autograd refuses to save what was made in inference mode.
            with torch.inference_mode(False):
                self._stored = scale.to(device), None if zero_point is None else zero_point.to(device)
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

        _take([self], *(torch.as_tensor(end, dtype=torch.float32).detach().reshape(1) for end in (low, high)))

    def initial_values(self) -> tuple[Tensor, Tensor | None]:
        """Return what a learned scale and zero point start from, fp32 [1] each: the stored ones before rounding.

        Raises:
            UsageError: the range is not known yet.
        """
        import torch

        stored, zero_point = self.on(torch.device("cpu"))
        if self._bounds is None or self.quantization.number_type == "float":
            return stored.float(), None if zero_point is None else zero_point.float()
        low, high = (end.cpu() for end in self._bounds)
        bits, symmetric = self.quantization.bits, self.quantization.symmetric
        exact, _ = range_scale_and_zero_point(low, high, bits=bits, symmetric=symmetric, stored_dtype=torch.float32)
        # Ranges of nothing but zeros, or nearly so, have the scale that the stored type can hold at all.
        scale = torch.where(exact.to(stored.dtype) == stored, exact, stored.float())
        if zero_point is None:
            return scale, None
        least, largest = code_range(bits)
        place = (least - low / stored.float()).clamp(least, largest)
        return scale, torch.where(place.round() == zero_point, place, zero_point.float())

    def record(self) -> dict[str, Any]:
        """Return what a resumed run must know, as JSON holds it; fp32 numbers are exact there."""
        found: dict[str, Any] = {"bounds": None if self.bounds is None else list(self.bounds)}
        return found if self.observer is None else found | self.observer.record()

    def take_up(self, record: Mapping[str, Any]) -> None:
        """Go on from a record."""
        if record["bounds"] is not None:
            self.set_bounds(*record["bounds"])
        self.continue_with(self.observer)
        if self.observer is not None:
            self.observer.take_up(record)

    def continue_with(self, observer: RangeObserver | None) -> None:
        """Let another observer go on from the range that is known."""
        self.observer = observer
        if observer is not None and self._bounds is not None:
            observer.start_from(*self._bounds)

    def _known(self) -> tuple[Tensor, Tensor | None] | None:
        # Before the first step ends, a layer that rounds already takes the range of what this rank has seen of it.
        if self._stored is None and self.observer is not None:
            found = self.observer.local_range()
            if found is not None:
                self._stored = _stored_numbers(*found, self.quantization, self.stored_dtype)
        return self._stored


def _stored_numbers(
    low: Tensor, high: Tensor, quantization: ActivationQuantization, stored_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    if quantization.number_type == "float":
        return float8_scale(low, high, stored_dtype), None
    return range_scale_and_zero_point(
        low, high, bits=quantization.bits, symmetric=quantization.symmetric, stored_dtype=stored_dtype
    )


def _take(ranges: Sequence[InputRange], low_N: Tensor, high_N: Tensor) -> None:
    """Give each range its ends; all of them are of the same numbers."""
    import torch

    with torch.inference_mode(False), torch.no_grad():
        zero = low_N.new_zeros(())
        low_N, high_N = torch.minimum(low_N, zero), torch.maximum(high_N, zero)
        scale_N, zero_point_N = _stored_numbers(low_N, high_N, ranges[0].quantization, ranges[0].stored_dtype)
        for place, one in enumerate(ranges):
            own = slice(place, place + 1)
            one._bounds = low_N[own], high_N[own]
            one._stored = scale_N[own], None if zero_point_N is None else zero_point_N[own]


def synchronise(ranges: Iterable[InputRange], *, reduction: Reduction | None = None) -> None:
    """Close an optimizer step: all ranks agree on what it saw, and observed ranges move.

    Every rank must call it with the same layers in the same order, also after steps that overflowed.

    Args:
        ranges: All ranges of a model; those without an observer stay as they are.
        reduction: Over ranks; `None` for the default process group, if there is one.
    """
    import torch

    observed = [one for one in ranges if one.observer is not None]
    close_step([one.observer for one in observed if one.observer is not None], reduction or _over_ranks)
    together: dict[Any, list[tuple[InputRange, Tensor, Tensor]]] = {}
    for one in observed:
        found = None if one.observer is None else one.observer.range()
        if found is not None:
            kind = (one.quantization, one.stored_dtype, found[0].device)
            together.setdefault(kind, []).append((one, *found))
    for part in together.values():
        moved, low, high = zip(*part, strict=True)
        _take(moved, torch.cat(low), torch.cat(high))


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
        fix = (
            "load, attach and calibrate in a script without DeepSpeed, save_ranges, then QATCallback(calibration=file)"
        )
        raise UsageError(Fault(where="calibrate_inputs", value=type(model).__name__, rule=rule, fix=fix))
    ranges = tuple(attachment.ranges.values())
    before = [one.observer for one in ranges]
    for one in ranges:
        one.observer = observer_of(one.quantization, method or one.quantization.range_method)
    try:
        with _calibrating(model, attachment, rounded_weights=rounded_weights):
            count = _run(model, batches)
        synchronise(ranges)
        faults = _calibration_faults(ranges, count)
    finally:
        for one, observer in zip(ranges, before, strict=True):
            one.continue_with(observer)
    if faults:
        raise UsageError(faults)
    return count


@contextmanager
def _calibrating(model: Any, attachment: Attachment, *, rounded_weights: bool) -> Iterator[None]:
    import torch

    state = attachment.state
    modes = {module: module.training for module in model.modules()}
    enabled, observing = state.enabled, state.observing
    model.eval()
    for one in attachment.ranges.values():
        one.calibrating = True
    state.enabled, state.observing = rounded_weights, True
    try:
        with torch.no_grad():
            yield
    finally:
        state.enabled, state.observing = enabled, observing
        for one in attachment.ranges.values():
            one.calibrating = False
        for module, mode in modes.items():
            module.training = mode


def _run(model: Any, batches: Iterable[Any]) -> int:
    import torch

    device = next(model.parameters()).device
    count = 0
    for batch in batches:
        count += 1
        if isinstance(batch, torch.Tensor):
            model(batch.to(device))
            continue
        arguments = {name: value for name, value in batch.items() if name != "labels"}
        model(**{name: value.to(device) if hasattr(value, "to") else value for name, value in arguments.items()})
    return count


def _calibration_faults(ranges: Iterable[InputRange], count: int) -> list[Fault]:
    where = "calibration"
    if not count:
        return [Fault(where=where, value=count, rule="there must be at least one batch")]
    faults = []
    for one in ranges:
        refused = 0 if one.observer is None else one.observer.refused
        if refused:
            rule = f"{refused} batches of inputs of {one.name or 'a layer'} hold infinities or NaN"
            faults.append(Fault(where=where, rule=rule, fix="calibrate a model whose logits are finite"))
        elif one.bounds is None:
            rule = f"{one.name or 'a layer'} was never reached"
            fix = "give more batches, or add it to ignore: experts see the tokens of their router alone"
            faults.append(Fault(where=where, value=count, rule=rule, fix=fix))
    return faults
