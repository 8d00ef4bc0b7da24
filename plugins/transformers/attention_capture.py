"""Queries, keys and values of chosen layers while a Transformers model runs with its own attention kernel.

transformers 5.17.0: each attention module asks `AttentionInterface.get_interface` (modeling_utils.py) for the function
that computes attention, `eager` included, and hands it [B, heads, S, head width] after rotary embedding and query/key
norms. 444 of its model files do; Mamba, BLOOM, Falcon and GPT-J do not. Wrapping what is handed out there leaves the
name of the implementation, its masks and its kernel as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...ds_configs.specs.errors import Fault, UsageError

if TYPE_CHECKING:
    import torch

AttentionTensor = Literal["query", "key", "value"]
_NO_REENTRANT = "pass gradient_checkpointing_kwargs={'use_reentrant': False}"


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """Queries, keys and values of one layer's attention; B samples, S positions. Tensors not asked for are `None`."""

    query_BHSD: torch.Tensor | None = None
    """After rotary embedding and norm, with all query heads."""
    key_BHSD: torch.Tensor | None = None
    """After rotary embedding and norm, with the key/value heads, which are fewer under GQA."""
    value_BHSD: torch.Tensor | None = None
    """With the key/value heads; their width may differ from that of queries and keys."""
    scaling: float = 1.0
    """Multiplies query · key."""
    causal: bool = True
    """Whether positions see only themselves and what is before."""
    window: int | None = None
    """Number of positions that a position sees, itself included; `None`: all."""

    def tensor(self, name: AttentionTensor) -> torch.Tensor:
        """Return one of the tensors."""
        found: torch.Tensor | None = getattr(self, f"{name}_BHSD")
        assert found is not None, f"{name} was not captured"
        return found


@contextmanager
def captured_attention(
    model: Any,
    layers: Sequence[int],
    tensors: Sequence[AttentionTensor] = ("query", "key", "value"),
    *,
    with_graph: bool = True,
) -> Iterator[dict[int, LayerAttention]]:
    """Record chosen layers, counted from 1, of the last forward pass inside the block.

    ``with_graph``: gradients have to flow back through what was captured, as a student's must. Gradient checkpointing
    runs layers again in the backward pass, which lies outside the block.

    Raises:
        UsageError: at the end, if a layer computed no attention that can be captured; or reentrant checkpointing.
    """
    from transformers.modeling_utils import AttentionInterface

    numbers = _numbered_attention(model)
    captured: dict[int, LayerAttention] = {}
    seen: set[int] = set()
    recorder = _Recorder(
        numbers=numbers,
        wanted=frozenset(layers),
        tensors=tuple(tensors),
        kept=captured,
        seen=seen,
        with_graph=with_graph,
    )
    original = AttentionInterface.get_interface

    def get_interface(interface: Any, *args: Any, **kwargs: Any) -> Any:
        return recorder.wrapped(original(interface, *args, **kwargs))

    AttentionInterface.get_interface = get_interface
    try:
        yield captured
    finally:
        AttentionInterface.get_interface = original
    missing = sorted(set(layers) - set(captured))
    if missing:
        raise UsageError(_missing(model, missing, sorted(seen)))


class _Recorder:
    def __init__(
        self,
        *,
        numbers: dict[int, int],
        wanted: frozenset[int],
        tensors: tuple[AttentionTensor, ...],
        kept: dict[int, LayerAttention],
        seen: set[int],
        with_graph: bool,
    ) -> None:
        import torch

        self._numbers, self._wanted, self._tensors = numbers, wanted, tensors
        self._kept, self._seen = kept, seen
        self._expects_gradient = with_graph and torch.is_grad_enabled()

    def wrapped(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        """Return the attention function with a look at what it is called with."""

        def recording(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            number = self._numbers.get(id(module))
            if number is not None:
                self._seen.add(number)
                if number in self._wanted:
                    self._record(number, module, {"query": query, "key": key, "value": value}, kwargs)
            return attention(module, query, key, value, *args, **kwargs)

        return recording

    def _record(self, number: int, module: Any, found: dict[str, torch.Tensor], kwargs: dict[str, Any]) -> None:
        import torch

        if self._expects_gradient and not torch.is_grad_enabled():
            rule = "reentrant gradient checkpointing cuts captured attention off its graph"
            raise UsageError(Fault(where="gradient_checkpointing", rule=rule, fix=_NO_REENTRANT))
        scaling, causal = kwargs.get("scaling"), kwargs.get("is_causal")
        self._kept[number] = LayerAttention(
            **{f"{name}_BHSD": found[name] for name in self._tensors},
            scaling=found["query"].shape[-1] ** -0.5 if scaling is None else float(scaling),
            causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
            window=kwargs.get("sliding_window"),
        )


def _numbered_attention(model: Any) -> dict[int, int]:
    """Return the layer of each module inside the text model's blocks, which alone ask for attention functions."""
    text = model.config.get_text_config()
    numbers = {}
    for name, module in model.named_modules():
        own = getattr(module, "config", None)
        number = re.search(r"(?:^|\.)(\d+)\.", name)
        if number is not None and getattr(own, "model_type", None) == text.model_type:
            numbers[id(module)] = int(number[1]) + 1
    return numbers


def _missing(model: Any, missing: list[int], seen: list[int]) -> Fault:
    where = f"attention of {type(model).__name__}"
    if not seen:
        rule = "this architecture does not compute attention through AttentionInterface of Transformers"
        return Fault(where=where, rule=rule, fix="match hidden states instead")
    fix = f"pair layers that have attention: {', '.join(map(str, seen))}"
    return Fault(where=where, value=missing, rule="these layers have no attention that can be captured", fix=fix)


def hidden_states_of(outputs: Any) -> tuple[torch.Tensor, ...]:
    """Return the embedding and the output of each block, [B, S, H] each.

    Raises:
        UsageError: the model returned none.
    """
    found = getattr(outputs, "hidden_states", None)
    if not found or any(state is None for state in found):
        rule = "the model returned no hidden states although output_hidden_states was set"
        fix = "match attention, or use a model that returns them"
        raise UsageError(Fault(where=f"hidden states of {type(outputs).__name__}", rule=rule, fix=fix))
    return tuple(found)
