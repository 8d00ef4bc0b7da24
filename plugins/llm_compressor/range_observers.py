"""Observers of llm-compressor that find static activation ranges by the methods of `plugins/activations/ranges.py`.

llm-compressor 0.14.0.1 looks an observer up by the name in `QuantizationArgs.observer` (`observers/base.py`,
`modifiers/quantization/calibration.py`), so these are registered beside its own and the same engine runs them.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from ...ds_configs.quantization.scheme import KNOWN_RANGES, ActivationQuantization, RangeMethod
from ..activations.histogram import ActivationHistogram
from ..activations.ranges import activation_range

_PREFIX = "shardwright_"


def observer_name(activations: ActivationQuantization) -> tuple[str, dict[str, Any]]:
    """Return the registered name and the `observer_kwargs` for a static range, and register the observers.

    MinMax is llm-compressor's own `static_minmax`; its default, `minmax`, is a moving average of batches.
    """
    if activations.range_method == "minmax":
        return "static_minmax", {}
    register_range_observers()
    options = {"percentile": activations.percentile} if activations.range_method == "percentile" else {}
    return f"{_PREFIX}{activations.range_method}", options


@functools.cache
def register_range_observers() -> tuple[str, ...]:
    """Make the observers known to llm-compressor, once, and return their names."""
    names = []
    for method in KNOWN_RANGES:
        if method != "minmax":
            _register(method)
            names.append(f"{_PREFIX}{method}")
    return tuple(names)


def forget_range_observers(model: Any) -> None:
    """Take our observers' names out of a model's schemes, so that the saved config names none that others lack.

    compressed-tensors 0.19.0 accepts any text as `observer` and looks nothing up when it loads, but llm-compressor
    raises `KeyError` when it meets an unknown one, for instance when such a checkpoint is quantized again.
    """
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        arguments = getattr(scheme, "input_activations", None)
        if arguments is not None and str(arguments.observer or "").startswith(_PREFIX):
            arguments.observer = "static_minmax"
            arguments.observer_kwargs = {}


def quantization_of(arguments: Any, method: RangeMethod) -> ActivationQuantization:
    """Return our words for compressed-tensors' `QuantizationArgs` of an activation.

    Raises:
        ValueError: the arguments ask for more than one static range for the tensor.
    """
    strategy = str(getattr(arguments.strategy, "value", arguments.strategy))
    if strategy != "tensor" or arguments.dynamic:
        found = "dynamic" if arguments.dynamic else strategy
        raise ValueError(f"range method {method} finds one static range for a tensor; the scheme asks for {found} ones")
    plain = ActivationQuantization(
        bits=arguments.num_bits,
        number_type="float" if getattr(arguments.type, "value", arguments.type) == "float" else "int",
        symmetric=arguments.symmetric,
        dynamic=False,
        range_method=method,
    )
    percentile = (arguments.observer_kwargs or {}).get("percentile")
    return plain if percentile is None else replace(plain, percentile=float(percentile))


def _register(method: RangeMethod) -> None:
    import torch
    from llmcompressor.observers import Observer

    class HistogramObserver(Observer):
        """Collects a histogram and finds the range when the scale is asked for."""

        _stats_attrs = ["histogram"]  # noqa: RUF012

        def __init__(self, base_name: str, args: Any, **options: Any) -> None:
            super().__init__(base_name, args, **options)
            self.quantization = quantization_of(self.args, method)

        def update_statistics_from_observed(self, observed: Any) -> None:
            if not self.has_statistics:
                self.histogram = ActivationHistogram()
            self.histogram.add(observed)
            self.device = observed.device

        def get_qparams(self) -> Any:
            found = activation_range(self.histogram, self.quantization)
            self.min_vals = torch.tensor([found.low], dtype=torch.float32, device=self.device)
            self.max_vals = torch.tensor([found.high], dtype=torch.float32, device=self.device)
            return super().get_qparams()

        def sync_activation_stats(self) -> list[Any]:
            raise RuntimeError(f"range method {method} calibrates on one process; start it without torchrun")

    Observer.register_value(HistogramObserver, name=f"{_PREFIX}{method}")
