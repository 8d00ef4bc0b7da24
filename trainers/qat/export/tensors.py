"""Collects gathered parameters into the tensors of a checkpoint: packed codes, and dense tensors unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ....ds_configs.quantization.layers import LinearLayer
from ....ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ....plugins.compressed_tensors.codes import pack_tensors
from ....plugins.transformers.checkpoint_tensors import checkpoint_module_names, checkpoint_tensors, stays_in_fp32
from ..rounding.attachment import Attachment, checkpoint_name, some_names
from ..rounding.layers import LEARNED, forward_weight, is_lora_linear, lora_matrices

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..rounding.layers import LayerQuantizer


@dataclass(kw_only=True)
class Collected:
    """Parameters of a model in the form of its checkpoint."""

    packed: dict[str, Tensor] = field(default_factory=dict)
    """Codes, scales and zero points, by their names in the checkpoint."""
    dense: dict[str, Tensor] = field(default_factory=dict)
    """All other tensors in the stored dtype, by their names in the model without adapters."""
    adapter: dict[str, Tensor] = field(default_factory=dict)
    """Adapters that are not merged into the quantized base, by their names in the model."""
    trained: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Parameters that packed tensors replace, by module name in the model; for verification."""
    not_finite: list[str] = field(default_factory=list)
    """Tensors with NaN or infinity."""
    dropped: list[str] = field(default_factory=list)
    """Adapters that no forward pass used."""
    unmerged: list[str] = field(default_factory=list)
    """Adapters that forward passes used and that cannot be merged."""

    def raise_errors(self) -> None:
        """Raise all errors that forbid writing the checkpoint.

        Raises:
            RefusedInputError: tensors with NaN or infinity, or active adapters that cannot be merged; names them.
        """
        errors = []
        for names, rule, fix in (
            (self.not_finite, "tensors with NaN or infinite numbers", "export an earlier checkpoint of the run"),
            (self.unmerged, "adapters that cannot be merged into a matrix", "train with lora = on_quantized_base"),
        ):
            if names:
                errors.append(ConfigError(where="model", rule=f"has {len(names)} {rule}: {some_names(names)}", fix=fix))
        if errors:
            raise RefusedInputError(errors)


class Collector:
    """Receives full parameters one by one, and packs a module as soon as all of its parameters have arrived."""

    def __init__(
        self, model: Any, attachment: Attachment, *, root: PreTrainedModel, device: torch.device, keep_trained: bool
    ) -> None:
        """Find the modules to pack.

        Args:
            model: Trained model, with its adapters.
            attachment: Its attachment.
            root: The Transformers model inside it.
            device: Device of the training.
            keep_trained: Whether to keep the trained parameters of packed modules.
        """
        self.collected = Collected()
        self._attachment, self._root, self._keep = attachment, root, keep_trained
        self._device = device
        self._names = module_names(attachment, root)
        self._owners: dict[str, tuple[str, str]] = {}
        self._waiting: dict[str, set[str]] = {}
        self._arrived: dict[str, dict[str, Tensor]] = {}
        self._modules: dict[str, Any] = {}
        self._active = set(active_adapters(model))
        self._rounded = {id(module): name for name, module in attachment.modules.items()}
        merged = attachment.config.lora == "merged"
        for name, module in model.named_modules():
            is_mergeable = merged and is_lora_linear(module) and len(module.active_adapters) == 1
            if id(module) in self._rounded or (is_mergeable and not module.lora_variant):
                # A plain LoRA layer is merged, a rounding module lists what its packed form replaces.
                own = getattr(module, "consumed", None) or lora_matrices(module)
                self._modules[name] = module
                self._waiting[name], self._arrived[name] = set(own), {}
                self._owners |= {f"{name}.{relative}": (name, relative) for relative in own}

    def take(self, name: str, tensor: Tensor) -> None:
        """Collect a full parameter or buffer by its name in the model."""
        if name in self._owners:
            module, relative = self._owners[name]
            self._arrived[module][relative] = tensor
            self._waiting[module].discard(relative)
            if not self._waiting[module]:
                self._pack_module(module, self._arrived.pop(module))
            return
        parts = name.split(".")
        keeps_adapter = self._attachment.config.lora == "on_quantized_base"
        is_lora = any(part.startswith("lora_") for part in parts)
        if is_lora or "modules_to_save" in parts:
            if keeps_adapter:
                self.collected.adapter[name] = tensor
            elif not self._active & set(parts):
                self.collected.dropped += [name] if is_lora else []
            elif is_lora:
                self.collected.unmerged.append(name)
            else:
                self._keep_dense(plain_name(name), tensor)
        elif "original_module" not in parts or keeps_adapter:
            self._keep_dense(plain_name(name), tensor)

    def incomplete(self) -> Exception | None:
        """Return the error of modules that share parameters with another module, which arrive only once."""
        missing = [f"{name}.{relative}" for name, waiting in self._waiting.items() for relative in sorted(waiting)]
        if not missing:
            return None
        rule = f"other modules share {some_names(missing)}, and a packed matrix cannot be shared"
        return UsageError(ConfigError(where="model", rule=rule, fix="ignore these layers, or untie them"))

    def _pack_module(self, name: str, parameters: dict[str, Tensor]) -> None:
        infinite = [f"{name}.{relative}" for relative, tensor in parameters.items() if not _finite(tensor)]
        if infinite:
            self.collected.not_finite += infinite
            return
        module = self._modules[name]
        # Learned scales in the dtype of the forward pass: 3.4999 rounds to 3, but in bf16 to 4.
        dtype = getattr(getattr(module, "quantizer", None), "forward_dtype", None)
        if dtype is not None:
            parameters = {key: value.to(dtype) if key in LEARNED else value for key, value in parameters.items()}
        # Products and sums differ between accelerator and CPU in the last bit: round on the device of the training.
        placed = {relative: tensor.to(self._device) for relative, tensor in parameters.items()}
        if id(module) not in self._rounded:
            self._keep_dense(plain_name(f"{name}.weight"), forward_weight(module, placed))
            return
        for key, layer in module.stored_layers(placed).items():
            quantizer = quantizer_of(module, key)
            stored_name = self._names[quantizer.name]
            scales = {"weight_scale": layer.scale, "input_scale": layer.input_scale}
            infinite = [f"{stored_name}.{part}" for part, scale in scales.items() if not _finite(scale)]
            if infinite:
                self.collected.not_finite += infinite
                continue
            tensors = pack_tensors(
                stored_name,
                layer.codes,
                layer.scale,
                layer.zero_point,
                quantizer.scheme,
                layer.input_scale,
                layer.input_zero_point,
            )
            self.collected.packed |= {part: tensor.cpu() for part, tensor in tensors.items()}
        if self._keep:
            self.collected.trained[self._rounded[id(module)]] = parameters

    def _keep_dense(self, name: str, tensor: Tensor) -> None:
        import torch

        if tensor.is_floating_point() and not (tensor.dtype == torch.float32 and stays_in_fp32(self._root, name)):
            tensor = tensor.to(self._attachment.stored_dtype)
        if not _finite(tensor):
            self.collected.not_finite.append(name)
        self.collected.dense[name] = _own_storage(tensor.cpu())


def collect(
    tensors: Iterable[tuple[str, Tensor | None]], collector: Collector | None
) -> tuple[Collected, Exception | None]:
    """Collect all tensors of a model on the first rank, which has the `collector`; every rank must call it.

    Returns:
        The collected tensors, empty on other ranks, and the first error: gathering continues after an error, because
        the other ranks take part in it.
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
    return collector.collected, failure or collector.incomplete()


def checkpoint_contents(collected: Collected, root: PreTrainedModel) -> dict[str, Tensor]:
    """Return all tensors of the checkpoint by their names in it, ordered by layer."""
    tensors = {name: _own_storage(tensor) for name, tensor in checkpoint_tensors(root, collected.dense).items()}
    tensors |= collected.packed

    def natural(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

    return {name: tensors[name] for name in sorted(tensors, key=natural)}


def quantized_layers(attachment: Attachment, root: PreTrainedModel) -> tuple[LinearLayer, ...]:
    """Return the packed matrices by their names in the checkpoint."""
    names = module_names(attachment, root)
    return tuple(replace(layer, name=names[layer.name]) for layer in attachment.layers)


def dense_layers(attachment: Attachment, root: PreTrainedModel) -> list[str]:
    """Return what loaders must not quantize: dense linear layers and routers by name, and dense experts by pattern.

    Names are those of the checkpoint, and those of the model where they differ.
    """
    names = checkpoint_module_names(root, attachment.dense)
    experts = [entry for name in attachment.dense_experts for entry in (name, rf"re:{re.escape(name)}\.")]
    return list(dict.fromkeys([*(names[name] for name in attachment.dense), *attachment.dense, *experts]))


def module_names(attachment: Attachment, root: PreTrainedModel) -> dict[str, str]:
    """Return the checkpoint names of packed matrices by their quantizers' names, which are equal for experts."""
    experts = {layer.name for layer in attachment.layers if layer.is_expert}
    linear = [layer.name for layer in attachment.layers if layer.name not in experts]
    return checkpoint_module_names(root, linear) | {name: name for name in experts}


def quantizer_of(module: Any, key: str) -> LayerQuantizer:
    """Return the quantizer of a module's matrix by its relative name."""
    quantizer: LayerQuantizer = module.quantizers[key] if key else module.quantizer
    return quantizer


def active_adapters(model: Any) -> list[str]:
    """Return the adapters that forward passes use; PEFT has a property where Transformers has a method."""
    if not hasattr(model, "peft_config"):
        return []
    names = model.active_adapters
    return list(names() if callable(names) else names)


def plain_name(name: str) -> str:
    """Return a parameter's or module's name in the Transformers model without adapters."""
    return checkpoint_name(re.sub(r"\.modules_to_save\.[^.]+|\.original_module", "", name))


def _finite(tensor: Tensor | None) -> bool:
    import torch

    return tensor is None or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _own_storage(tensor: Tensor) -> Tensor:
    """Copy views of a shared buffer, such as ZeRO's: safetensors cannot write tensors that share memory."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
