"""Counts live tensor bytes operator by operator, on real or fake CPU tensors (seen with torch 2.13).

The meter watches storages, not tensors: a view costs nothing, and a tensor that autograd saves counts for as long
as autograd holds it. `torch.autograd.graph.saved_tensors_hooks` sees the same saved storages but no temporaries,
which is why a dispatch mode is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# In place of a storage's number, of which none is negative.
SAMPLE = -1
MARK = -2


@dataclass(kw_only=True, slots=True)
class Recording:
    """Record of storages: allocations and frees, samples after each operator, named marks."""

    steps: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of storage number (or `SAMPLE`, `MARK`) and byte change (or index of the mark's name)."""
    bytes: list[int] = field(default_factory=list)
    """Size of each storage."""
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Shape of the first tensor seen on each storage."""
    dtypes: list[torch.dtype] = field(default_factory=list)
    """Element type of that tensor."""
    mark_names: list[str] = field(default_factory=list)
    """Names of the marks, in order."""
    operators: list[str] = field(default_factory=list)
    """Name of the operator before each sample."""

    def replay(self, ignored: Iterable[int], sizes: Sequence[Any] | None = None) -> Iterator[tuple[str, Any]]:
        """Yields `(mark name or "", live bytes)` for every mark and sample, without the ignored storages.

        With `sizes` of storages, which may be arrays, yields sums of these instead of bytes.
        """
        dropped = set(ignored)
        live: Any = 0
        for number, value in self.steps:
            if number == SAMPLE:
                yield "", live
            elif number == MARK:
                yield self.mark_names[value], live
            elif number not in dropped:
                live = live + (value if sizes is None else sizes[number] if value > 0 else -sizes[number])

    def weight_shaped(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        """Storages shaped like a parameter: weight gradients and weight copies in another element type."""
        known = {_sizes(parameter.shape) for parameter in parameters}
        return {number for number, shape in enumerate(self.shapes) if _sizes(shape) in known}

    def matrices_before(self, name: str) -> set[int]:
        """Storages of two dimensions, without ones, that were made before a mark."""
        made: set[int] = set()
        for number, value in self.steps:
            if number == MARK and self.mark_names[value] == name:
                break
            if number >= 0 and len(_sizes(self.shapes[number])) == 2:
                made.add(number)
        return made


def _sizes(shape: Iterable[int]) -> tuple[int, ...]:
    """Sizes in any order and without ones: weight gradients come transposed, bias gradients with ones in front."""
    return tuple(sorted(size for size in shape if size != 1))


class StorageMeter(TorchDispatchMode):
    """Records every storage that operators create while the mode is active."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.recording = Recording()
        self._numbers: dict[int, int] = {}
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._is_paused = False
        self._foreign = {tensor.untyped_storage()._cdata for tensor in known}

    def mark(self, name: str) -> None:
        """Puts a named mark into the recording."""
        self.recording.steps.append((MARK, len(self.recording.mark_names)))
        self.recording.mark_names.append(name)

    def numbers_of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Storage numbers of tensors that are still alive."""
        keys = (tensor.untyped_storage()._cdata for tensor in tensors)
        return {self._numbers[key] for key in keys if key in self._numbers}

    def pausing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of which only the results are metered."""

        def paused(*args: Any, **kwargs: Any) -> Any:
            self._is_paused = True
            try:
                results = function(*args, **kwargs)
            finally:
                self._is_paused = False
            self._sample(results)
            return results

        return paused

    def _sample(self, results: Any) -> None:
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                self._watch(leaf)
        self.recording.steps.append((SAMPLE, 0))

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._numbers or key in self._foreign or storage.nbytes() == 0:
            return
        number, size = len(self.recording.shapes), storage.nbytes()
        self.recording.shapes.append(tuple(tensor.shape))
        self.recording.dtypes.append(tensor.dtype)
        self.recording.bytes.append(size)
        self.recording.steps.append((number, size))
        self._numbers[key] = number

        def freed(_: object) -> None:
            self.recording.steps.append((number, -size))
            self._numbers.pop(key, None)
            self._watchers.pop(key, None)

        self._watchers[key] = weakref.ref(storage, freed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, then counts the storages of its results."""
        results = func(*args, **(kwargs or {}))
        if not self._is_paused:
            self._sample(results)
            self.recording.operators.append(str(func))
        return results
