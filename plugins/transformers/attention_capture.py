"""Queries, keys and values of selected layers while a Transformers model runs with its own attention kernel.

In transformers 5.17.0 each attention module calls `AttentionInterface.get_interface` (modeling_utils.py) for the
attention function, including `eager`, and passes it [B, heads, S, head width] after rotary embedding and query/key
norms. 444 of its model files do this; Mamba, BLOOM, Falcon and GPT-J do not. Wrapping that function does not change the
name of the implementation, its masks or its kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...ds_configs.specs.errors import ConfigError, UsageError
from .. import patches

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

AttentionTensor = Literal["query", "key", "value"]
_NO_REENTRANT = "pass gradient_checkpointing_kwargs={'use_reentrant': False}"


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """Queries, keys and values of one layer's attention; B samples, S positions. Not requested tensors are `None`."""

    query_BHSD: torch.Tensor | None = None
    """After rotary embedding and norm, with all query heads."""
    key_BHSD: torch.Tensor | None = None
    """After rotary embedding and norm, with the key/value heads, which are fewer under GQA."""
    value_BHSD: torch.Tensor | None = None
    """With the key/value heads; their width may differ from that of queries and keys."""
    scaling: float = 1.0
    """Multiplies query · key."""
    causal: bool = True
    """Whether positions attend only to themselves and earlier positions."""
    window: int | None = None
    """Number of positions that a position attends to, including itself; `None`: all."""

    def tensor(self, name: AttentionTensor) -> torch.Tensor:
        """Return one of the tensors, which must have been captured."""
        tensor: torch.Tensor | None = getattr(self, f"{name}_BHSD")
        assert tensor is not None, f"{name} was not captured"
        return tensor


@contextmanager
def captured_attention(
    model: PreTrainedModel,
    layers: Sequence[int],
    tensors: Sequence[AttentionTensor] = ("query", "key", "value"),
    *,
    with_graph: bool = True,
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
                    inputs = {"query": query, "key": key, "value": value}
                    scaling, causal = kwargs.get("scaling"), kwargs.get("is_causal")
                    captured[number] = LayerAttention(
                        **{f"{name}_BHSD": inputs[name] for name in tensors},
                        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
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
