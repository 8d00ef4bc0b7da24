"""`Attachment`: the state of a model that rounds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ....ds_configs.quantization.layers import LinearLayer
from ....ds_configs.quantization.scheme import QuantizationScheme
from .config import QATConfig
from .layers import LEARNED, LayerQuantizer, QuantizationState
from .observers import InputRange

if TYPE_CHECKING:
    import torch

ATTRIBUTE = "quantization_attachment"
"""Attribute of a model that holds its `Attachment`."""
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
