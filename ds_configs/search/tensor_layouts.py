"""Analysis of one-, two-, 2.5- and three-dimensional tensor parallelism; DeepSpeed and torch run only 1D.

A layer of a dense decoder is products `[T, K] @ [K, N]` of `T` tokens: query, key and value together, output
projection, up (and gate) projection together, down projection. `p` ranks share them.

- 1D (Megatron-LM, arXiv 1909.08053): weights by columns, then by rows; 4 all-reduces of `[T, hidden]` in each layer.
- 2D (Optimus, arXiv 2104.05343): `p = q^2`, SUMMA; blocks of the activations pass along rows of the mesh, blocks of
  the weights along its columns.
- 2.5D (Tesseract, arXiv 2105.14500): `p = q^2 d`, SUMMA in each of `d` depths on `T / d` tokens; weights are in each
  depth, and their gradients are summed over the depths.
- 3D (arXiv 2105.14450): `p = q^3`; all-gathers along two sides of a cube, a reduce-scatter along the third.

Volumes are what one rank receives, forward and backward, without recomputation. A broadcast or reduction of `n`
elements, in which each of `q` ranks is the root once, moves `(q - 1) n / q` per round, as chains of messages do. Not
counted are norms and softmax, which move a few numbers per token, and message latency, of which SUMMA has `q` times
more than 1D. Neighbouring ranks are in the same row of the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt
from typing import Literal

from ..specs.errors import ConfigError, UsageError
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..step_time.rates import group_bytes_per_s, others

LayoutName = Literal["1D", "2D", "2.5D", "3D"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """Cost of one layer per rank; 1D is the only layout that DeepSpeed, Accelerate or Transformers run."""

    name: LayoutName
    ranks: int
    shape: tuple[int, ...]
    """Ranks along each side of the mesh; the depth of 2.5D comes last."""
    weight_bytes: float
    """Weights of one layer on a rank, in compute precision."""
    activation_bytes: float
    """Bytes that one layer keeps for the backward pass on a rank; the kernel recomputes attention scores."""
    communication_bytes: float
    """Bytes that a rank receives for one layer and micro-batch, forward and backward."""
    communication_seconds: float
    """Time to receive them without overlap, with separate links for every group of ranks."""


def received_elements(
    name: LayoutName, shape: tuple[int, ...], *, inputs: float, outputs: float, weights: float, hidden: float
) -> list[tuple[float, int, int]]:
    """Return what one rank receives, forward and backward: elements, ranks of the group, and their distance.

    - 1D: each all-reduce moves `2 (p - 1) / p` of `[T, hidden]` (Megatron-LM, section 3).
    - 2D and 2.5D: for `C = A B`, `dA = dC B^T` and `dB = A^T dC` (Optimus, algorithms 1 to 3), `A` is broadcast twice
      along rows and `dA` reduced, `3 (q - 1) / q^2` of `[T / d, K]` in all; along columns the same of `[K, N]` for `B`
      and `dB`. Over the depths `dB` is all-reduced, `2 (d - 1) / d` of a block (Tesseract, section 3.2).
    - 3D: every tensor is split evenly over all `q^3` ranks (algorithm 1). Forward `A` and `B` are gathered and `C` is
      scattered; backward `dC` and `B` are gathered for `dA`, `A` again for `dB`, and both are scattered. Each brings
      `(q - 1) / q^3` of its tensor: 3 times `A` and `B`, twice `C`.

    `shape` has the ranks along each side of the mesh; the sizes are elements of all `A`, `C`, `B`, and `[T, hidden]`.
    """
    side = shape[0]
    if name == "1D":
        return [(4 * 2 * others(side) * hidden, side, 1)]
    if name == "3D":
        share = (side - 1) / side**3
        return [(3 * share * inputs, side, 1), (2 * share * outputs, side, side), (3 * share * weights, side, side**2)]
    depth = shape[2] if name == "2.5D" else 1
    share = 3 * (side - 1) / side**2
    return [
        (share * inputs / depth, side, 1),
        (share * weights, side, side),
        (2 * others(depth) * weights / side**2, depth, side**2),
    ]


def compare_tensor_layouts(
    model: ModelSpec, hardware: HardwareSpec, job: TrainingJob, ranks: int
) -> tuple[TensorLayout, ...]:
    """Return the layouts that `ranks` can form, 1D first; 2.5D in its fastest shape with `1 < d <= q`.

    A micro-batch has `job.micro_batch_size` (else 1) sequences. If the hardware has fewer ranks, nodes are added.

    Raises:
        UsageError: `ranks` is below 1, or the layers are mixtures of experts.
    """
    if ranks < 1:
        rule, fix = "must be at least 1", "pass the tensor-parallel size"
        raise UsageError(ConfigError(where="ranks", value=ranks, rule=rule, fix=fix))
    sizes = model.dimensions
    if sizes.num_experts:
        rule, fix = "has mixtures of experts; only dense layers are compared", "use ep to split the experts"
        raise UsageError(ConfigError(where="model", value=model.architecture, rule=rule, fix=fix))
    hardware = replace(hardware, nodes=max(hardware.nodes, -(-ranks // hardware.gpus_per_node)))
    tokens, width = job.seq_len_tokens * (job.micro_batch_size or 1), job.compute_bytes
    hidden, inner, query, key_value = sizes.hidden_size, sizes.intermediate_size, sizes.query_size, sizes.key_value_size
    is_gated = any(name in parameter.name for parameter in model.parameters for name in ("gate_proj", "gate_up_proj"))
    # In- and output widths of the products.
    products = [(hidden, query + 2 * key_value), (query, hidden), (hidden, inner * (1 + is_gated)), (inner, hidden)]
    elements: dict[str, float] = {
        "inputs": tokens * sum(columns for columns, _ in products),
        "outputs": tokens * sum(rows for _, rows in products),
        "weights": sum(columns * rows for columns, rows in products),
        "hidden": tokens * hidden,
    }
    # Elements kept for the backward pass that 1D replicates, and that it splits (arXiv 2205.05198).
    replicated = 4.0 * tokens * hidden
    split = tokens * (2.0 * query + 2.0 * key_value + (2 + is_gated) * inner)

    def layout(name: LayoutName, *shape: int) -> TensorLayout:
        traffic = received_elements(name, shape, **elements)
        depth = shape[2] if name == "2.5D" else 1
        return TensorLayout(
            name=name,
            ranks=ranks,
            shape=shape,
            weight_bytes=elements["weights"] * depth / ranks * width,
            activation_bytes=(replicated + split / ranks if name == "1D" else (replicated + split) / ranks) * width,
            communication_bytes=sum(received for received, _, _ in traffic) * width,
            communication_seconds=sum(
                received * width / group_bytes_per_s(hardware, ranks=group, stride=stride)
                for received, group, stride in traffic
            ),
        )

    layouts = [layout("1D", ranks)]
    side, cube = isqrt(ranks), round(ranks ** (1 / 3))
    if side > 1 and side**2 == ranks:
        layouts.append(layout("2D", side, side))
    depths = [
        layout("2.5D", q, q, ranks // q**2) for q in range(2, side + 1) if ranks % q**2 == 0 and 1 < ranks // q**2 <= q
    ]
    layouts += sorted(depths, key=lambda shape: shape.communication_seconds)[:1]
    if cube > 1 and cube**3 == ranks:
        layouts.append(layout("3D", cube, cube, cube))
    return tuple(layouts)
