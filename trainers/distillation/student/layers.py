"""Layers of a teacher that a student keeps, and the changes of config and tensor names that follow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....ds_configs.shrink.layers import LAYER_COUNTS
from ....ds_configs.specs.errors import Fault, UsageError

_LAYER_INDICES = ("mlp_only_layers", "moe_layers", "attn_layer_indices", "cross_attention_layers", "hybrid_layer_ids")
_THRESHOLDS = ("first_k_dense_replace", "max_window_layers")
_NOT_PER_LAYER = re.compile(r"token_(ids?|index)$|architectures$|_indexes$|dims$")
_POSITION = re.compile(r"layer_(idx|index|id|number)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStack:
    """The one list of layers of a model."""

    path: str
    """Name of the list, without the prefix of the base model."""
    count: int
    """Layers in it."""
    base_prefix: str
    """Attribute that holds the base model in models with a head; checkpoints may leave it out."""

    def canonical(self, name: str) -> str:
        """Return a tensor's or module's name without the prefix of the base model."""
        return name.removeprefix(f"{self.base_prefix}.") if self.base_prefix else name

    def layer_of(self, name: str) -> int | None:
        """Return the number of the layer that a tensor belongs to."""
        match = re.match(rf"{re.escape(self.path)}\.(\d+)\.", self.canonical(name))
        return int(match[1]) if match else None

    def renamed(self, name: str, kept: Sequence[int]) -> str | None:
        """Return a tensor's name in the student, or `None` when its layer is left out."""
        layer = self.layer_of(name)
        if layer is None:
            return name
        if layer not in kept:
            return None
        start = len(name) - len(self.canonical(name)) + len(self.path) + 1
        return f"{name[:start]}{kept.index(layer)}{name[start + len(str(layer)) :]}"


def uniform_layers(total: int, kept: int) -> tuple[int, ...]:
    """Return `kept` of `total` layers, evenly spread: i ↦ round(i · (total - 1) / (kept - 1)), halves rounded up.

    The first and the last layer stay; a single layer is the first.

    >>> uniform_layers(12, 4)
    (0, 4, 7, 11)
    """
    assert 1 <= kept <= total
    if kept == 1:
        return (0,)
    return tuple((2 * index * (total - 1) + kept - 1) // (2 * (kept - 1)) for index in range(kept))


def layer_stack(model: Any) -> LayerStack:
    """Return the stack of layers of a Transformers model.

    Raises:
        UsageError: the model has none, several (an encoder and a decoder, text and vision), or nested ones.
    """
    from torch.nn import ModuleList

    config = model.config
    total: int = getattr(config, "num_hidden_layers", 0)
    lists = [name for name, module in model.named_modules() if isinstance(module, ModuleList) and len(module) == total]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1 or getattr(config, "is_encoder_decoder", False) or config.get_text_config() is not config:
        rule = "layers and widths can only be cut from a model with one plain stack of layers"
        raise UsageError(Fault(where="teacher", value=type(model).__name__, rule=rule))
    prefix = model.base_model_prefix
    path = outer[0].removeprefix(f"{prefix}.") if prefix else outer[0]
    return LayerStack(path=path, count=total, base_prefix=prefix)


def layer_changes(config: Mapping[str, Any], kept: Sequence[int], total: int) -> dict[str, Any]:
    """Return the fields of a config, given with all its defaults, that change when only layers `kept` stay."""
    changes: dict[str, Any] = {}
    for name, value in config.items():
        if name in _LAYER_INDICES and isinstance(value, list):
            changes[name] = [new for new, old in enumerate(kept) if old in value]
        elif isinstance(value, list) and len(value) == total and not _NOT_PER_LAYER.search(name):
            changes[name] = [value[layer] for layer in kept]
        elif name in _THRESHOLDS and isinstance(value, int) and not isinstance(value, bool):
            changes[name] = sum(layer < value for layer in kept)
        elif name in LAYER_COUNTS and value == total:
            changes[name] = len(kept)
    return changes


def unlike_layers(teacher: Any, student: Any, stack: LayerStack, kept: Sequence[int]) -> list[Fault]:
    """Return a fault for each layer of a student of the same widths that is built otherwise than the teacher's."""
    faults = []
    for new, old in enumerate(kept):
        before, after = (_fingerprint(_layer(model, stack, index)) for model, index in ((teacher, old), (student, new)))
        if before != after:
            rule = f"would become layer {new}, which this family builds otherwise ({_difference(before, after)})"
            fix = "keep layers in whole periods of the pattern with --keep-layers"
            faults.append(Fault(where="layer", value=old, rule=rule, fix=fix))
    return faults


def _layer(model: Any, stack: LayerStack, index: int) -> Any:
    names = {stack.canonical(name): module for name, module in model.named_modules()}
    return names[f"{stack.path}.{index}"]


def _fingerprint(layer: Any) -> dict[str, Any]:
    """Return the shapes of a layer and the plain values that its modules hold, but for its position."""
    found: dict[str, Any] = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    for name, module in layer.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, bool | int | float | str) and not key.startswith("_") and not _POSITION.search(key):
                found[f"{name}.{key}".lstrip(".")] = value
    return found


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    name = min(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return f"{name}: {before.get(name)} and {after.get(name)}"
