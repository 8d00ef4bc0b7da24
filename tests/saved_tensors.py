"""Saved activations by the public hooks of autograd, to check the package's meter against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def saved_storages(known: Iterable[torch.Tensor]) -> Iterator[Counter[tuple[tuple[int, ...], torch.dtype]]]:
    """Counts bytes of the distinct storages that autograd saves, by shape and type, with the public hooks.

    Storages of `known` (parameters, buffers, inputs) are omitted.
    """
    foreign = {tensor.untyped_storage()._cdata for tensor in known}
    kept: dict[int, torch.UntypedStorage] = {}
    sizes: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in foreign and storage._cdata not in kept:
            kept[storage._cdata] = storage
            sizes[tuple(tensor.shape), tensor.dtype] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
