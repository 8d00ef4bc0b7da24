"""Modules under ZeRO-3 that use parameters of their children without calling these, or call them several times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def share_with_zero3(modules: Iterable[Any]) -> None:
    """Make ZeRO-3 also gather the children's parameters of modules that use them without calling the children.

    DeepSpeed gathers only the parameters of modules whose forward runs (`register_external_parameter`).
    """
    for module in modules:
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        foreign = [weight for weight in module.parameters() if hasattr(weight, "ds_id") and id(weight) not in own]
        if foreign:
            # `zero` is an attribute of the package, not a module below it.
            import deepspeed

            for parameter in foreign:
                deepspeed.zero.register_external_parameter(module, parameter)


@contextmanager
def without_zero3_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Call the children of a module whose parameters ZeRO-3 has gathered without its hooks, inside the block.

    ZeRO-3 prefetches in the order of modules in earlier steps. Ranks that call children different numbers of times
    would gather in different orders.
    """
    gathered_now = [hasattr(weight, "ds_shape") and weight.shape == weight.ds_shape for weight in module.parameters()]
    children = list(module.modules())[1:] if gathered_now and all(gathered_now) else []
    kinds = [hooks for child in children for hooks in (child._forward_pre_hooks, child._forward_hooks)]
    kept = [hooks.copy() for hooks in kinds]
    for hooks in kinds:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(kinds, kept, strict=True):
            hooks.update(own)
