"""Paged key-value cache of a model: what each layer keeps of a token, and how blocks are shared between layers.

The rules are those of vLLM 0.32.0 (`v1/core/kv_cache_utils.py`, `v1/kv_cache_interface.py`):

    token in a layer          heads · (width of a key + width of a value) · bytes; latent: (rank + rotary width) · bytes
    one kind of attention     one group: a block holds `block_tokens` tokens of every layer
    full and sliding layers   as many layers in each group as the rarer kind has (as the commoner, where that has less
                              than half more); all groups draw blocks of one size from one pool
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from ..specs.dimensions import Dimensions
from ..specs.errors import Fault, UsageError

_WINDOWED, _FULL = ("sliding_attention",), ("full_attention",)
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6}
"""Layers from one with full attention to the next, where `config.json` names no kind for each layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedLayer:
    """Share of one attention layer in the cache of one GPU."""

    heads: int
    """Key-value heads on this GPU; 1 for latent attention, which every GPU keeps whole."""
    numbers_per_head: int
    """Numbers kept of a token and head: key and value, or the latent vector with its rotary part."""
    window: int | None = None
    """Tokens that attention looks back; `None` for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGroup:
    """Layers that share one table of blocks."""

    block_tokens: int
    """Tokens of one block."""
    window: int | None
    """Tokens that its layers look back; `None` for all."""

    def sequence_blocks(self, length: int, *, tokens_in_flight: int) -> int:
        """Return the blocks that a sequence holds at most.

        A window frees what lies behind it between two steps: tokens of the running steps stay, and a window may begin
        inside of a block.
        """
        if self.window is None:
            return ceil(length / self.block_tokens)
        return ceil(min(self.window - 1 + tokens_in_flight, length) / self.block_tokens) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyValueCache:
    """Blocks of a model's cache on one GPU."""

    token_bytes: int
    """Bytes of one token in all layers, were all of them to keep it."""
    block_bytes: int
    """Bytes of one block of the pool."""
    groups: tuple[BlockGroup, ...]
    """Tables of each sequence."""

    def blocks(self, capacity_bytes: int) -> int:
        """Return the blocks that fit; the engine keeps one of them empty."""
        return max(0, capacity_bytes) // self.block_bytes

    def sequence_blocks(self, length: int, *, tokens_in_flight: int) -> int:
        """Return the blocks that a sequence of this length holds at most."""
        return sum(group.sequence_blocks(length, tokens_in_flight=tokens_in_flight) for group in self.groups)

    def longest_sequence(self, blocks: int, *, limit: int, tokens_in_flight: int) -> int:
        """Return the longest sequence whose blocks are at most this many; 0 where not one token fits."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.sequence_blocks(middle, tokens_in_flight=tokens_in_flight) <= blocks
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def prefix_blocks(self, tokens: int) -> int:
        """Return the blocks of a common beginning that sequences can share: whole ones, of layers that see them all."""
        return sum(tokens // group.block_tokens for group in self.groups if group.window is None)


def cached_layers(
    config: Mapping[str, Any], dimensions: Dimensions, *, tensor_parallel_size: int = 1, latent: bool = True
) -> tuple[CachedLayer, ...]:
    """Return what each layer keeps on one of the GPUs that share it.

    Args:
        config: Contents of `config.json`.
        dimensions: Sizes of the decoder.
        tensor_parallel_size: GPUs; heads that are fewer than these are kept by several.
        latent: Whether the engine keeps the latent vector of such attention; Transformers keeps keys and values.

    Raises:
        UsageError: a layer keeps something else, such as the state of a recurrence.
    """
    text = config.get("text_config") or config
    windows = _windows(text, dimensions.num_layers)
    if latent and text.get("kv_lora_rank"):
        if text.get("index_topk"):
            fix = "start the engine without it, and read the blocks from its log"
            raise UsageError(Fault(where="model", rule="keeps an index of its tokens, which is not counted", fix=fix))
        width = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0)
        return tuple(CachedLayer(heads=1, numbers_per_head=width, window=window) for window in windows)
    key = dimensions.head_dim
    value = int(text.get("v_head_dim") or key)
    if text.get("kv_lora_rank"):
        key = int(text.get("qk_nope_head_dim") or key) + int(text.get("qk_rope_head_dim") or 0)
    heads = max(1, dimensions.num_key_value_heads // tensor_parallel_size)
    return tuple(CachedLayer(heads=heads, numbers_per_head=key + value, window=window) for window in windows)


def _windows(text: Mapping[str, Any], layers: int) -> list[int | None]:
    window = text.get("sliding_window")
    window = window if isinstance(window, int) and window > 0 and text.get("use_sliding_window") is not False else None
    kinds = text.get("layer_types")
    if not isinstance(kinds, list):
        every = _FULL_EVERY.get(str(text.get("model_type")))
        pattern = text.get("sliding_window_pattern")
        every = pattern if every and isinstance(pattern, int) else every
        if window is None or every is None:
            return [window] * layers
        return [None if (index + 1) % every == 0 else window for index in range(layers)]
    unknown = sorted({str(kind) for kind in kinds} - {*_WINDOWED, *_FULL})
    if unknown:
        rule = f"has layers whose state is not that of plain attention: {', '.join(unknown)}"
        fix = "start the engine without it, and read the blocks from its log"
        raise UsageError(Fault(where="model", value=text.get("model_type"), rule=rule, fix=fix))
    return [window if kind in _WINDOWED else None for kind in kinds[:layers]]


def key_value_cache(layers: tuple[CachedLayer, ...], *, number_bytes: int, block_tokens: int) -> KeyValueCache:
    """Return the blocks of some layers.

    Args:
        layers: Those of the model, and of a draft model that runs beside it.
        number_bytes: Bytes of one number: 2, or 1 for an FP8 cache.
        block_tokens: Tokens of one block.
    """
    sizes = [layer.heads * layer.numbers_per_head * number_bytes for layer in layers]
    token_bytes = sum(sizes)
    windows = {layer.window for layer in layers}
    if len(windows) == 1:
        group = BlockGroup(block_tokens=block_tokens, window=windows.pop())
        return KeyValueCache(token_bytes=token_bytes, block_bytes=token_bytes * block_tokens, groups=(group,))
    largest = max(sizes)
    # Smaller layers hold more tokens in a block of the same size; where that does not come out even, they waste some.
    ratios = [largest // size if largest % size == 0 else 1 for size in sizes]
    kinds = Counter(
        (layer.window, layer.heads, layer.numbers_per_head, ratio) for layer, ratio in zip(layers, ratios, strict=True)
    )
    fewest, most = min(kinds.values()), max(kinds.values())
    together = most if most < 1.5 * fewest else fewest
    groups = tuple(
        BlockGroup(block_tokens=block_tokens * ratio, window=window)
        for (window, _, _, ratio), count in kinds.items()
        for _ in range(ceil(count / together))
    )
    return KeyValueCache(token_bytes=token_bytes, block_bytes=together * largest * block_tokens, groups=groups)
