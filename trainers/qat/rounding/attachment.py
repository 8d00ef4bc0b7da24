"""`Attachment`: the state of a model that rounds, its calibration, and files of activation ranges."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....ds_configs.quantization.layers import LinearLayer
from ....ds_configs.quantization.scheme import ActivationQuantization, QuantizationScheme
from ....ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ....plugins.safetensors.reading import load_tensors, read_header
from ....plugins.safetensors.writing import save_tensors
from .config import KvCacheNumbers, QATConfig
from .layers import INPUT_SCALE, INPUT_ZERO_POINT, LEARNED, LayerQuantizer, QuantizationState
from .observers import InputRange, ObserverMethod, observer_of, synchronise

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ATTRIBUTE = "quantization_attachment"
"""Attribute of a model that holds its `Attachment`."""
PARTS = ("k_scale", "v_scale")
"""Tensors of a rounded KV cache that a checkpoint stores per attention module."""
FORMAT, VERSION = "shardwright-activation-ranges", "1"
_SHOWN = 8


@dataclass(kw_only=True)
class Attachment:
    """Everything that `attach` added to a model."""

    config: QATConfig
    scheme: QuantizationScheme
    """Scheme of the checkpoint; `ignore` also lists what this model keeps dense."""
    stored_dtype: torch.dtype
    """Dtype of scales and unquantized tensors in the checkpoint."""
    state: QuantizationState
    modules: dict[str, Any]
    """Modules that round, by their names in the model."""
    layers: tuple[LinearLayer, ...]
    """Rounded matrices, by their names in the checkpoint."""
    dense: tuple[str, ...] = ()
    """Linear layers and routers that stay dense, by their names in the model without adapters."""
    dense_experts: tuple[str, ...] = ()
    """Prefixes in the checkpoint of experts that stay dense, one per layer."""
    lora_rank: int | None = None
    """Rank of the trained adapter; `None` without one."""
    ranges: dict[str, InputRange] = field(default_factory=dict)
    """Stored ranges by the name of the matrix or of the cache scale; empty if neither scheme nor cache stores any."""

    def quantizers(self) -> Iterator[LayerQuantizer]:
        """Yield the quantizer of each matrix."""
        for module in self.modules.values():
            experts = getattr(module, "quantizers", None)
            yield from (module.quantizer,) if experts is None else experts.values()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Learned scales and zero points, which the optimizer must train."""
        learned = (getattr(module, name, None) for module in self.modules.values() for name in LEARNED)
        return [parameter for parameter in learned if parameter is not None]


def attachment_of(model: Any) -> Attachment | None:
    """Return the attachment of a model, also inside wrappers of DDP, DeepSpeed and `torch.compile`."""
    import torch

    while model is not None:
        attachment: Attachment | None = getattr(model, "__dict__", {}).get(ATTRIBUTE)
        if attachment is not None:
            return attachment
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        model = inner if isinstance(inner, torch.nn.Module) else None
    return None


@contextmanager
def fake_quantization_disabled(model: torch.nn.Module) -> Iterator[None]:
    """Compute in full precision inside the context, e.g. for teacher outputs or a dense evaluation."""
    attachment = attachment_of(model)
    assert attachment is not None, "nothing was attached to this model"
    state = attachment.state
    before, state.enabled = state.enabled, False
    try:
        yield
    finally:
        state.enabled = before


def checkpoint_name(name: str) -> str:
    """Return a module's name without the parts added by PEFT, `torch.compile` and activation checkpointing."""
    plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
    for wrapper in ("._orig_mod", "._checkpoint_wrapped_module"):
        plain = plain.replace(wrapper, "")
    return re.sub(r"\.modules_to_save\.[^.]+", "", plain)


def some_names(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def cache_quantization(numbers: KvCacheNumbers) -> ActivationQuantization:
    """Return the number format of cached keys and values: 8 bits, symmetric, one stored scale per tensor."""
    number_type = "float" if numbers == "fp8" else "int"
    return ActivationQuantization(bits=8, number_type=number_type, symmetric=True, dynamic=False)  # type: ignore[arg-type]


def kv_cache_tensors(attachment: Attachment) -> dict[str, Tensor]:
    """Return `k_scale` and `v_scale` [1] of all attention modules, in the stored dtype, on the CPU.

    Modules have their names in the model, which may differ from those in the checkpoint.

    Raises:
        UsageError: a range has no values yet.
    """
    import torch

    if attachment.config.kv_cache is None:
        return {}
    cpu = torch.device("cpu")
    return {
        name: input_range.on(cpu)[0].clone()
        for name, input_range in attachment.ranges.items()
        if name.rpartition(".")[2] in PARTS
    }


def kv_cache_scheme(config: QATConfig) -> dict[str, object] | None:
    """Return `kv_cache_scheme` of `quantization_config` as compressed-tensors 0.19.0 writes it; `None` without one."""
    if config.kv_cache is None:
        return None
    quantization = cache_quantization(config.kv_cache)
    return {
        "num_bits": quantization.bits,
        "type": quantization.number_type,
        "symmetric": quantization.symmetric,
        "group_size": None,
        "strategy": "tensor",
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "scale_dtype": None,
        "zp_dtype": None,
        "observer": "static_minmax",
        "observer_kwargs": {},
    }


def start_from_ranges(attachment: Attachment) -> None:
    """Initialize learned input ranges with the calibrated values."""
    import torch

    for module in attachment.modules.values():
        values = module.quantizer.input_range.initial_values()
        for name, value in zip((INPUT_SCALE, INPUT_ZERO_POINT), values, strict=True):
            if value is not None:
                with torch.no_grad():
                    getattr(module, name).copy_(value)


def calibrate_inputs(
    model: Any,
    attachment: Attachment,
    batches: Iterable[Any],
    *,
    method: ObserverMethod | None = None,
    rounded_weights: bool = False,
) -> int:
    """Set all stored ranges from a forward pass with each batch, and return the number of batches.

    The pass runs in evaluation mode without gradients. By default nothing is rounded, as in post-training quantization:
    llm-compressor 0.14.0.1 observes with quantization disabled. With `rounded_weights` layers round as in training;
    inputs are rounded to the range of the first batch until the pass ends.

    Args:
        model: The model passed to `attach`; unsharded, on any device.
        attachment: Result of `attach`.
        batches: Mappings of model arguments, or tensors of token ids [B, S]. Every rank needs the same number of them
            if the model is sharded.
        method: Range method; `None`: the scheme's `range_method`.
        rounded_weights: Whether layers round during the pass.

    Raises:
        UsageError: ZeRO-3 has partitioned the weights, there are no batches, or a layer saw no values or values that
            are not finite; all errors together.
    """
    import torch

    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        rule = "ZeRO-3 has partitioned the weights, and calibration needs the full model"
        fix = (
            "load, attach and calibrate in a script without DeepSpeed, save_ranges, then QATCallback(calibration=file)"
        )
        raise UsageError(ConfigError(where="calibrate_inputs", value=type(model).__name__, rule=rule, fix=fix))
    ranges = tuple(attachment.ranges.values())
    observers = [input_range.observer for input_range in ranges]
    for input_range in ranges:
        input_range.observer = observer_of(input_range.quantization, method or input_range.quantization.range_method)
    try:
        device = next(model.parameters()).device
        count = 0
        with _calibrating(model, attachment, rounded_weights=rounded_weights):
            for batch in batches:
                count += 1
                if isinstance(batch, torch.Tensor):
                    model(batch.to(device))
                    continue
                inputs = {name: value for name, value in batch.items() if name != "labels"}
                model(**{name: value.to(device) if hasattr(value, "to") else value for name, value in inputs.items()})
        synchronise(ranges)
        errors = []
        if not count:
            rule = "there must be at least one batch"
            errors.append(ConfigError(where="calibration", value=count, rule=rule))
        for input_range in ranges if count else ():
            layer = input_range.name or "a layer"
            refused = 0 if input_range.observer is None else input_range.observer.refused
            if refused:
                rule = f"{refused} batches of inputs of {layer} contain infinities or NaN"
                fix = "calibrate a model whose logits are finite"
                errors.append(ConfigError(where="calibration", rule=rule, fix=fix))
            elif input_range.bounds is None:
                rule = f"{layer} received no inputs"
                fix = "pass more batches, or add it to ignore: an expert sees only the tokens routed to it"
                errors.append(ConfigError(where="calibration", value=count, rule=rule, fix=fix))
    finally:
        for input_range, observer in zip(ranges, observers, strict=True):
            input_range.continue_with(observer)
    if errors:
        raise UsageError(errors)
    return count


@contextmanager
def _calibrating(model: Any, attachment: Attachment, *, rounded_weights: bool) -> Iterator[None]:
    """Put a model into calibration mode, and restore its modes afterwards."""
    import torch

    state = attachment.state
    modes = {module: module.training for module in model.modules()}
    enabled, observing = state.enabled, state.observing
    model.eval()
    for input_range in attachment.ranges.values():
        input_range.calibrating = True
    state.enabled, state.observing = rounded_weights, True
    try:
        with torch.no_grad():
            yield
    finally:
        state.enabled, state.observing = enabled, observing
        for input_range in attachment.ranges.values():
            input_range.calibrating = False
        for module, mode in modes.items():
            module.training = mode


def save_ranges(path: Path | str, attachment: Attachment, *, method: str | None = None) -> Path:
    """Write all ranges, fp32 [2] by name, with their number formats; return the path.

    Args:
        path: A `.safetensors` file, which is replaced.
        attachment: Result of `attach`, after calibration.
        method: Range method that was used; `None`: the scheme's `range_method`.

    Raises:
        UsageError: a range has no values yet.
        OSError: the file cannot be written.
    """
    import torch

    path = Path(path)
    ranges = {name: input_range.bounds for name, input_range in attachment.ranges.items()}
    empty = [name for name, bounds in ranges.items() if bounds is None]
    if empty or not ranges:
        rule = f"no range is known for {some_names(empty)}" if empty else f"{attachment.scheme.name} stores no ranges"
        fix = "call calibrate_inputs first"
        raise UsageError(ConfigError(where="save_ranges", value=str(path), rule=rule, fix=fix))
    tensors = {name: torch.tensor(bounds, dtype=torch.float32) for name, bounds in ranges.items()}
    activations = attachment.scheme.activations
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "scheme": attachment.scheme.name,
        "method": method or ("minmax" if activations is None else activations.range_method),
        "numbers": json.dumps(_numbers(attachment), sort_keys=True),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, path, metadata)
    return path


def load_ranges(path: Path | str, attachment: Attachment) -> None:
    """Load the ranges that `save_ranges` wrote; on an error nothing changes.

    Raises:
        RefusedInputError: the file has another format, or is damaged.
        UsageError: it belongs to another number format or model; all differences together.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(ConfigError(where="ranges", value=str(path), rule="there is no such file"))
    metadata, tensors = read_header(path).metadata, load_tensors(path)
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        written = f"format {metadata.get('format')!r}, version {metadata.get('version')!r}"
        rule = f"was not written by save_ranges ({written})"
        raise RefusedInputError(ConfigError(where="ranges", value=str(path), rule=rule))
    ranges, errors = {}, []
    for name, tensor in tensors.items():
        low, high = tensor.tolist() if tuple(tensor.shape) == (2,) else (math.nan, math.nan)
        if not (math.isfinite(low) and math.isfinite(high) and low <= 0 <= high):
            rule = "a range must be two finite numbers with 0 between them"
            errors.append(ConfigError(where=f"{path}: {name}", value=tensor.tolist(), rule=rule))
        ranges[name] = (low, high)
    if errors:
        raise RefusedInputError(errors)
    stored = json.loads(metadata.get("numbers", "{}"))
    errors = [
        ConfigError(where=f"{path}: {name}", value=stored.get(name), rule=f"{attachment.scheme.name} needs {value}")
        for name, value in _numbers(attachment).items()
        if stored.get(name) != value
    ]
    missing = [name for name in attachment.ranges if name not in ranges]
    foreign = [name for name in ranges if name not in attachment.ranges]
    fix = "calibrate this model with this scheme again"
    if missing:
        errors.append(ConfigError(where=str(path), rule=f"contains no range for {some_names(missing)}", fix=fix))
    if foreign:
        rule = f"contains ranges of layers that are not rounded: {some_names(foreign)}"
        errors.append(ConfigError(where=str(path), rule=rule, fix=fix))
    if errors:
        raise UsageError(errors)
    for name, (low, high) in ranges.items():
        attachment.ranges[name].set_bounds(low, high)
        attachment.ranges[name].continue_with(attachment.ranges[name].observer)


def _numbers(attachment: Attachment) -> dict[str, object]:
    """Return the number formats of the ranges, without the method that produced a range."""
    activations = attachment.scheme.activations
    numbers = None
    if activations is not None and attachment.scheme.activations_are_static:
        numbers = asdict(activations)
        del numbers["range_method"], numbers["percentile"]
    return {"activations": numbers, "kv_cache": attachment.config.kv_cache}
