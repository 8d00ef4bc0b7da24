"""Partitions into which ZeRO 1 and 2 cut flattened tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..specs.model import ModelSpec, ParameterShape


@lru_cache(maxsize=64)
def whole_tensors_of_partitions(model: ModelSpec, ranks: int, ep: int = 1) -> tuple[int, ...]:
    """Return the elements of all matrices that lie in each of equal partitions, in part or entirely.

    Matrices are flattened in the order of the model and the result is cut into one partition for each rank
    (`runtime/zero/stage_1_and_2.py`). Vectors, which the Trainer exempts from weight decay, are flattened apart and
    left out here. With expert parallelism experts are a group of their own, cut for the `ranks / ep` ranks that hold
    the same ones, of which neighbours belong to different partitions of the rest.
    """
    matrices = [parameter for parameter in model.parameters if len(parameter.shape) > 1]
    if ep == 1:
        return _held(matrices, model.dimensions.num_layers, ranks)
    dense = _held([matrix for matrix in matrices if matrix.kind != "experts"], model.dimensions.num_layers, ranks)
    experts = [matrix for matrix in matrices if matrix.kind == "experts"]
    of_experts = _held(experts, model.dimensions.num_layers, max(1, ranks // ep))
    return tuple(count + of_experts[min(rank // ep, len(of_experts) - 1)] for rank, count in enumerate(dense))


def _held(matrices: Sequence[ParameterShape], layers: int, ranks: int) -> tuple[int, ...]:
    first = next((index for index, matrix in enumerate(matrices) if matrix.in_layer), len(matrices))
    inside = [(matrix.numel, matrix.count) for matrix in matrices if matrix.in_layer]
    sizes = [matrix.numel for matrix in matrices[:first]]
    for index in range(layers):
        sizes += [numel for numel, count in inside if index < count]
    sizes += [matrix.numel for matrix in matrices[first:] if not matrix.in_layer]
    partition = max(1, -(-sum(sizes) // ranks))
    held, start = [0] * ranks, 0
    for size in sizes:
        end = start + size
        for rank in range(start // partition, -(-end // partition)):
            held[rank] += size
        start = end
    return tuple(held)
