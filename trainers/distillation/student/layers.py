"""Layers of a teacher that a student keeps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....ds_configs.specs.errors import ConfigError, UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_POSITION = re.compile(r"layer_(idx|index|id|number)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStack:
    """The list of layers of a model."""

    path: str
    """Name of the list, without the prefix of the base model."""
    count: int
    base_prefix: str
    """Attribute of the base model in models with a head; checkpoints may omit it."""

    def canonical(self, name: str) -> str:
        """Return a tensor's or module's name without the prefix of the base model."""
        return name.removeprefix(f"{self.base_prefix}.") if self.base_prefix else name

    def layer_of(self, name: str) -> int | None:
        match = re.match(rf"{re.escape(self.path)}\.(\d+)\.", self.canonical(name))
        return int(match[1]) if match else None

    def renamed(self, name: str, kept: Sequence[int]) -> str | None:
        """Return a tensor's name in the student, or `None` if its layer is removed."""
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


def layer_stack(model: PreTrainedModel) -> LayerStack:
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
        rule = "layers and widths can be reduced only in models with one plain stack of layers"
        raise UsageError(ConfigError(where="teacher", value=type(model).__name__, rule=rule))
    prefix = model.base_model_prefix
    path = outer[0].removeprefix(f"{prefix}.") if prefix else outer[0]
    return LayerStack(path=path, count=total, base_prefix=prefix)


def unlike_layers(
    teacher: PreTrainedModel, student: PreTrainedModel, stack: LayerStack, kept: Sequence[int]
) -> list[ConfigError]:
    """Return an error for each layer of a student of the same widths that is built differently from the teacher's."""
    errors = []
    teacher_modules, student_modules = (
        {stack.canonical(name): module for name, module in model.named_modules()} for model in (teacher, student)
    )
    for new, old in enumerate(kept):
        before = _structure(teacher_modules[f"{stack.path}.{old}"])
        after = _structure(student_modules[f"{stack.path}.{new}"])
        if before != after:
            name = min(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
            difference = f"{name}: {before.get(name)} and {after.get(name)}"
            rule = f"would become layer {new}, which this family builds differently ({difference})"
            fix = "keep full periods of the layer pattern with --keep-layers"
            errors.append(ConfigError(where="layer", value=old, rule=rule, fix=fix))
    return errors


def _structure(layer: torch.nn.Module) -> dict[str, object]:
    """Return the shapes of a layer and the plain attributes of its modules, except its position."""
    values: dict[str, object] = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    for name, module in layer.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, bool | int | float | str) and not key.startswith("_") and not _POSITION.search(key):
                values[f"{name}.{key}".lstrip(".")] = value
    return values
