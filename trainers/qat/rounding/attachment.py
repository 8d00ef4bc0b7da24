"""`Attachment`: all that `attach` put into a model, found again through wrappers; names as checkpoints have them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ....ds_configs.quantization.layers import LinearLayer
from ....ds_configs.quantization.scheme import QuantizationScheme
from .config import QATConfig
from .input_ranges import InputRange
from .layers import LEARNED, LayerQuantizer

if TYPE_CHECKING:
    import torch

ATTRIBUTE = "quantization_attachment"
"""Of a model that rounds: its `Attachment`."""


@dataclass(kw_only=True, slots=True)
class QuantizationState:
    """Progress of quantization-aware training; one object for all layers of a model."""

    enabled: bool = False
    """Whether forward passes round."""
    bits: int | None = None
    """Bits of a weight at this step; `None`: those of the scheme."""
    observing: bool = False
    """Whether training forward passes widen or move the ranges of activations."""
    trained_steps: int = 0
    """Optimizer steps that were taken with rounded numbers at the scheme's own bits."""

    @property
    def was_enabled(self) -> bool:
        """Whether the model was trained with the numbers that are exported."""
        return self.trained_steps > 0


@dataclass(kw_only=True)
class Attachment:
    """Rounding that was put into a model."""

    config: QATConfig
    """What was asked for."""
    scheme: QuantizationScheme
    """The numbers of the checkpoint, with all that this model leaves out in `ignore`."""
    stored_dtype: torch.dtype
    """Type of scales and of everything that is not quantized in the checkpoint."""
    state: QuantizationState
    """Where training stands."""
    modules: dict[str, Any]
    """Modules that round, by their names in the model."""
    layers: tuple[LinearLayer, ...]
    """Matrices that are rounded, by their names in the checkpoint."""
    dense: tuple[str, ...] = ()
    """Linear layers and routers that stay dense, by their names in the model without adapters."""
    dense_experts: tuple[str, ...] = ()
    """Where a checkpoint has the experts that stay dense, layer by layer."""
    lora_rank: int | None = None
    """Rank of the adapter that is trained; `None` without one."""
    ranges: dict[str, InputRange] = field(default_factory=dict)
    """Stored ranges by the name of the matrix, or of a cache's scale; empty unless the scheme or the cache has them."""

    def quantizers(self) -> Iterator[LayerQuantizer]:
        """Yield how each matrix is rounded."""
        for module in self.modules.values():
            found = getattr(module, "quantizers", None)
            yield from found.values() if found is not None else (module.quantizer,)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters that were added, which the optimizer must know."""
        found = (getattr(module, name, None) for module in self.modules.values() for name in LEARNED)
        return [parameter for parameter in found if parameter is not None]


def attachment_of(model: Any) -> Attachment | None:
    """Return what `attach` put into a model, looked for through the wrappers of DDP, DeepSpeed and `torch.compile`."""
    import torch

    while model is not None:
        found: Attachment | None = getattr(model, "__dict__", {}).get(ATTRIBUTE)
        if found is not None:
            return found
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        model = inner if isinstance(inner, torch.nn.Module) else None
    return None


@contextmanager
def fake_quantization_disabled(model: Any) -> Iterator[None]:
    """Let a model compute in full precision, as for a teacher's answers or a dense evaluation."""
    attachment = attachment_of(model)
    assert attachment is not None, "nothing was attached to this model"
    state = attachment.state
    before, state.enabled = state.enabled, False
    try:
        yield
    finally:
        state.enabled = before


def checkpoint_name(name: str) -> str:
    """Return a module's name without what PEFT, `torch.compile` and activation checkpointing put into it."""
    plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
    for wrapper in ("._orig_mod", "._checkpoint_wrapped_module"):
        plain = plain.replace(wrapper, "")
    return re.sub(r"\.modules_to_save\.[^.]+", "", plain)
