"""Turns gathered parameters into the tensors of a checkpoint: packed codes, and dense tensors unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ....ds_configs.quantization.layers import LinearLayer
from ....ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ....plugins.compressed_tensors.codes import pack_tensors
from ....plugins.transformers.checkpoint_tensors import checkpoint_module_names, checkpoint_tensors, stays_in_fp32
from ..rounding.attach import Attachment, checkpoint_name
from ..rounding.layers import LEARNED, forward_weight, is_lora_linear, lora_matrices, some_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..rounding.layers import LayerQuantizer


@dataclass(kw_only=True)
class Collected:
    """Parameters of a model in the form of its checkpoint."""

    attachment: Attachment
    root: PreTrainedModel
    """The Transformers model, without wrappers of adapters."""
    device: torch.device
    """Device of the training: products and sums differ between accelerator and CPU in the last bit."""
    keep_trained: bool
    """Whether `trained` is filled."""
    packed: dict[str, Tensor] = field(default_factory=dict)
    """Codes, scales and zero points, by their names in the checkpoint."""
    dense: dict[str, Tensor] = field(default_factory=dict)
    """All other tensors in the stored dtype, by their names in the model without adapters."""
    trained: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Parameters that packed tensors replace, by module name in the model; for verification."""
    not_finite: list[str] = field(default_factory=list)
    """Tensors with NaN or infinity."""
    dropped: list[str] = field(default_factory=list)
    """Adapters that no forward pass used."""
    unmerged: list[str] = field(default_factory=list)
    """Adapters that forward passes used and that cannot be merged."""

    def add_all(self, tensors: Mapping[str, Tensor], model: Any) -> None:
        """Collect all parameters and buffers of a model, by their names in it.

        Raises:
            UsageError: a packed module shares parameters with another one, which are gathered once.
            RefusedInputError: tensors with NaN or infinity, or active adapters that cannot be merged; names them.
        """
        remaining, missing = dict(tensors), []
        rounded = {id(module): name for name, module in self.attachment.modules.items()}
        names = module_names(self.attachment, self.root)
        for name, module in model.named_modules():
            is_mergeable = is_lora_linear(module) and len(module.active_adapters) == 1 and not module.lora_variant
            if id(module) not in rounded and not is_mergeable:
                continue
            # A plain LoRA layer is merged, a rounding module lists what its packed form replaces.
            own = getattr(module, "consumed", None) or lora_matrices(module)
            missing += [f"{name}.{relative}" for relative in own if f"{name}.{relative}" not in remaining]
            if not missing:
                parameters = {relative: remaining.pop(f"{name}.{relative}") for relative in own}
                self._add_module(name, module, parameters, rounded.get(id(module)), names)
        if missing:
            rule = f"other modules share {some_names(missing)}, and a packed matrix cannot be shared"
            raise UsageError(ConfigError(where="model", rule=rule, fix="ignore these layers, or untie them"))
        active = set(active_adapters(model))
        for name, tensor in remaining.items():
            parts = name.split(".")
            is_lora = any(part.startswith("lora_") for part in parts)
            is_adapted = is_lora or "modules_to_save" in parts
            if is_adapted and not active & set(parts):
                self.dropped += [name] if is_lora else []
            elif is_lora:
                self.unmerged.append(name)
            elif "original_module" not in parts:
                self._add_dense(checkpoint_name(name), tensor)
        self._raise_errors()

    def _raise_errors(self) -> None:
        errors = []
        for names, rule, fix in (
            (self.not_finite, "tensors with NaN or infinite numbers", "export an earlier checkpoint of the run"),
            (self.unmerged, "adapters that cannot be merged into a matrix", "train plain LoRA of linear layers"),
        ):
            if names:
                errors.append(ConfigError(where="model", rule=f"has {len(names)} {rule}: {some_names(names)}", fix=fix))
        if errors:
            raise RefusedInputError(errors)

    def _add_module(
        self, name: str, module: Any, parameters: dict[str, Tensor], rounded: str | None, names: Mapping[str, str]
    ) -> None:
        """Pack a module that rounds, whose name in the attachment is `rounded`, or merge the adapter of another."""
        infinite = [f"{name}.{relative}" for relative, tensor in parameters.items() if not _finite(tensor)]
        if infinite:
            self.not_finite += infinite
            return
        # Learned scales in the dtype of the forward pass: 3.4999 rounds to 3, but in bf16 to 4.
        dtype = getattr(getattr(module, "quantizer", None), "forward_dtype", None)
        if dtype is not None:
            parameters = {key: value.to(dtype) if key in LEARNED else value for key, value in parameters.items()}
        placed = {relative: tensor.to(self.device) for relative, tensor in parameters.items()}
        if rounded is None:
            self._add_dense(checkpoint_name(f"{name}.weight"), forward_weight(module, placed))
            return
        for key, layer in module.stored_layers(placed).items():
            quantizer = quantizer_of(module, key)
            stored_name = names[quantizer.name]
            scales = {"weight_scale": layer.scale, "input_scale": layer.input_scale}
            infinite = [f"{stored_name}.{part}" for part, scale in scales.items() if not _finite(scale)]
            self.not_finite += infinite
            if not infinite:
                parts = (layer.codes, layer.scale, layer.zero_point)
                inputs = (layer.input_scale, layer.input_zero_point)
                packed = pack_tensors(stored_name, *parts, quantizer.scheme, *inputs)
                self.packed |= {part: tensor.cpu() for part, tensor in packed.items()}
        if self.keep_trained:
            self.trained[rounded] = parameters

    def _add_dense(self, name: str, tensor: Tensor) -> None:
        import torch

        if tensor.is_floating_point() and not (tensor.dtype == torch.float32 and stays_in_fp32(self.root, name)):
            tensor = tensor.to(self.attachment.stored_dtype)
        if not _finite(tensor):
            self.not_finite.append(name)
        self.dense[name] = _own_storage(tensor.cpu())

    def contents(self) -> dict[str, Tensor]:
        """Return all tensors of the checkpoint by their names in it, ordered by layer."""
        dense = checkpoint_tensors(self.root, self.dense)
        tensors = {name: _own_storage(tensor) for name, tensor in dense.items()} | self.packed

        def natural(name: str) -> list[tuple[int, str]]:
            return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

        return {name: tensors[name] for name in sorted(tensors, key=natural)}


def quantized_layers(attachment: Attachment, root: PreTrainedModel) -> tuple[LinearLayer, ...]:
    """Return the packed matrices by their names in the checkpoint."""
    names = module_names(attachment, root)
    return tuple(replace(layer, name=names[layer.name]) for layer in attachment.layers)


def dense_layers(attachment: Attachment, root: PreTrainedModel) -> list[str]:
    """Return what loaders must not quantize: dense linear layers and routers.

    Names are those of the checkpoint, and those of the model where they differ.
    """
    names = checkpoint_module_names(root, attachment.dense)
    return list(dict.fromkeys([*(names[name] for name in attachment.dense), *attachment.dense]))


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


def _finite(tensor: Tensor | None) -> bool:
    import torch

    return tensor is None or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _own_storage(tensor: Tensor) -> Tensor:
    """Copy views of a shared buffer, such as ZeRO's: safetensors cannot write tensors that share memory."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
