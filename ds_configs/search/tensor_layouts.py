"""One-, two-, 2.5- and three-dimensional tensor parallelism compared, as analysis: only 1D runs in DeepSpeed and torch.

A layer of a dense decoder is products `[T, K] @ [K, N]` of `T` tokens: query, key and value together, output
projection, up (and gate) projection together, down projection. `p` ranks share them.

- 1D (Megatron-LM, arXiv 1909.08053): weights by columns, then by rows; 4 all-reduces of `[T, hidden]` in each layer.
- 2D (Optimus, arXiv 2104.05343): `p = q^2`, SUMMA; blocks of the activations pass along rows of the mesh, blocks of
  the weights along its columns.
- 2.5D (Tesseract, arXiv 2105.14500): `p = q^2 d`, SUMMA in each of `d` depths on `T / d` tokens; weights are in each
  depth, and their gradients are summed over the depths.
- 3D (arXiv 2105.14450): `p = q^3`; all-gathers along two sides of a cube, a reduce-scatter along the third.

Volumes are what one rank receives, forward and backward, without recomputation: a broadcast or reduction to one rank of
`n` elements, each rank being the root once in `q` turns, brings `(q - 1) n / q` a turn, as chains of messages do it.
Norms and softmax move some numbers a token, which are left out; so is the latency of a message, of which SUMMA has `q`
times more than 1D. Neighbouring ranks are in the same row of the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isqrt
from typing import Literal

from ..specs.errors import Fault, UsageError
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..step_time.collectives import group_bytes_per_s, others
from ..step_time.model_work import Product

LayoutName = Literal["1D", "2D", "2.5D", "3D"]

RUNNABLE: LayoutName = "1D"
"""What DeepSpeed 0.19.8 (AutoTP), Accelerate 1.15.0 and Transformers 5.17.0 run; the others are analysis only."""
_LARGEST_COUNT = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """Cost of a layer on each rank of one layout."""

    name: LayoutName
    """Dimension of the layout."""
    ranks: int
    """Ranks that share a layer."""
    shape: tuple[int, ...]
    """Ranks along each side of the mesh; the depth of 2.5D comes last."""
    weight_bytes: float
    """Weights of one layer on a rank, in compute precision."""
    activation_bytes: float
    """What one layer keeps for the backward pass on a rank, with attention scores recomputed by the kernel."""
    communication_bytes: float
    """What a rank receives for one layer and micro-batch, forward and backward."""
    communication_seconds: float
    """Time of that, every group of ranks on its own links, nothing overlapped."""
    reason: str
    """The numbers in one line."""

    @property
    def analysis_only(self) -> bool:
        """Whether no library that Shardwright drives runs it."""
        return self.name != RUNNABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Traffic of one kind of group for a layer."""

    elements: float
    """Elements that one rank receives, forward and backward."""
    group_ranks: int
    """Ranks of a group."""
    stride: int
    """Distance of neighbours in a group, in ranks."""


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

    Args:
        products: The products of a layer.
        tokens: Tokens `T` of the micro-batch.
        side: Ranks `q` along a row and a column.
        depth: Ranks `d` that hold the same weights.
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
    """Return what the cube moves; every tensor lies on all `q^3` ranks in equal parts (arXiv 2105.14450, algorithm 1).

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
        UsageError: the layers are mixtures of experts, which tensor parallelism does not divide here.
    """
    sizes = model.dimensions
    if sizes.num_experts:
        rule, fix = "tensor layouts compare dense layers", "divide the experts: ep"
        raise UsageError(Fault(where="model", value=model.architecture, rule=rule, fix=fix))
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

    Tokens are `job.micro_batch_size` (else 1) sequences. More ranks than the hardware has mean more of its nodes.

    Raises:
        UsageError: `ranks` is below 1, or the layers are mixtures of experts.
    """
    if ranks < 1:
        raise UsageError(Fault(where="ranks", value=ranks, rule="must be at least 1", fix="use the tp to explain"))
    products = layer_products(model)
    hardware = replace(hardware, nodes=max(hardware.nodes, -(-ranks // hardware.gpus_per_node)))
    tokens = job.seq_len_tokens * (job.micro_batch_size or 1)
    whole, divided = _kept_elements(model, tokens)
    weights = sum(product.weight for product in products)
    width = job.compute_bytes

    def layout(name: LayoutName, shape: tuple[int, ...], traffic: tuple[Traffic, ...], depth: int = 1) -> TensorLayout:
        kept = whole + divided / ranks if name == "1D" else (whole + divided) / ranks
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
            activation_bytes=kept * width,
            communication_bytes=received,
            communication_seconds=seconds,
            reason=_reason(name, shape, received, seconds, weights * depth / ranks * width, kept * width),
        )

    found = [layout("1D", (ranks,), one_dimensional_traffic(tokens, model.dimensions.hidden_size, ranks))]
    side = isqrt(ranks)
    if side > 1 and side**2 == ranks:
        found.append(layout("2D", (side, side), summa_traffic(products, tokens, side)))
    depths = [
        layout("2.5D", (q, q, depth), summa_traffic(products, tokens, q, depth), depth)
        for q, depth in _depth_shapes(ranks)
    ]
    found += sorted(depths, key=lambda one: one.communication_seconds)[:1]
    side = round(ranks ** (1 / 3))
    if side > 1 and side**3 == ranks:
        found.append(layout("3D", (side, side, side), cube_traffic(products, tokens, side)))
    return tuple(found)


def where_one_dimension_stops_paying(
    model: ModelSpec, hardware: HardwareSpec, job: TrainingJob, *, largest: int = _LARGEST_COUNT
) -> tuple[int | None, str]:
    """Return the smallest count of ranks at which another layout communicates faster than 1D, and why.

    Counts that divide a node or fill several, so that no group begins in the middle of one. `None` when 1D is fastest
    up to `largest` ranks.
    """
    node = hardware.gpus_per_node
    for ranks in (count for count in range(2, largest + 1) if node % count == 0 or count % node == 0):
        first, *rest = compare_tensor_layouts(model, hardware, job, ranks)
        fastest = min(rest, key=lambda one: one.communication_seconds, default=first)
        if fastest.communication_seconds < first.communication_seconds:
            return ranks, (
                f"1D stops paying at {ranks} ranks: {fastest.name} {_mesh(fastest.shape)} receives "
                f"{fastest.communication_bytes / 1e6:.1f} MB in {fastest.communication_seconds * 1e3:.2f} ms for a "
                f"layer, 1D {first.communication_bytes / 1e6:.1f} MB in {first.communication_seconds * 1e3:.2f} ms "
                f"({hardware.gpus_per_node} accelerators to a node; analysis only, nothing runs {fastest.name} here)"
            )
    return None, f"1D communicates fastest up to {largest} ranks on {hardware.name}"


def _depth_shapes(ranks: int) -> Iterator[tuple[int, int]]:
    for side in range(2, isqrt(ranks) + 1):
        depth, rest = divmod(ranks, side**2)
        if not rest and 1 < depth <= side:
            yield side, depth


def _kept_elements(model: ModelSpec, tokens: int) -> tuple[float, float]:
    """Return what a layer keeps for the backward pass that 1D leaves whole, and that it divides (arXiv 2205.05198)."""
    sizes = model.dimensions
    mlp = (3 if _is_gated(model) else 2) * sizes.intermediate_size
    return 4.0 * tokens * sizes.hidden_size, tokens * (2.0 * sizes.query_size + 2.0 * sizes.key_value_size + mlp)


def _is_gated(model: ModelSpec) -> bool:
    return any(name in parameter.name for parameter in model.parameters for name in ("gate_proj", "gate_up_proj"))


def _mesh(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _reason(
    name: str, shape: tuple[int, ...], received: float, seconds: float, weight_bytes: float, kept_bytes: float
) -> str:
    return (
        f"{name} {_mesh(shape)}: {weight_bytes / 1e6:.1f} MB of weights, {kept_bytes / 1e6:.1f} MB of activations and "
        f"{received / 1e6:.1f} MB received in {seconds * 1e3:.2f} ms for each layer"
        + ("" if name == RUNNABLE else " (analysis only)")
    )
