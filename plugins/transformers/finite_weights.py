"""Weights that are not finite, by name, under every engine: each rank looks at the part that it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, RefusedInputError

if TYPE_CHECKING:
    from torch import Tensor

_ELEMENTS_AT_ONCE = 2**24
_SHOWN = 3
NONFINITE_FIX = "train it again, fetch a sound copy, or --allow-nonfinite where a command has it"


def nonfinite_weights(model: Any) -> list[str]:
    """Return the names of parameters and buffers whose part on this rank holds NaN or infinity."""
    return [name for name, tensor in _tensors(model) if not is_finite(local_part(tensor))]


def nonfinite_gradients(model: Any) -> list[str]:
    """Return the names of parameters whose gradient on this rank holds NaN or infinity, where gradients are kept."""
    kept = ((name, one.grad) for name, one in model.named_parameters() if one.grad is not None)
    return [name for name, gradient in kept if not is_finite(local_part(gradient))]


def local_part(tensor: Any) -> Tensor:
    """Return what this rank holds of a tensor that ZeRO-3 or FSDP2 divide; a whole one as it is."""
    partition = getattr(tensor, "ds_tensor", None)
    if partition is not None:
        found: Tensor = partition.detach()
        return found
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_finite(tensor: Tensor) -> bool:
    """Tell whether every element is a number; elements that are no floating-point numbers are."""
    import torch

    if not tensor.is_floating_point() or tensor.device.type == "meta":
        return True
    # 8-bit formats have no isfinite of their own.
    parts = (part.float() if part.element_size() == 1 else part for part in tensor.reshape(-1).split(_ELEMENTS_AT_ONCE))
    return all(bool(torch.isfinite(part).all()) for part in parts)


def refuse_nonfinite_weights(model: Any, *, what: str, allowed: bool = False) -> None:
    """Refuse a model with weights that are not finite, on all ranks when one rank finds them; every rank must call it.

    Raises:
        RefusedInputError: there are some; names up to three of them, and the ranks that hold them.
    """
    if allowed:
        return
    found = {rank: names for rank, names in enumerate(gathered(nonfinite_weights(model))) if names}
    if not found:
        return
    everywhere = sorted({name for names in found.values() for name in names})
    ranks = ", ".join(str(rank) for rank in found)
    rule = f"holds NaN or infinity in {shortened(everywhere)} (rank {ranks})"
    raise RefusedInputError(Fault(where=what, rule=rule, fix=NONFINITE_FIX))


def shortened(names: list[str]) -> str:
    """Return some names and how many there are besides.

    >>> shortened(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def gathered(mine: Any) -> list[Any]:
    """Return an object of every rank; every rank must call it."""
    import torch.distributed as distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return [mine]
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, mine)
    return everyone


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    # bitsandbytes 0.50.2 packs 4-bit codes into tensors of any type, of which they are no numbers.
    codes = {f"{path}.weight" for path, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
    yield from ((name, one) for name, one in model.named_parameters() if name not in codes)
    # Masks hold infinities on purpose; they are not saved.
    unsaved = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name not in unsaved)
