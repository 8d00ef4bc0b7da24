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
from ..step_time.model_work import Product
from ..step_time.rates import group_bytes_per_s, others

LayoutName = Literal["1D", "2D", "2.5D", "3D"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """Cost of one layer per rank; 1D is the only layout that DeepSpeed, Accelerate or Transformers run."""

    name: LayoutName
    ranks: int
    """Ranks that share a layer."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Communication of one layer within one kind of rank group."""

    elements: float
    """Elements that one rank receives, forward and backward."""
    group_ranks: int
    stride: int
    """Distance between neighbours of a group, in ranks."""


def one_dimensional_traffic(tokens: int, hidden_size: int, ranks: int) -> tuple[Traffic, ...]:
    """Return 4 all-reduces of `[T, hidden]`, each `2 (p - 1) / p` of its tensor (Megatron-LM, section 3).

    >>> one_dimensional_traffic(10, 4, 2)[0].elements
    160.0
    """
    return (Traffic(elements=4 * 2 * others(ranks) * tokens * hidden_size, group_ranks=ranks, stride=1),)


def summa_traffic(products: tuple[Product, ...], tokens: int, side: int, depth: int = 1) -> tuple[Traffic, ...]:
    """Return what SUMMA moves for `C = A B`, `dA = dC B^T` and `dB = A^T dC` (Optimus, algorithms 1 to 3).

    Along rows: `A` is broadcast for `C` and `dB`, and `dA` reduced, `3 (q - 1) / q^2` of `[T / d, K]` in all. Along
    columns: `B` is broadcast for `C` and `dA`, and `dB` reduced, `3 (q - 1) / q^2` of `[K, N]`. Over the depths `dB`
    is all-reduced, `2 (d - 1) / d` of a block (Tesseract, section 3.2).

    A micro-batch has `T` tokens, a row and a column `q` ranks (`side`), and `d` ranks (`depth`) hold the same weights.
    """
    share = 3 * (side - 1) / side**2
    inputs = sum(product.in_features for product in products) * tokens / depth
    weights = sum(product.weight for product in products)
    return (
        Traffic(elements=share * inputs, group_ranks=side, stride=1),
        Traffic(elements=share * weights, group_ranks=side, stride=side),
        Traffic(elements=2 * others(depth) * weights / side**2, group_ranks=depth, stride=side**2),
    )


def cube_traffic(products: tuple[Product, ...], tokens: int, side: int) -> tuple[Traffic, ...]:
    """Return what the cube moves; every tensor is split evenly over all `q^3` ranks (arXiv 2105.14450, algorithm 1).

    Forward `A` and `B` are gathered and `C` is scattered; backward `dC` and `B` are gathered for `dA`, `A` is gathered
    again for `dB`, and both are scattered. Each brings `(q - 1) / q^3` of its tensor: 3 times `A` and `B`, twice `C`.
    """
    share = (side - 1) / side**3
    inputs = sum(product.in_features for product in products) * tokens
    outputs = sum(product.out_features for product in products) * tokens
    weights = sum(product.weight for product in products)
    return (
        Traffic(elements=3 * share * inputs, group_ranks=side, stride=1),
        Traffic(elements=2 * share * outputs, group_ranks=side, stride=side),
        Traffic(elements=3 * share * weights, group_ranks=side, stride=side**2),
    )


def layer_products(model: ModelSpec) -> tuple[Product, ...]:
    """Return the products of one decoder layer.

    Raises:
        UsageError: the layers are mixtures of experts.
    """
    sizes = model.dimensions
    if sizes.num_experts:
        rule, fix = "has mixtures of experts; only dense layers are compared", "use ep to split the experts"
        raise UsageError(ConfigError(where="model", value=model.architecture, rule=rule, fix=fix))
    hidden, up = sizes.hidden_size, sizes.intermediate_size * (2 if _is_gated(model) else 1)
    return (
        Product(in_features=hidden, out_features=sizes.query_size + 2 * sizes.key_value_size),
        Product(in_features=sizes.query_size, out_features=hidden),
        Product(in_features=hidden, out_features=up),
        Product(in_features=sizes.intermediate_size, out_features=hidden),
    )


def compare_tensor_layouts(
    model: ModelSpec, hardware: HardwareSpec, job: TrainingJob, ranks: int
) -> tuple[TensorLayout, ...]:
    """Return the layouts that `ranks` can form, 1D first; 2.5D in its fastest shape with `1 < d <= q`.

    A micro-batch has `job.micro_batch_size` (else 1) sequences. If the hardware has fewer ranks, nodes are added.

    Raises:
        UsageError: `ranks` is below 1, or the layers are mixtures of experts.
    """
    if ranks < 1:
        raise UsageError(
            ConfigError(where="ranks", value=ranks, rule="must be at least 1", fix="pass the tensor-parallel size")
        )
    products = layer_products(model)
    hardware = replace(hardware, nodes=max(hardware.nodes, -(-ranks // hardware.gpus_per_node)))
    tokens = job.seq_len_tokens * (job.micro_batch_size or 1)
    # Elements kept for the backward pass that 1D replicates, and that it splits (arXiv 2205.05198).
    sizes = model.dimensions
    mlp = (3 if _is_gated(model) else 2) * sizes.intermediate_size
    replicated, split = (
        4.0 * tokens * sizes.hidden_size,
        tokens * (2.0 * sizes.query_size + 2.0 * sizes.key_value_size + mlp),
    )
    weights = sum(product.weight for product in products)
    width = job.compute_bytes

    def layout(name: LayoutName, shape: tuple[int, ...], traffic: tuple[Traffic, ...], depth: int = 1) -> TensorLayout:
        activations = replicated + split / ranks if name == "1D" else (replicated + split) / ranks
        received = sum(part.elements for part in traffic) * width
        seconds = sum(
            part.elements * width / group_bytes_per_s(hardware, ranks=part.group_ranks, stride=part.stride)
            for part in traffic
        )
        return TensorLayout(
            name=name,
            ranks=ranks,
            shape=shape,
            weight_bytes=weights * depth / ranks * width,
            activation_bytes=activations * width,
            communication_bytes=received,
            communication_seconds=seconds,
        )

    layouts = [layout("1D", (ranks,), one_dimensional_traffic(tokens, model.dimensions.hidden_size, ranks))]
    side = isqrt(ranks)
    if side > 1 and side**2 == ranks:
        layouts.append(layout("2D", (side, side), summa_traffic(products, tokens, side)))
    depths = [
        layout("2.5D", (q, q, ranks // q**2), summa_traffic(products, tokens, q, ranks // q**2), ranks // q**2)
        for q in range(2, isqrt(ranks) + 1)
        if ranks % q**2 == 0 and 1 < ranks // q**2 <= q
    ]
    layouts += sorted(depths, key=lambda shape: shape.communication_seconds)[:1]
    side = round(ranks ** (1 / 3))
    if side > 1 and side**3 == ranks:
        layouts.append(layout("3D", (side, side, side), cube_traffic(products, tokens, side)))
    return tuple(layouts)


def _is_gated(model: ModelSpec) -> bool:
    return any(name in parameter.name for parameter in model.parameters for name in ("gate_proj", "gate_up_proj"))
