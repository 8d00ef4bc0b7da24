"""Ring attention of torch on CPU ranks, so that context parallelism can be rehearsed and tested there.

Seen with torch 2.13.0 (distributed/tensor/experimental/_context_parallel): the ring itself takes any attention
operator, and the tables that name them hold those of CUDA alone. On the CPU the operator of
`scaled_dot_product_attention` has no strategy ("does not have a sharding strategy registered").
"""

from __future__ import annotations

from typing import Any

# Queries, keys and values are [batch, heads, sequence, head width].
_SEQUENCE_DIMENSION = 2


def enable_cpu_ring_attention() -> None:
    """Let `torch.distributed.tensor.experimental.context_parallel` run on the CPU; nothing else changes."""
    import torch
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    aten = torch.ops.aten
    ring.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu.default] = _forward
    ring.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = _backward


def _forward(operator: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    query, key, value, *rest = given
    named = dict(zip(("dropout_p", "is_causal"), rest, strict=False)) | named
    mesh = query.device_mesh
    results = ring._templated_ring_attention(
        mesh.get_group(), _SEQUENCE_DIMENSION, operator, *_local(query, key, value), **named
    )
    return _whole(mesh, results)


def _backward(operator: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    gradient, query, key, value, out, logsumexp = _local(*given[:6])
    dropout, is_causal = given[6:8]
    mesh = given[1].device_mesh
    results = ring._templated_ring_attention_backward(
        mesh.get_group(),
        _SEQUENCE_DIMENSION,
        operator,
        grad_out=gradient,
        grad_out_name="grad_out",
        query=query,
        key=key,
        value=value,
        out=out,
        logsumexp=logsumexp,
        is_causal=is_causal,
        dropout_p=dropout,
        **named,
    )
    return _whole(mesh, results)


def _local(*tensors: Any) -> list[Any]:
    from torch.distributed.tensor import DTensor

    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _whole(mesh: Any, results: tuple[Any, ...]) -> tuple[Any, ...]:
    from torch.distributed.tensor import DTensor, Shard

    return tuple(DTensor.from_local(one, mesh, [Shard(_SEQUENCE_DIMENSION)], run_check=False) for one in results)
