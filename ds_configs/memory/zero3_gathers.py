"""Elements that ZeRO-3 holds gathered at each moment: its fetch queue, replayed on the modules of a model.

Follows `runtime/zero/partitioned_param_coordinator.py` of DeepSpeed 0.19.8 once its trace is complete. Every module's
turn fetches what the module needs and then prefetches from the queue, until a bucket is full or
`stage3_max_live_parameters` are gathered; the last tensor may overstep either. A tensor is released after its module's
turn unless the queue has already passed its next use, or that use lies within `stage3_max_reuse_distance`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil
from typing import Literal

from ..specs.model import ModelSpec, ParameterShape
from ..specs.strategy import ZeroOptions
from .moments import Moment


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One parameter of one layer."""

    numel: int
    persistent: bool


_Unit = tuple[_Tensor, ...]
"""The parameters that a module's turn needs; empty for containers and activation functions."""


Recomputed = Literal["none", "some", "all"]
"""Which layers run their forward pass again: none, the first ones, or all."""


@lru_cache(maxsize=256)
def gathered_elements(model: ModelSpec, zero: ZeroOptions, *, recomputed: Recomputed) -> dict[Moment, int]:
    """Return the elements gathered at each moment, without the persistent ones.

    A model with many layers is replayed with as many as the queue can hold at once and some more, since the others
    repeat.
    """
    turns = _turns(model, zero, recomputed)
    held: dict[Moment, int] = {}
    for (_, moment), available in zip(turns, _replay([unit for unit, _ in turns], zero), strict=True):
        if moment is not None:
            held[moment] = max(held.get(moment, 0), available)
    # A single layer is the last one and the first; an encoder may have neither head nor token embedding.
    held.setdefault("first_layer_backward", held["last_layer_backward"])
    held.setdefault("head_backward", held["forward_end"])
    held.setdefault("embedding_backward", 0)
    same: tuple[tuple[Moment, Moment], ...] = (
        ("loss_backward", "forward_end"),
        ("after_head", "head_backward"),
        ("after_last_layer", "last_layer_backward"),
        ("after_first_layer", "first_layer_backward"),
    )
    return held | {later: held[earlier] for later, earlier in same}


@lru_cache(maxsize=64)
def forward_gathered_elements(model: ModelSpec, zero: ZeroOptions) -> int:
    """Return the most elements gathered in a forward pass that no backward pass follows, without persistent ones."""
    embeddings, layer_kinds, tail = _modules(model, zero)
    layers = _repeated_layers(model, zero, layer_kinds)
    units = [(), *embeddings, *(unit for layer in layers for unit in layer), *tail]
    return max(_replay(units, zero))


def _turns(model: ModelSpec, zero: ZeroOptions, recomputed: Recomputed) -> list[tuple[_Unit, Moment | None]]:
    """Return the turns of one step in order, each with the moment that it counts for.

    The turn after the head's forward stands for the loss, that of the model itself.
    """
    embeddings, layer_kinds, tail = _modules(model, zero)
    layers = _repeated_layers(model, zero, layer_kinds)
    turns: list[tuple[_Unit, Moment | None]] = [((), None), *((unit, None) for unit in embeddings)]
    turns += [(unit, None) for layer in layers[:-1] for unit in layer]
    turns += [(unit, "last_layer_forward") for unit in layers[-1]]
    turns += [(unit, None) for unit in tail]
    turns.append(((), "forward_end"))
    turns += [(unit, "head_backward") for unit in reversed(tail)]
    for index, layer in reversed(list(enumerate(layers))):
        moment: Moment | None = None
        if index == 0:
            moment = "first_layer_backward"
        if index == len(layers) - 1:
            moment = "last_layer_backward"
        # Of some recomputed layers the first is one, and the last is none.
        runs_again = recomputed == "all" or (recomputed == "some" and index < len(layers) - 1)
        again = layer if runs_again else []
        turns += [(unit, moment) for unit in [(), *again, *reversed(layer)]]
    turns += [(unit, "embedding_backward") for unit in reversed(embeddings)]
    return turns


def _repeated_layers(model: ModelSpec, zero: ZeroOptions, layer_kinds: list[_Unit]) -> list[list[_Unit]]:
    """Return as many layers as the queue can hold at once and some more, each with tensors of its own."""
    window = max(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance, zero.stage3_prefetch_bucket_size)
    count = min(model.dimensions.num_layers, ceil(window / max(1, model.layer_parameter_count)) + 4)
    return [[tuple(_Tensor(t.numel, t.persistent) for t in unit) for unit in layer_kinds] for _ in range(max(1, count))]


def _modules(model: ModelSpec, zero: ZeroOptions) -> tuple[list[_Unit], list[_Unit], list[_Unit]]:
    """Return the units of the embeddings, of one layer with its containers, and of final norm and head."""

    def unit(shapes: Sequence[ParameterShape]) -> _Unit:
        return tuple(_Tensor(shape.numel, shape.numel <= zero.stage3_param_persistence_threshold) for shape in shapes)

    grouped: dict[str, list[ParameterShape]] = {}
    for parameter in model.parameters:
        grouped.setdefault(model.gather_module(parameter), []).append(parameter)
    embeddings: list[_Unit] = []
    layer: list[_Unit] = [()]
    tail: list[_Unit] = []
    parents: set[str] = set()
    for name, shapes in grouped.items():
        if shapes[0].in_layer:
            parent = name.rpartition(".")[0]
            if parent not in parents:
                layer.append(())
                parents.add(parent)
            layer.append(unit(shapes))
        elif shapes[0].group == "embedding":
            embeddings.append(unit(shapes))
        else:
            tail.append(unit(shapes))
    if model.tied_embeddings and embeddings:
        tail.append(embeddings[0])
    return embeddings, layer, tail


def _replay(units: Sequence[_Unit], zero: ZeroOptions) -> list[int]:
    """Return the gathered elements during each turn."""
    queue = deque((id(tensor), tensor, step) for step, unit in enumerate(units) for tensor in unit)
    uses: dict[int, list[int]] = {}
    for key, _, step in queue:
        uses.setdefault(key, []).append(step)
    before = [0, *accumulate(sum(tensor.numel for tensor in unit) for unit in units)]
    available: set[int] = set()
    fetched_for: dict[int, int] = {}
    count = 0
    held = []
    for step, unit in enumerate(units):
        for tensor in unit:
            if not tensor.persistent and id(tensor) not in available:
                available.add(id(tensor))
                count += tensor.numel
        wanted = {id(tensor) for tensor in unit if fetched_for.get(id(tensor), -1) < step}
        while queue and wanted:
            key, _, used_at = queue.popleft()
            fetched_for[key] = used_at
            wanted.discard(key)
        room = min(zero.stage3_max_live_parameters - count, zero.stage3_prefetch_bucket_size)
        prefetched = 0
        while queue and prefetched < room:
            key, tensor, used_at = queue.popleft()
            fetched_for[key] = max(fetched_for.get(key, -1), used_at)
            if not tensor.persistent and key not in available:
                available.add(key)
                prefetched += tensor.numel
        count += prefetched
        held.append(count)
        for tensor in unit:
            key = id(tensor)
            if key not in available or fetched_for.get(key, -1) > step + 1:
                continue
            again = bisect_right(uses[key], step)
            used_at = uses[key][again] if again < len(uses[key]) else len(units)
            # Elements of the turns between this one and the next use.
            if used_at == len(units) or before[used_at] - before[step + 1] >= zero.stage3_max_reuse_distance:
                available.remove(key)
                count -= tensor.numel
    return held
