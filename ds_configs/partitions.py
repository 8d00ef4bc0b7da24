"""How ZeRO 1 and 2 cut flattened tensors into partitions."""

from __future__ import annotations

from functools import lru_cache

from .model import ModelSpec


@lru_cache(maxsize=64)
def whole_tensors_of_partitions(model: ModelSpec, ranks: int) -> tuple[int, ...]:
    """Return the elements of all matrices that lie in each of equal partitions, in part or entirely.

    Matrices are flattened in the order of the model and the result is cut into one partition for each rank
    (`runtime/zero/stage_1_and_2.py`). Vectors, which the Trainer exempts from weight decay, are flattened apart and
    left out here.
    """
    matrices = [parameter for parameter in model.parameters if len(parameter.shape) > 1]
    first = next((index for index, matrix in enumerate(matrices) if matrix.in_layer), len(matrices))
    inside = [(matrix.numel, matrix.count) for matrix in matrices if matrix.in_layer]
    sizes = [matrix.numel for matrix in matrices[:first]]
    for index in range(model.dimensions.num_layers):
        sizes += [numel for numel, count in inside if index < count]
    sizes += [matrix.numel for matrix in matrices[first:] if not matrix.in_layer]
    partition = -(-sum(sizes) // ranks)
    held, start = [0] * ranks, 0
    for size in sizes:
        end = start + size
        for rank in range(start // partition, -(-end // partition)):
            held[rank] += size
        start = end
    return tuple(held)
