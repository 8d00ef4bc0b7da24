"""Attention of Transformers: queries, keys and values of selected layers, and long rows without a mask of S x S.

In transformers 5.17.0 each attention module calls `AttentionInterface.get_interface` (modeling_utils.py) for the
attention function, including `eager`, and passes it [B, heads, S, head width] after rotary embedding and query/key
norms. 444 of its model files do this; Mamba, BLOOM, Falcon and GPT-J do not. Wrapping that function does not change the
name of the implementation, its masks or its kernel.

For SDPA, Transformers makes a boolean mask of S x S for long rows with packed documents, padding or a sliding window
(`masking_utils.sdpa_mask`, 5.17.0 and 5.24.0): 16 GiB for 128k tokens, and SDPA's kernel for masks converts it to the
type of the queries. Attention of each document on its own, and of a window on blocks as long as the window, has the
same values and needs memory that grows with S. FlashAttention does the same itself.

Shapes: B samples, H heads, S tokens, D width of a head, W window.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

from ...ds_configs.specs.errors import ConfigError, UsageError
from .. import patches

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

AttentionTensor = Literal["query", "key", "value"]
_NO_REENTRANT = "pass gradient_checkpointing_kwargs={'use_reentrant': False}"


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """Queries, keys and values of one layer's attention; B samples, S positions."""

    query_BHSD: torch.Tensor
    """After rotary embedding and norm, with all query heads."""
    key_BHSD: torch.Tensor
    """After rotary embedding and norm, with the key/value heads, which are fewer under GQA."""
    value_BHSD: torch.Tensor
    """With the key/value heads; their width may differ from that of queries and keys."""
    causal: bool = True
    """Whether positions attend only to themselves and earlier positions."""
    window: int | None = None
    """Number of positions that a position attends to, including itself; `None`: all."""

    def tensor(self, name: AttentionTensor) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self, f"{name}_BHSD")
        return tensor


@contextmanager
def captured_attention(
    model: PreTrainedModel, layers: Sequence[int], *, with_graph: bool = True
) -> Iterator[dict[int, LayerAttention]]:
    """Record selected layers, counted from 1, of the last forward pass inside the block.

    `with_graph`: whether gradients must flow back through the recorded tensors, such as a student's. Gradient
    checkpointing runs layers again in the backward pass, outside the block.

    Raises:
        UsageError: at the end, if a layer computed no attention that can be captured; or reentrant checkpointing.
    """
    import torch

    expects_gradient = with_graph and torch.is_grad_enabled()
    # The layer of each module inside the text model's blocks; only these call attention functions.
    text = model.config.get_text_config()
    numbers: dict[int, int] = {}
    for name, module in model.named_modules():
        index = re.search(r"(?:^|\.)(\d+)\.", name)
        if index is not None and getattr(getattr(module, "config", None), "model_type", None) == text.model_type:
            numbers[id(module)] = int(index[1]) + 1
    captured: dict[int, LayerAttention] = {}
    seen: set[int] = set()

    def recording(get_interface: Callable[..., Any]) -> Callable[..., Any]:
        def get_recording_interface(*args: object, **kwargs: object) -> Callable[..., Any]:
            attention = get_interface(*args, **kwargs)

            def attend(module: torch.nn.Module, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
                number = numbers.get(id(module))
                if number is not None:
                    seen.add(number)
                if number is not None and number in layers:
                    if expects_gradient and not torch.is_grad_enabled():
                        rule = "reentrant gradient checkpointing detaches captured attention from its graph"
                        raise UsageError(ConfigError(where="gradient_checkpointing", rule=rule, fix=_NO_REENTRANT))
                    causal = kwargs.get("is_causal")
                    captured[number] = LayerAttention(
                        query_BHSD=query,
                        key_BHSD=key,
                        value_BHSD=value,
                        causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
                        window=kwargs.get("sliding_window"),
                    )
                return attention(module, query, key, value, *args, **kwargs)

            return attend

        return get_recording_interface

    with patches.applied("captured-attention", recording):
        yield captured
    where = f"attention of {type(model).__name__}"
    if not seen and layers:
        rule = "this architecture does not compute attention through AttentionInterface of Transformers"
        raise UsageError(ConfigError(where=where, rule=rule, fix="match hidden states instead"))
    if missing := sorted(set(layers) - set(captured)):
        rule = "these layers have no attention that can be captured"
        fix = f"pair layers that have attention: {', '.join(map(str, sorted(seen)))}"
        raise UsageError(ConfigError(where=where, value=missing, rule=rule, fix=fix))


def hidden_states_of(outputs: Any) -> tuple[torch.Tensor, ...]:
    """Return the embedding and the output of each block, [B, S, H] each.

    Raises:
        UsageError: the model returned none.
    """
    states = getattr(outputs, "hidden_states", None)
    if not states or any(state is None for state in states):
        rule = "the model returned no hidden states although output_hidden_states was set"
        fix = "match attention, or use a model that returns them"
        raise UsageError(ConfigError(where=f"hidden states of {type(outputs).__name__}", rule=rule, fix=fix))
    return tuple(states)


_SMALLEST_MASK = 2**26
"""Elements of masks that are replaced, 64 MiB of booleans; shorter rows keep the kernels of Transformers."""
_CONFIGS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Configurations of the models that pass masks to attention unchanged."""

Kind = Literal["document", "window", "token"]
Part = tuple[int, Kind]
"""Neighbouring tokens of a row: a document or the first W tokens of one, the next W, or documents of one token each."""


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Takes the place of a causal mask [B, 1, S, S]."""

    parts: tuple[tuple[Part, ...], ...]
    """Of each sample."""
    window: int
    """W; 0 without a window."""
    mask: Callable[[], Any]
    """Makes the mask of Transformers."""
    bands: dict[Any, torch.Tensor] = field(default_factory=dict)
    """Masks of W x 2W, by length and type of the queries."""

    def band(self, query: torch.Tensor) -> torch.Tensor:
        """Return the mask [1, 1, L, W + L] of L queries whose keys start W tokens before them."""
        import torch

        key = query.shape[2], query.dtype, query.device
        if key not in self.bands:
            length = query.shape[2]
            rows = torch.arange(length, device=query.device)[:, None] + self.window
            columns = torch.arange(self.window + length, device=query.device)
            seen = (columns <= rows) & (columns > rows - self.window)
            # In the type of the queries, because SDPA would convert booleans in every call.
            band = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
            self.bands[key] = band.masked_fill_(~seen, float("-inf"))[None, None]
        return self.bands[key]


def attend_by_document(model: PreTrainedModel) -> None:
    """Let a model's SDPA attention compute documents and windows of long rows without masks of S x S.

    It changes nothing for other models, other attention implementations, caches, or masks that are not causal.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def replacing_masks(make_mask: Callable[..., Any]) -> Callable[..., Any]:
        def make_mask_or_documents(*args: Any, **kwargs: Any) -> Any:
            parts = None if args else _parts(**kwargs)
            if parts is None:
                return make_mask(*args, **kwargs)
            window = kwargs.get("local_size") or 0
            return Documents(parts=parts, window=window, mask=lambda: make_mask(**kwargs))

        return make_mask_or_documents

    # Models that cannot pass flex attention's masks on look into masks.
    if not getattr(model, "_supports_flex_attn", False):
        return
    for config in (model.config, model.config.get_text_config()):
        _CONFIGS[id(config)] = config
    if "sdpa" in ALL_ATTENTION_FUNCTIONS and "sdpa" in ALL_MASK_ATTENTION_FUNCTIONS:
        patches.apply("document-masks", replacing_masks, item="sdpa")
        patches.apply("document-attention", _attending, item="sdpa")


def _parts(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] | None = None,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **_: Any,
) -> tuple[tuple[Part, ...], ...] | None:
    """Return the parts of each sample, or `None` if the mask is small, has no borders, or is of another kind."""
    import torch

    if id(config) not in _CONFIGS or use_vmap or mask_function is None:
        return None
    if batch_size * q_length * kv_length < _SMALLEST_MASK:
        return None
    if q_length != kv_length or kv_offset or not isinstance(q_offset, int) or q_offset or torch.compiler.is_compiling():
        return None
    # Functions of a mask take indices. Each token and its neighbour show where documents begin.
    sample, tokens = torch.arange(batch_size, device=device)[:, None], torch.arange(q_length, device=device)[None]
    before, after = tokens[:, :-1], tokens[:, 1:]
    borders = ~mask_function(sample, 0, after, before).expand(batch_size, -1)
    is_other = mask_function(sample, 0, before, after).any()
    if attention_mask is not None:
        is_token = attention_mask.bool()
        if is_token.shape != (batch_size, kv_length):
            return None
        # Padding is a document. Tokens on both sides of padding attend to each other, which documents do not.
        begins = is_token[:, 1:] & ~is_token[:, :-1]
        is_other = is_other | (begins.sum(dim=1) + is_token[:, 0] > 1).any()
        borders = borders | (is_token[:, 1:] != is_token[:, :-1])
    has_borders, is_other = torch.stack([borders.any(), is_other]).tolist()
    window = local_size if local_size and local_size < q_length else 0
    if is_other or not (has_borders or window):
        return None
    rows = []
    for row in borders.cpu():
        ends = [*(row.nonzero().flatten() + 1).tolist(), q_length]
        rows.append(_parts_of([end - start for start, end in zip([0, *ends], ends, strict=False)], window))
    return (rows[0],) if len(set(rows)) == 1 else tuple(rows)


def _parts_of(lengths: list[int], window: int) -> tuple[Part, ...]:
    """Return the parts of a row's documents.

    >>> _parts_of([5, 1, 1, 2], 4)
    ((4, 'document'), (1, 'window'), (2, 'token'), (2, 'document'))
    """
    parts: list[Part] = []
    for length in lengths:
        if length == 1 and parts and parts[-1][1] == "token":
            parts[-1] = parts[-1][0] + 1, "token"
            continue
        size = window or length
        parts.append((min(size, length), "token" if length == 1 else "document"))
        parts += [(min(size, length - start), "window") for start in range(size, length, size)]
    return tuple(parts)


def _attending(attend: Callable[..., Any]) -> Callable[..., Any]:
    # Models name the mask or pass it by position, as `sdpa_attention_forward` allows.
    def attend_to_documents(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        import torch

        mask = attention_mask
        if not isinstance(mask, Documents):
            return attend(module, query, key, value, mask, *args, **kwargs)
        length = sum(size for size, _ in mask.parts[0])
        if args or kwargs.get("position_bias") is not None or not query.shape[2] == key.shape[2] == length:
            return attend(module, query, key, value, mask.mask(), *args, **kwargs)
        rows = [(query, key, value)]
        if len(mask.parts) > 1:
            rows = list(zip(query.split(1), key.split(1), value.split(1), strict=True))
        kwargs["is_causal"] = True
        outputs = []
        for parts, row in zip(mask.parts, rows, strict=True):
            # Slices would each have a gradient as long as the row.
            queries, keys, values = (tensor.split([size for size, _ in parts], dim=2) for tensor in row)
            # [B, L, H, D] of each part.
            outputs_of_parts = []
            for index, (_, kind) in enumerate(parts):
                query, key, value, band = queries[index], keys[index], values[index], None
                if kind == "token":
                    heads = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
                    outputs_of_parts.append(heads.transpose(1, 2))
                    continue
                if kind == "window":
                    key = torch.cat([keys[index - 1], key], dim=2)
                    value = torch.cat([values[index - 1], value], dim=2)
                    band = mask.band(query)
                outputs_of_parts.append(attend(module, query, key, value, band, **kwargs)[0])
            outputs.append(torch.cat(outputs_of_parts, dim=1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0], None

    return attend_to_documents
