"""Work of a rank for each token: matrix products by shape, and the sizes that traffic depends on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..memory.shares import expert_parallel_share
from ..memory.tensor_share import CONV1D_FAMILIES, tensor_parallel_share
from ..specs.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """A matrix product of each token with a weight, `[tokens, in_features] @ [in_features, out_features]`."""

    in_features: int
    """Inner width."""
    out_features: int
    """Width of the result."""
    count: float = 1.0
    """Number of them in an average layer."""

    @property
    def weight(self) -> int:
        """Elements of its weight."""
        return self.in_features * self.out_features


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelWork:
    """One rank's part of a model under tensor and expert parallelism; compared by identity: a cheap key."""

    products: tuple[Product, ...]
    """Dense products of an average decoder layer."""
    expert_products: tuple[Product, ...]
    """Products of one routed expert; empty in dense models."""
    num_experts: int
    """Routed experts of a layer over all ranks."""
    local_experts: int
    """Routed experts that the rank holds."""
    experts_per_token: int
    """Routed experts that a token visits."""
    num_layers: int
    """Decoder layers of the whole model."""
    hidden_size: int
    """Width of the residual stream, which tensor parallelism leaves whole."""
    inner_size: float
    """Width of the MLP on the rank, of all experts that a token visits together."""
    query_size: int
    """Width of the rank's query heads."""
    key_value_size: int
    """Width of the rank's key heads."""
    query_heads: int
    """Query heads on the rank."""
    key_value_heads: int
    """Key and value heads of the whole model."""
    whole_query_size: int
    """Width of all query heads."""
    whole_key_value_size: int
    """Width of all key heads."""
    head_rows: int
    """Columns of the output head on the rank; 0 without one."""
    gathered_vocabulary: int
    """Logits of a token that ranks gather from each other's heads: AutoTP's loss reads whole ones, on every rank."""
    window: int
    """Tokens that attention looks back; 0 for all."""
    causal: bool
    """Whether a token sees only those before it."""
    layer_parameters: float
    """Parameters of an average layer on the rank."""
    outside_parameters: int
    """Parameters outside the layers on the rank: embeddings, final norm, head."""
    expert_parameters: float
    """Expert parameters of an average layer on the rank."""


@lru_cache(maxsize=512)
def model_work(
    model: ModelSpec, tp: int = 1, ep: int = 1, *, divides_head: bool = True, vocabulary_parallel: bool = False
) -> ModelWork:
    """Return what one of `tp * ep` ranks computes of a model.

    `divides_head` is false in pipelines (AutoTP); with `vocabulary_parallel` embedding and head, tied or not, are
    divided (Megatron).
    """
    sizes, layers = model.dimensions, max(1, model.dimensions.num_layers)
    share = tensor_parallel_share(model, tp, divides_head=divides_head) if tp > 1 else model
    if ep > 1:
        share = expert_parallel_share(share, ep)
    local = share.dimensions
    flipped = model.model_type in CONV1D_FAMILIES
    inside = [parameter for parameter in share.parameters if parameter.in_layer]
    products, expert_products, local_experts = [], [], 0
    for parameter in inside:
        if parameter.kind == "experts":
            local_experts, out, within = parameter.shape
            expert_products.append(Product(in_features=within, out_features=out, count=parameter.count / layers))
        elif len(parameter.shape) == 2:
            out, within = reversed(parameter.shape) if flipped else parameter.shape
            products.append(Product(in_features=within, out_features=out, count=parameter.count / layers))
    head = _head_rows(share)
    outside = share.parameters_outside_layers
    if vocabulary_parallel and tp > 1:
        head, outside = -(-sizes.vocab_size // tp), -(-model.parameters_outside_layers // tp)
    # deepspeed 0.19.8, module_inject/auto_tp.py:467: a head of its own is a column-parallel layer with gather_output.
    gathered = sizes.vocab_size if 0 < head < sizes.vocab_size and not vocabulary_parallel else 0
    experts = sum(parameter.total for parameter in inside if parameter.kind == "experts") / layers
    return ModelWork(
        products=tuple(products),
        expert_products=tuple(expert_products),
        num_experts=sizes.num_experts,
        local_experts=local_experts,
        experts_per_token=sizes.experts_per_token,
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        inner_size=local.intermediate_size + sizes.experts_per_token * sizes.expert_intermediate_size,
        query_size=local.query_size,
        key_value_size=local.key_value_size,
        query_heads=local.num_attention_heads,
        key_value_heads=sizes.num_key_value_heads,
        whole_query_size=sizes.query_size,
        whole_key_value_size=sizes.key_value_size,
        head_rows=head,
        gathered_vocabulary=gathered,
        window=model.sliding_window or 0,
        causal=model.task == "causal_lm",
        layer_parameters=sum(parameter.total for parameter in inside) / layers,
        outside_parameters=outside,
        expert_parameters=experts,
    )


def _head_rows(share: ModelSpec) -> int:
    """Return the columns of the output head that a rank holds; a head that is tied to the embedding is whole."""
    own = next((p.shape[0] for p in share.parameters if p.group == "head" and len(p.shape) == 2), 0)
    is_tied = share.tied_embeddings and share.task != "encoder"
    return own or (share.dimensions.vocab_size if is_tied else 0)
