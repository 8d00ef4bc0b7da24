"""Cached keys and values in 8 bits, as compressed-tensors 0.19.0 rounds them, and a way into Transformers' attention.

A checkpoint with a `kv_cache_scheme` holds `k_scale` and `v_scale` [1] on each attention module. compressed-tensors
(`modeling/kvcache.py`) rounds keys after rotary embedding, and values, when they enter the cache:

    fp8 (E4M3)   scale = max(|low|, |high|) / 448                k' = float8(clamp(k / scale, -448, 448)) · scale
    int8         scale = max(|low|, |high|) / 127.5              k' = round(clamp(k / scale, -128, 127)) · scale

Here they are changed on their way into the attention function instead, which transformers 5.17.0 hands out by
`AttentionInterface.get_interface` (modeling_utils.py). A static scale makes that the same: rounding twice is rounding
once, so it does not matter that the cache itself holds what was not rounded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_FLOAT8 = 448.0
"""Largest number of E4M3 without infinities."""
KeyValueChange = Callable[["Tensor", "Tensor"], "tuple[Tensor, Tensor]"]
"""Takes keys and values [B, key/value heads, S, head width] to those that attention computes with."""
_CHANGE = "key_value_change"
_WRAPPED = "changes_keys_and_values"


def float8_scale(low: Tensor, high: Tensor, stored_dtype: Any) -> Tensor:
    """Return the scale of ranges, in the type that is stored; where that leaves 0, the type's epsilon.

    Args:
        low: Least value of each range, any shape.
        high: Largest value.
        stored_dtype: Type of scales in the checkpoint.
    """
    import torch

    scale = (torch.maximum(low.abs(), high.abs()) / LARGEST_FLOAT8).to(stored_dtype)
    return torch.where(scale == 0, torch.full_like(scale, torch.finfo(scale.dtype).eps), scale)


def float8_values(values: Tensor, scale: Tensor) -> Tensor:
    """Return what values become in E4M3, in the type of the scale; halves round to even."""
    import torch

    scaled = (values / scale).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
    rounded: Tensor = scaled.to(torch.float8_e4m3fn).to(values.dtype).to(scale.dtype) * scale
    return rounded


def cached_attention_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules, by name, on which loaders expect `k_scale` and `v_scale`: those that compressed-tensors means.

    Raises:
        ModuleNotFoundError: compressed-tensors is not installed.
    """
    from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module

    for name, module in model.named_modules():
        if is_cached_attention_module(module):
            yield name, module


def asks_for_attention(module: Any) -> bool:
    """Return whether a module computes attention by a function of `AttentionInterface`."""
    forward = inspect.unwrap(type(module).forward)
    return "get_interface" in getattr(getattr(forward, "__code__", None), "co_names", ())


def change_keys_and_values(module: Any, change: KeyValueChange) -> None:
    """Let one attention module compute with changed keys and values from now on."""
    module.__dict__[_CHANGE] = change
    _wrap_interface()


def _wrap_interface() -> None:
    from transformers.modeling_utils import AttentionInterface

    original = AttentionInterface.get_interface
    if getattr(original, _WRAPPED, False):
        return

    def get_interface(interface: Any, *args: Any, **kwargs: Any) -> Any:
        return _changing(original(interface, *args, **kwargs))

    setattr(get_interface, _WRAPPED, True)
    AttentionInterface.get_interface = get_interface


def _changing(attention: Callable[..., Any]) -> Callable[..., Any]:
    def changed(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        change: KeyValueChange | None = module.__dict__.get(_CHANGE)
        if change is not None:
            key, value = change(key, value)
        return attention(module, query, key, value, *args, **kwargs)

    return changed
