"""Names of tensors in a Hugging Face checkpoint; models without ZeRO-3's influence, and modules under ZeRO-3."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from .. import patches

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel


def checkpoint_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return some tensors of a model, tied ones once, with the names and splits of its checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion

    ignored = set(model._keys_to_ignore_on_save or ())
    saved = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    return dict(revert_weight_conversion(model, saved))


def checkpoint_module_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return the names of modules in a checkpoint by their names in the model."""
    import torch

    stored_names = {}
    for name in names:
        renamed = checkpoint_tensors(model, {f"{name}.weight": torch.empty(0)})
        stored_names[name] = next(iter(renamed), f"{name}.weight").removesuffix(".weight")
    return stored_names


def stays_in_fp32(model: PreTrainedModel, name: str) -> bool:
    """Return whether a 16-bit checkpoint keeps a tensor in fp32, such as the bias of a router."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"(^|\.){re.escape(pattern)}(\.|$)", name) for pattern in patterns)


def model_class(model: torch.nn.Module) -> type[Any]:
    """Return the class of a model without the class that FSDP2 adds."""
    from torch.distributed.fsdp import FSDPModule

    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def without_zero3() -> AbstractContextManager[None]:
    """Return a context in which models are built and loaded unsharded, as if no ZeRO-3 configuration existed.

    Transformers reads one configuration per process, the trained model's, for every model.
    """
    return patches.applied("zero3-while-loading", lambda _: None, resets=True)


def empty_model(made_by: type[Any], config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """Return an unsharded model of this rank, whose weights are not loaded yet.

    Mixtures run their experts one after the other: fused experts are summed in another order.
    """
    from transformers import initialization

    with without_zero3(), initialization.no_init_weights():
        return made_by._from_config(config, dtype=dtype, experts_implementation="eager").eval()


@contextmanager
def plain_linear() -> Iterator[None]:
    """Make linear layers compute as in a new process.

    Under `zero.Init`, deepspeed 0.19.8 replaces ``torch.nn.functional.linear`` by a function that adds the bias after
    rounding the product; `TrainingArguments(tf32=True)` rounds the factors of fp32 products.
    """
    import torch

    precision = torch.get_float32_matmul_precision()
    with patches.applied("plain-linear", lambda _: torch._C._nn.linear):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


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
