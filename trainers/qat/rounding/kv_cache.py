"""Keys and values of the cache in 8 bits while a model trains: rounded before attention, straight-through gradients.

The numbers, and how they come into Transformers' attention without changing a model, are in
`plugins/compressed_tensors/quantized_cache.py`. Gradients pass where a value lies inside of the stored range, up to
half a step beyond the last code, and are zero outside, as for inputs of linear layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....ds_configs.quantization.scheme import ActivationQuantization
from ....ds_configs.specs.errors import Fault
from ....plugins.compressed_tensors.codes import code_range
from ....plugins.compressed_tensors.quantized_cache import (
    LARGEST_FLOAT8,
    asks_for_attention,
    cached_attention_modules,
    change_keys_and_values,
    float8_values,
)
from .attachment import checkpoint_name
from .input_ranges import InputRange
from .rounding import round_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from .attachment import Attachment, QuantizationState
    from .config import KvCacheNumbers, QATConfig

PARTS = ("k_scale", "v_scale")
"""Tensors that a checkpoint holds for each attention module: of keys, and of values."""
_HALF_OF_LAST_STEP = 16.0
"""E4M3 counts in steps of 32 below its largest number, 448."""
_SHOWN = 8


@dataclass(kw_only=True)
class CacheQuantizer:
    """Rounding of the keys and values of one attention module; hangs on it as a plain attribute."""

    module: Any
    """The attention module."""
    key: InputRange
    """Of keys, after rotary embedding."""
    value: InputRange
    """Of values."""
    state: QuantizationState
    """Shared with all layers of the model."""

    def change(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, heads, S, head width] as a quantized cache gives them back."""
        if self.state.observing and (self.module.training or self.key.calibrating):
            self.key.observe(key)
            self.value.observe(value)
        if not self.state.enabled:
            return key, value
        return rounded_cache(key, self.key), rounded_cache(value, self.value)


def cache_quantization(numbers: KvCacheNumbers) -> ActivationQuantization:
    """Return the numbers of cached keys and values: 8 bits, symmetric, one stored scale for the tensor."""
    number_type = "float" if numbers == "fp8" else "int"
    return ActivationQuantization(bits=8, number_type=number_type, symmetric=True, dynamic=False)  # type: ignore[arg-type]


def rounded_cache(values: Tensor, found: InputRange) -> Tensor:
    """Return values in 8 bits, in their own type; of what autograd saves, only one byte for each is new."""
    import torch

    scale, _ = found.on(values.device)
    with torch.no_grad():
        if found.quantization.number_type == "float":
            rounded = float8_values(values, scale).to(values.dtype)
            reach = (-LARGEST_FLOAT8 - _HALF_OF_LAST_STEP, LARGEST_FLOAT8 + _HALF_OF_LAST_STEP)
        else:
            rounded = round_inputs(values, found.quantization, scale, None)
            least, largest = code_range(found.quantization.bits)
            reach = (least - 0.5, largest + 0.5)
        if not values.requires_grad:
            return rounded
        ratio = values / scale
        inside = (ratio >= reach[0]) & (ratio <= reach[1])
    passing = torch.where(inside, values, torch.zeros((), dtype=values.dtype, device=values.device))
    # A number less itself is exactly zero, and adds a gradient without adding a rounding.
    return rounded + (passing - passing.detach())


def attach_kv_cache(model: Any, attachment: Attachment) -> None:
    """Let a model's attention round keys and values; its ranges join `attachment.ranges` by their checkpoint names.

    Args:
        model: Transformers model.
        attachment: Of a configuration that names `kv_cache`; nothing is done otherwise.
    """
    config = attachment.config
    if config.kv_cache is None:
        return
    quantization = cache_quantization(config.kv_cache)
    for module_name, module in cached_attention_modules(model):
        key, value = (
            InputRange(
                quantization,
                method="calibrated" if config.ranges == "learned" else config.ranges,
                stored_dtype=attachment.stored_dtype,
                name=f"{checkpoint_name(module_name)}.{part}",
            )
            for part in PARTS
        )
        attachment.ranges |= {key.name: key, value.name: value}
        module.cache_quantizer = CacheQuantizer(module=module, key=key, value=value, state=attachment.state)
        change_keys_and_values(module, module.cache_quantizer.change)


def kv_cache_faults(model: Any, config: QATConfig) -> Iterator[Fault]:
    """Yield why a model's cache cannot be rounded while it trains."""
    if config.kv_cache is None:
        return
    where, value = "kv_cache", config.kv_cache
    found = dict(cached_attention_modules(model))
    if not found:
        rule = f"{type(model).__name__} has no attention with projections and a cache, as loaders look for it"
        yield Fault(where=where, value=value, rule=rule, fix="drop it")
    if getattr(model.config.get_text_config(), "kv_lora_rank", None):
        rule = "the cache holds latent vectors (multi-head latent attention), which a scale for keys does not fit"
        yield Fault(where=where, value=value, rule=rule, fix="drop it")
    deaf = [name for name, module in found.items() if not asks_for_attention(module)]
    if deaf:
        more = f" and {len(deaf) - _SHOWN} more" if len(deaf) > _SHOWN else ""
        rule = f"{', '.join(deaf[:_SHOWN])}{more} compute attention without AttentionInterface of Transformers"
        yield Fault(where=where, value=value, rule=rule, fix="drop it")


def kv_cache_tensors(attachment: Attachment) -> dict[str, Tensor]:
    """Return `k_scale` and `v_scale` [1] of all attention modules, in the stored type, on the CPU.

    Names are those of modules in the model, which a checkpoint may spell otherwise.

    Raises:
        UsageError: a range is not known.
    """
    import torch

    if attachment.config.kv_cache is None:
        return {}
    ranges = {name: one for name, one in attachment.ranges.items() if name.rpartition(".")[2] in PARTS}
    return {name: one.on(torch.device("cpu"))[0].clone() for name, one in ranges.items()}


def kv_cache_scheme(config: QATConfig) -> dict[str, Any] | None:
    """Return `kv_cache_scheme` of `quantization_config` as compressed-tensors 0.19.0 writes it; `None` without one."""
    if config.kv_cache is None:
        return None
    quantization = cache_quantization(config.kv_cache)
    return {
        "num_bits": quantization.bits,
        "type": quantization.number_type,
        "symmetric": quantization.symmetric,
        "group_size": None,
        "strategy": "tensor",
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "scale_dtype": None,
        "zp_dtype": None,
        "observer": "static_minmax",
        "observer_kwargs": {},
    }
