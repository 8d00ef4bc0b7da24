"""Volumes of the tensor layouts, against the algorithms themselves run block by block with their messages counted."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from planning import llama, public_model
from shardwright.ds_configs.search.tensor_layouts import compare_tensor_layouts, received_elements
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob

RANDOM = np.random.default_rng(0)


class Mesh:
    """Ranks `(row, column, depth)` that count the elements they receive from others, by the side they come along."""

    def __init__(self, side: int) -> None:
        self.side = side
        self.received: dict[str, Counter] = {"row": Counter(), "column": Counter(), "depth": Counter()}

    def broadcast(self, along: str, members, root, block):
        for rank in members:
            if rank != root:
                self.received[along][rank] += block.size
        return block

    def reduce(self, along: str, members, root, blocks):
        """A chain that ends at the root: everyone but its first member receives a partial sum."""
        start = (members.index(root) + 1) % len(members)
        for step in range(1, len(members)):
            self.received[along][members[(start + step) % len(members)]] += blocks[root].size
        return sum(blocks.values())

    def row(self, i, d=0):
        return [(i, j, d) for j in range(self.side)]

    def column(self, j, d=0):
        return [(i, j, d) for i in range(self.side)]

    def each(self, along: str) -> float:
        counts = set(self.received[along].values())
        assert len(counts) == 1, counts
        return counts.pop()


def blocks(matrix, side):
    return [np.split(part, side, axis=1) for part in np.split(matrix, side, axis=0)]


def summa(mesh, a, b, d=0):
    """`C = A B`: in turn `l` the blocks of column `l` of A and of row `l` of B are broadcast."""
    q = mesh.side
    c = [[0.0] * q for _ in range(q)]
    for turn in range(q):
        for i, j in product(range(q), repeat=2):
            c[i][j] = c[i][j] + a[i][turn] @ b[turn][j]
        for i in range(q):
            mesh.broadcast("row", mesh.row(i, d), (i, turn, d), a[i][turn])
        for j in range(q):
            mesh.broadcast("column", mesh.column(j, d), (turn, j, d), b[turn][j])
    return c


def summa_input_gradient(mesh, dc, b, d=0):
    """`dA = dC B^T`: in turn `l` row `l` of B is broadcast along columns, and column `l` of dA reduced along rows."""
    q = mesh.side
    da = [[None] * q for _ in range(q)]
    for turn in range(q):
        for j in range(q):
            mesh.broadcast("column", mesh.column(j, d), (turn, j, d), b[turn][j])
        for i in range(q):
            partial = {(i, j, d): dc[i][j] @ b[turn][j].T for j in range(q)}
            da[i][turn] = mesh.reduce("row", mesh.row(i, d), (i, turn, d), partial)
    return da


def summa_weight_gradient(mesh, a, dc, d=0):
    """`dB = A^T dC`: in turn `l` column `l` of A is broadcast along rows, and row `l` of dB reduced along columns."""
    q = mesh.side
    db = [[None] * q for _ in range(q)]
    for turn in range(q):
        for i in range(q):
            mesh.broadcast("row", mesh.row(i, d), (i, turn, d), a[i][turn])
        for j in range(q):
            partial = {(i, j, d): a[i][turn].T @ dc[i][j] for i in range(q)}
            db[turn][j] = mesh.reduce("column", mesh.column(j, d), (turn, j, d), partial)
    return db


@pytest.mark.parametrize(("side", "depth"), [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 3)])
def test_summa_traffic_equals_simulated_messages(side: int, depth: int) -> None:
    tokens, width, out = 12 * depth, 12, 24
    whole_a, b = RANDOM.normal(size=(tokens, width)), RANDOM.normal(size=(width, out))
    whole_dc = RANDOM.normal(size=(tokens, out))
    mesh, gradients = Mesh(side), []
    for d, (a, dc) in enumerate(zip(np.split(whole_a, depth), np.split(whole_dc, depth), strict=True)):
        a_, b_, dc_ = blocks(a, side), blocks(b, side), blocks(dc, side)
        np.testing.assert_allclose(np.block(summa(mesh, a_, b_, d)), a @ b)
        np.testing.assert_allclose(np.block(summa_input_gradient(mesh, dc_, b_, d)), dc @ b.T)
        gradients.append(np.block(summa_weight_gradient(mesh, a_, dc_, d)))
    np.testing.assert_allclose(sum(gradients), whole_a.T @ whole_dc)
    name, shape = ("2.5D", (side, side, depth)) if depth > 1 else ("2D", (side, side))
    sizes = {"inputs": tokens * width, "outputs": tokens * out, "weights": width * out, "hidden": tokens * width}
    rows, columns, depths = (elements for elements, _, _ in received_elements(name, shape, **sizes))
    assert rows == mesh.each("row")
    assert columns == mesh.each("column")
    assert depths == pytest.approx(ring_all_reduce(width * out // side**2, depth))


def ring_all_reduce(elements: int, ranks: int) -> float:
    """What a rank receives: it passes on `1 / n` of the tensor in `n - 1` turns, twice."""
    return sum(elements / ranks for _ in range(2 * (ranks - 1)))


@pytest.mark.parametrize("side", [2, 3])
def test_cube_traffic_equals_simulated_gathers(side: int) -> None:
    """All-gather A along j and B along i, multiply, and reduce-scatter C along l: Agarwal's algorithm."""
    tokens, width, out = 2 * side**2, 3 * side**2, side**2
    a, b = RANDOM.normal(size=(tokens, width)), RANDOM.normal(size=(width, out))
    a_, b_ = blocks(a, side), blocks(b, side)
    received: Counter = Counter()
    c = [[0.0] * side for _ in range(side)]
    for i, j, k in product(range(side), repeat=3):
        left, right = a_[i][k], b_[k][j]
        c[i][j] = c[i][j] + left @ right
        # A rank holds one part in `side` of each block, and receives the others.
        received["A"] = left.size - left.size // side
        received["B"] = right.size - right.size // side
        # It keeps one part in `side` of the sum, of which every other rank of the line sends it a summand.
        received["C"] = (side - 1) * (tokens // side) * (out // side) // side
    np.testing.assert_allclose(np.block(c), a @ b)
    sizes = {"inputs": tokens * width, "outputs": tokens * out, "weights": width * out, "hidden": tokens * width}
    elements = [count for count, _, _ in received_elements("3D", (side, side, side), **sizes)]
    assert elements == pytest.approx([3 * received["A"], 2 * received["C"], 3 * received["B"]])


JOB = TrainingJob(seq_len_tokens=4096, micro_batch_size=1)
H100S = parse_hardware("8x8xH100-80GB")


def test_layouts_by_count() -> None:
    names = {1: "1D", 2: "1D", 4: "1D 2D", 8: "1D 2.5D 3D", 9: "1D 2D", 64: "1D 2D 2.5D 3D"}
    for ranks, expected in names.items():
        layouts = compare_tensor_layouts(llama(), H100S, JOB, ranks)
        assert " ".join(layout.name for layout in layouts) == expected


def test_one_dimension_pays_for_few_tokens_and_few_ranks() -> None:
    """Its volume grows with the tokens; the others pass all weights round, and win when activations outweigh them."""
    for tokens, ranks, fastest in ((2_048, 8, "1D"), (8_192, 64, "1D"), (131_072, 4, "2D"), (131_072, 8, "2.5D")):
        job = TrainingJob(seq_len_tokens=tokens, micro_batch_size=1)
        layouts = compare_tensor_layouts(public_model("meta-llama/Llama-3.1-8B"), H100S, job, ranks)
        assert min(layouts, key=lambda layout: layout.communication_seconds).name == fastest
