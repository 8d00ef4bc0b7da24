"""`Attachment`: the state of a model that rounds, its calibration, and files of activation ranges."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....ds_configs.quantization.layers import LinearLayer
from ....ds_configs.quantization.scheme import QuantizationScheme
from ....ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ....plugins.safetensors.reading import load_tensors, read_header
from ....plugins.safetensors.writing import save_tensors
from .config import QATConfig
from .layers import LEARNED, LayerQuantizer, QuantizationState
from .observers import InputRange, synchronise

if TYPE_CHECKING:
    import torch

ATTRIBUTE = "quantization_attachment"
"""Attribute of a model that holds its `Attachment`."""
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
    """Stored ranges by the name of the matrix; empty if the scheme stores none."""

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


def calibrate_inputs(model: Any, attachment: Attachment, batches: Iterable[Any]) -> int:
    """Set all stored ranges from a forward pass with each batch, and return the number of batches.

    The pass runs in evaluation mode without gradients or rounding, as in post-training quantization. Ranges cover all
    values, or the percentiles of a scheme with `range_method="percentile"`.

    Args:
        model: The model passed to `attach`; unsharded, on any device.
        attachment: Result of `attach`.
        batches: Mappings of model arguments, or tensors of token ids [B, S]. Every rank needs the same number of them
            if the model is sharded.

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
    state, device, count = attachment.state, next(model.parameters()).device, 0
    modes = {module: module.training for module in model.modules()}
    methods = {input_range: input_range.method for input_range in attachment.ranges.values()}
    for input_range in methods:
        is_percentile = input_range.quantization.range_method == "percentile"
        input_range.restart("percentile" if is_percentile else "minmax")
    enabled, state.enabled, state.calibrating = state.enabled, False, True
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                count += 1
                if isinstance(batch, torch.Tensor):
                    model(batch.to(device))
                    continue
                inputs = {name: value for name, value in batch.items() if name != "labels"}
                model(**{name: value.to(device) if hasattr(value, "to") else value for name, value in inputs.items()})
        synchronise(methods)
    finally:
        state.enabled, state.calibrating = enabled, False
        for module, mode in modes.items():
            module.training = mode
        for input_range, method in methods.items():
            input_range.method = method
    errors = []
    if not count:
        errors.append(ConfigError(where="calibration", value=count, rule="there must be at least one batch"))
    for input_range in methods if count else ():
        layer = input_range.name or "a layer"
        if input_range.refused:
            rule = f"{input_range.refused} batches of inputs of {layer} contain infinities or NaN"
            fix = "calibrate a model whose logits are finite"
            errors.append(ConfigError(where="calibration", rule=rule, fix=fix))
        elif input_range.bounds is None:
            rule = f"{layer} received no inputs"
            fix = "pass more batches, or add it to ignore: an expert sees only the tokens routed to it"
            errors.append(ConfigError(where="calibration", value=count, rule=rule, fix=fix))
    if errors:
        raise UsageError(errors)
    return count


def save_ranges(path: Path | str, attachment: Attachment) -> Path:
    """Write all ranges, fp32 [2] by name, with their number format; return the path.

    Args:
        path: A `.safetensors` file, which is replaced.
        attachment: Result of `attach`, after calibration.

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
    metadata = {"format": FORMAT, "version": VERSION, "numbers": json.dumps(_numbers(attachment))}
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
    if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
        rule = f"was not written by save_ranges, version {VERSION}"
        raise RefusedInputError(ConfigError(where="ranges", value=str(path), rule=rule))
    stored, wanted, errors = json.loads(metadata.get("numbers", "{}")), _numbers(attachment), []
    if stored != wanted:
        rule = f"{attachment.scheme.name} needs {wanted}"
        errors.append(ConfigError(where=f"{path}: numbers", value=stored, rule=rule))
    missing = [name for name in attachment.ranges if name not in tensors]
    foreign = [name for name in tensors if name not in attachment.ranges]
    for rule, names in (
        ("contains no range for", missing),
        ("contains ranges of layers that are not rounded:", foreign),
    ):
        if names:
            fix = "calibrate this model with this scheme again"
            errors.append(ConfigError(where=str(path), rule=f"{rule} {some_names(names)}", fix=fix))
    if errors:
        raise UsageError(errors)
    for name, tensor in tensors.items():
        attachment.ranges[name].set_bounds(*tensor.tolist())


def _numbers(attachment: Attachment) -> dict[str, object]:
    """Return the number format of the ranges, without the method that produced a range."""
    activations = attachment.scheme.activations
    numbers = {} if activations is None else asdict(activations)
    return {name: value for name, value in numbers.items() if name not in ("range_method", "percentile")}
