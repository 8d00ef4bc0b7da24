"""From gathered parameters to the tensors of a checkpoint: trained codes packed, everything else as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ....ds_configs.quantization.layers import LinearLayer
from ....ds_configs.specs.errors import Fault, RefusedInputError, UsageError
from ....plugins.compressed_tensors.codes import StoredLayer, pack_tensors
from ....plugins.transformers.checkpoint_model import checkpoint_module_names, checkpoint_tensors, stays_in_fp32
from ..rounding.attachment import Attachment, checkpoint_name
from ..rounding.fake_quantized_linear import merged_weight
from ..rounding.kv_cache import PARTS, kv_cache_tensors
from ..rounding.layers import LEARNED
from ..rounding.lora import is_lora_linear

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from ..rounding.layers import LayerQuantizer

_SHOWN = 8


@dataclass(kw_only=True)
class Collected:
    """Parameters of a model in the form that its checkpoint holds."""

    packed: dict[str, Tensor] = field(default_factory=dict)
    """Codes, scales and all that belongs to them, by their names in the checkpoint."""
    dense: dict[str, Tensor] = field(default_factory=dict)
    """Everything else in the checkpoint's type, by its name in the model without adapters."""
    adapter: dict[str, Tensor] = field(default_factory=dict)
    """Adapters that stay beside a quantized base, by their names in the model."""
    trained: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Parameters that the packed form took the place of, for each module by its name in the model; for verification."""
    not_finite: list[str] = field(default_factory=list)
    """Tensors with NaN or infinite numbers."""
    dropped: list[str] = field(default_factory=list)
    """Adapters that no forward pass used."""
    unmerged: list[str] = field(default_factory=list)
    """Adapters that a forward pass used and that cannot be merged."""

    def raise_faults(self) -> None:
        """Refuse what must not be written.

        Raises:
            RefusedInputError: numbers are not finite, or adapters have no place; names all of them.
        """
        faults = []
        for names, rule, fix in (
            (self.not_finite, "tensors with NaN or infinite numbers", "export an earlier checkpoint of the training"),
            (self.unmerged, "adapters that cannot be merged into a matrix", "train with lora = on_quantized_base"),
        ):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                rule = f"has {len(names)} {rule}: {', '.join(names[:_SHOWN])}{more}"
                faults.append(Fault(where="model", rule=rule, fix=fix))
        if faults:
            raise RefusedInputError(faults)


class Collector:
    """Takes whole parameters one by one, and packs a module as soon as all of its own are there."""

    def __init__(
        self, model: Any, attachment: Attachment, *, root: Any, device: torch.device, keep_trained: bool
    ) -> None:
        """Prepare.

        Args:
            model: As it was trained, with adapters if it has any.
            attachment: What rounds in it.
            root: The Transformers model in it.
            device: The training's.
            keep_trained: Whether to keep what is packed in the training's own type too.
        """
        self.found = Collected()
        self._attachment, self._root, self._keep = attachment, root, keep_trained
        self._device = device
        self._names = module_names(attachment, root)
        self._owners: dict[str, tuple[str, str]] = {}
        self._waiting: dict[str, set[str]] = {}
        self._arrived: dict[str, dict[str, Tensor]] = {}
        self._modules = dict(_packed_modules(model, attachment))
        self._active = set(active_adapters(model))
        self._rounded = {id(module): name for name, module in attachment.modules.items()}
        for name, module in self._modules.items():
            own = consumed(module)
            self._waiting[name], self._arrived[name] = set(own), {}
            self._owners |= {f"{name}.{relative}": (name, relative) for relative in own}

    def take(self, name: str, tensor: Tensor) -> None:
        """Take one whole parameter or buffer by its name in the model."""
        if name not in self._owners:
            self._take_dense(name, tensor)
            return
        module, relative = self._owners[name]
        self._arrived[module][relative] = tensor
        self._waiting[module].discard(relative)
        if not self._waiting[module]:
            self._complete(module, self._arrived.pop(module))

    def incomplete(self) -> Exception | None:
        """Return the error of modules whose parameters did not all come, as they are shared with another module."""
        lacking = [f"{name}.{relative}" for name, waited in self._waiting.items() for relative in sorted(waited)]
        if not lacking:
            return None
        rule = f"shares {', '.join(lacking[:_SHOWN])} with other modules, which one packed matrix cannot do"
        return UsageError(Fault(where="model", rule=rule, fix="ignore these layers, or untie them"))

    def _complete(self, name: str, parameters: dict[str, Tensor]) -> None:
        infinite = [f"{name}.{relative}" for relative, one in parameters.items() if not _finite(one)]
        if infinite:
            self.found.not_finite += infinite
            return
        module = self._modules[name]
        parameters = _learned_as_seen(module, parameters)
        # Products and sums of an accelerator differ from the host's in the last bit: round where it was trained.
        placed = {relative: one.to(self._device) for relative, one in parameters.items()}
        if id(module) not in self._rounded:
            weight = forward_weight(module, placed)
            self._keep_dense(plain_name(f"{name}.weight"), weight)
            return
        for key, layer in module.stored_layers(placed).items():
            self._pack(quantizer_of(module, key), layer)
        if self._keep:
            self.found.trained[self._rounded[id(module)]] = parameters

    def _pack(self, quantizer: LayerQuantizer, layer: StoredLayer) -> None:
        name = self._names[quantizer.name]
        parts = (("weight_scale", layer.scale), ("input_scale", layer.input_scale))
        infinite = [f"{name}.{part}" for part, scale in parts if scale is not None and not _finite(scale)]
        if infinite:
            self.found.not_finite += infinite
            return
        zero, input_scale, input_zero = layer.zero_point, layer.input_scale, layer.input_zero_point
        tensors = pack_tensors(name, layer.codes, layer.scale, zero, quantizer.scheme, input_scale, input_zero)
        self.found.packed |= {part: tensor.cpu() for part, tensor in tensors.items()}

    def _take_dense(self, name: str, tensor: Tensor) -> None:
        beside = self._attachment.config.lora == "on_quantized_base"
        parts = name.split(".")
        if any(part.startswith("lora_") for part in parts):
            if beside:
                self.found.adapter[name] = tensor
            elif self._active & set(parts):
                self.found.unmerged.append(name)
            else:
                self.found.dropped.append(name)
        elif "modules_to_save" in parts:
            if beside:
                self.found.adapter[name] = tensor
            elif self._active & set(parts):
                self._keep_dense(plain_name(name), tensor)
        elif "original_module" not in parts or beside:
            self._keep_dense(plain_name(name), tensor)

    def _keep_dense(self, name: str, tensor: Tensor) -> None:
        import torch

        kept = tensor
        if tensor.is_floating_point() and not (tensor.dtype == torch.float32 and stays_in_fp32(self._root, name)):
            kept = tensor.to(self._attachment.stored_dtype)
        if not _finite(kept):
            self.found.not_finite.append(name)
        self.found.dense[name] = _own_storage(kept.cpu())


def collect(
    tensors: Iterable[tuple[str, Tensor | None]], collector: Collector | None
) -> tuple[Collected, Exception | None]:
    """Take all of a model on the first rank, where `collector` is; every rank must call it.

    Returns:
        What was found, empty on other ranks, and the error that ended the work: gathering goes on, because the other
        ranks do.
    """
    import torch

    failure: Exception | None = None
    for name, tensor in tensors:
        if collector is None or tensor is None or failure is not None:
            continue
        try:
            with torch.no_grad():
                collector.take(name, tensor)
        except Exception as error:
            failure = error
    if collector is None:
        return Collected(), failure
    return collector.found, failure or collector.incomplete()


def checkpoint_contents(found: Collected, attachment: Attachment, root: Any) -> dict[str, Tensor]:
    """Return all tensors of the checkpoint by their names in it, layers in their order."""
    dense = {name: _own_storage(tensor) for name, tensor in checkpoint_tensors(root, found.dense).items()}
    everything = dense | found.packed | _cache_tensors(attachment, root)
    return {name: everything[name] for name in sorted(everything, key=_natural)}


def quantized_layers(attachment: Attachment, root: Any) -> tuple[LinearLayer, ...]:
    """Return the matrices that are packed, by their names in the checkpoint."""
    names = module_names(attachment, root)
    return tuple(replace(layer, name=names[layer.name]) for layer in attachment.layers)


def dense_layers(attachment: Attachment, root: Any) -> list[str]:
    """Return what loaders must not quantize: linear layers and routers that stay dense, and experts as patterns.

    Names are those of the checkpoint, and of the model where they differ.
    """
    found = checkpoint_module_names(root, attachment.dense)
    experts = [entry for name in attachment.dense_experts for entry in (name, rf"re:{re.escape(name)}\.")]
    return list(dict.fromkeys([*(found[name] for name in attachment.dense), *attachment.dense, *experts]))


def module_names(attachment: Attachment, root: Any) -> dict[str, str]:
    """Return the checkpoint's names of packed matrices by their quantizers' names, which experts have already."""
    experts = {layer.name for layer in attachment.layers if layer.is_expert}
    linear = [layer.name for layer in attachment.layers if layer.name not in experts]
    return checkpoint_module_names(root, linear) | {name: name for name in experts}


def quantizer_of(module: Any, key: str) -> LayerQuantizer:
    """Return how a matrix of a module is rounded, by its relative name."""
    found: LayerQuantizer = module.quantizers[key] if key else module.quantizer
    return found


def consumed(module: Any) -> tuple[str, ...]:
    """Return the relative names of parameters that end in one matrix, such as a weight and its adapter."""
    found = getattr(module, "consumed", None)
    if found is not None:
        return tuple(found)
    adapter = module.active_adapters[0]
    return ("base_layer.weight", f"lora_A.{adapter}.weight", f"lora_B.{adapter}.weight")


def _learned_as_seen(module: Any, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return learned scales and zero points in the type of the forward pass: 3.4999 rounds to 3, and to 4 in bf16."""
    seen = getattr(getattr(module, "quantizer", None), "forward_dtype", None)
    return {name: one.to(seen) if seen and name in LEARNED else one for name, one in parameters.items()}


def forward_weight(module: Any, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the matrix [O, I] of a linear layer as its forward pass has it before rounding, adapter included."""
    seen = getattr(getattr(module, "quantizer", None), "forward_dtype", None)
    wanted = ("weight",) if "weight" in parameters else consumed(module)[:3]
    parts = [parameters[name] for name in wanted]
    if seen is not None and parts[0].dtype != seen:
        parts = [part.to(seen) for part in parts]
    if len(parts) == 1:
        return parts[0]
    weight, a, b = parts
    return merged_weight(weight, a, b, module.scaling[module.active_adapters[0]])


def active_adapters(model: Any) -> list[str]:
    """Return the adapters that forward passes use; PEFT has a property where Transformers has a method."""
    if not hasattr(model, "peft_config"):
        return []
    found = model.active_adapters
    return list(found() if callable(found) else found)


def plain_name(name: str) -> str:
    """Return a parameter's or module's name in the Transformers model, without what adapters put into it."""
    return checkpoint_name(re.sub(r"\.modules_to_save\.[^.]+|\.original_module", "", name))


def _packed_modules(model: Any, attachment: Attachment) -> Iterator[tuple[str, Any]]:
    """Yield modules whose parameters become one thing: rounded ones, and LoRA around a layer that stays dense."""
    rounded = set(map(id, attachment.modules.values()))
    merged = attachment.config.lora == "merged"
    for name, module in model.named_modules():
        around_dense = merged and is_lora_linear(module) and len(module.active_adapters) == 1
        if id(module) in rounded or (around_dense and not module.lora_variant):
            yield name, module


def _cache_tensors(attachment: Attachment, root: Any) -> dict[str, Tensor]:
    found = kv_cache_tensors(attachment)
    modules = checkpoint_module_names(root, {name.rpartition(".")[0] for name in found})
    assert all(name.rpartition(".")[2] in PARTS for name in found), "scales of keys and values alone"
    return {f"{modules[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": one for name, one in found.items()}


def _finite(tensor: Tensor) -> bool:
    import torch

    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _own_storage(tensor: Tensor) -> Tensor:
    """ZeRO keeps parameters as views of one buffer, and safetensors writes no tensors that share memory."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
