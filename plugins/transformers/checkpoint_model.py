"""A model as its checkpoint has it: names that `save_pretrained` writes, and an empty copy to load numbers into.

Seen with transformers 5.17.0: `from_pretrained` renames and merges what a checkpoint holds, such as the experts of a
mixture, and `save_pretrained` takes that back (`core_model_loading.py`, `revert_weight_conversion`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def checkpoint_tensors(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model under the names, and in the parts, that its checkpoint has.

    Args:
        model: Transformers model.
        tensors: Some or all of its state dict, tied ones once.
    """
    from transformers.core_model_loading import revert_weight_conversion

    ignored = set(model._keys_to_ignore_on_save or ())
    kept = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    found: dict[str, Tensor] = revert_weight_conversion(model, kept)
    return found


def checkpoint_module_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the names of modules in a checkpoint by their names in the model."""
    import torch

    found = {}
    for name in names:
        renamed = checkpoint_tensors(model, {f"{name}.weight": torch.empty(0)})
        found[name] = next(iter(renamed), f"{name}.weight").removesuffix(".weight")
    return found


def stays_in_fp32(model: Any, name: str) -> bool:
    """Return whether a checkpoint of 16 bits keeps a tensor in fp32, such as the bias of a router."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"(^|\.){re.escape(pattern)}(\.|$)", name) for pattern in patterns)


def model_class(model: Any) -> type[Any]:
    """Return the class that a model was before FSDP2 put one of its own in front."""
    from torch.distributed.fsdp import FSDPModule

    return next(found for found in type(model).__mro__ if not issubclass(found, FSDPModule))


def empty_model(made_by: type[Any], config: Any, dtype: torch.dtype) -> Any:
    """Return a whole model on this rank alone, whose weights are still to be loaded.

    Mixtures run their experts one after the other: fused they add up in another order.
    """
    from transformers import initialization

    with _not_partitioned(), initialization.no_init_weights():
        return made_by._from_config(config, dtype=dtype, experts_implementation="eager").eval()


@contextmanager
def plain_linear() -> Iterator[None]:
    """Let linear layers compute as in a fresh process.

    deepspeed 0.19.8 replaces ``torch.nn.functional.linear`` for the whole process under `zero.Init`, by a function that
    adds the bias after rounding the product; `TrainingArguments(tf32=True)` rounds the factors of fp32 products.
    """
    import torch

    replaced, precision = torch.nn.functional.linear, torch.get_float32_matmul_precision()
    torch.nn.functional.linear = torch._C._nn.linear
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.nn.functional.linear = replaced
        torch.set_float32_matmul_precision(precision)


@contextmanager
def _not_partitioned() -> Iterator[None]:
    """Let Transformers build a model that ZeRO-3 does not divide; its configuration is one for the process."""
    from transformers.integrations import deepspeed as integration

    training = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = training
