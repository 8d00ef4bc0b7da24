"""Linear attention as its kernels keep it, for traces on CPU tensors, where Triton does not run.

Follows flash-linear-attention (`chunk_gated_delta_rule`, fla/ops/gated_delta_rule/chunk.py), causal-conv1d
(`CausalConv1dFn`) and mamba-ssm (`MambaSplitConv1dScanCombinedFn`, mamba_ssm/ops/triton/ssd_combined.py), which
Transformers runs instead of its own loops where they are installed. Bytes depend on shapes alone: values are not those
of the kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_CHUNK_TOKENS = 64
"""Tokens of a chunk of the delta rule."""


class _CausalConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        gradients = (torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias))
        return torch.zeros_like(x), *gradients


def _causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Any:
    return _CausalConvolution.apply(x, weight, bias)  # type: ignore[no-untyped-call]


class _GatedDeltaRule(torch.autograd.Function):
    """Keeps normalised queries and keys, values, gates and one triangular matrix for each chunk."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v, g, beta = (each.contiguous() for each in (q, k, v, g, beta))
        q, q_norm = torch.zeros_like(q), q.new_zeros(q.shape[:-1], dtype=torch.float32)
        k, k_norm = torch.zeros_like(k), k.new_zeros(k.shape[:-1], dtype=torch.float32)
        g = torch.zeros_like(g, dtype=torch.float32)
        triangle = k.new_zeros(*v.shape[:-1], _CHUNK_TOKENS)
        parts = (k.new_zeros(*v.shape[:-1], k.shape[-1]), torch.zeros_like(v), _states(k, v), torch.zeros_like(v))
        output = torch.zeros_like(v)
        del parts
        ctx.save_for_backward(q, q_norm, k, k_norm, v, g, beta, triangle)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, _, k, _, v, g, beta, _ = ctx.saved_tensors
        gradient = gradient.contiguous()
        recomputed = (torch.zeros_like(k), torch.zeros_like(v), _states(k, v), torch.zeros_like(v))
        d_values = torch.zeros_like(gradient)
        d_states, d_values = _states(k, v), torch.zeros_like(d_values)
        dq, dk, dw = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(k)
        dg = g.new_zeros(2, *g.shape).sum(0)
        dk_of_chunk, dv, dg_of_chunk, db = (torch.zeros_like(each) for each in (k, v, g, beta))
        del recomputed, d_states, d_values, dw, dk_of_chunk, dg_of_chunk
        return torch.zeros_like(dq), torch.zeros_like(dk), dv, dg, db


def _states(k: Tensor, v: Tensor) -> Tensor:
    """Return the states of all chunks [batch, chunks, heads, key width, value width]."""
    return k.new_zeros(k.shape[0], -(-k.shape[1] // _CHUNK_TOKENS), v.shape[2], k.shape[-1], v.shape[-1])


def _gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, output_final_state: bool = False, **_: Any
) -> Any:
    output = _GatedDeltaRule.apply(query, key, value, g, beta)  # type: ignore[no-untyped-call]
    sizes = (key.shape[0], value.shape[2], key.shape[-1], value.shape[-1])
    return output, torch.zeros(sizes) if output_final_state else None


class _Mamba2(torch.autograd.Function):
    """Keeps its input and the output of the scan, and computes the rest again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], *weights: Tensor | None) -> Tensor:
        heads, width, groups, state, chunk = sizes
        (batch, tokens, _), chunks = x.shape, -(-x.shape[1] // sizes[-1])
        parts = [x.new_zeros(batch, tokens, heads * width + 2 * groups * state)]
        parts += [x.new_zeros(batch, heads, chunks, chunk, dtype=torch.float32) for _ in range(2)]
        states = x.new_zeros(batch, chunks, heads, width, state, dtype=torch.float32)
        states = states.to(x.dtype, copy=True)
        parts += [states, x.new_zeros(batch, chunks, groups, chunk, chunk, dtype=torch.float32)]
        scanned = x.new_zeros(batch, tokens, heads, width)
        del parts, states
        normed, roots = torch.zeros_like(scanned), x.new_zeros(groups, batch * tokens, dtype=torch.float32)
        projection = weights[-1]
        assert projection is not None
        output = normed.new_zeros(batch, tokens, projection.shape[0])
        ctx.sizes = sizes
        ctx.save_for_backward(x, scanned, roots, *weights)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, scanned, _, *weights = ctx.saved_tensors
        heads, width, groups, state, chunk = ctx.sizes
        (batch, tokens, _), chunks = x.shape, -(-x.shape[1] // chunk)

        def per_chunk() -> Tensor:
            return x.new_zeros(batch, heads, chunks, chunk, dtype=torch.float32)

        def states(element: torch.dtype) -> Tensor:
            return x.new_zeros(batch, chunks, heads, width, state, dtype=element)

        recomputed, convolved = torch.zeros_like(scanned), x.new_zeros(batch, tokens, x.shape[-1] - heads * (width + 1))
        dx, d_convolved = torch.zeros_like(x), torch.zeros_like(convolved)
        d_normed, d_scanned = torch.zeros_like(scanned), torch.zeros_like(scanned)
        steps, decays = [x.new_zeros(batch, tokens, heads)], [per_chunk(), per_chunk()]
        scores, of_chunks = x.new_zeros(batch, chunks, groups, chunk, chunk, dtype=torch.float32), states(torch.float32)
        of_chunks, d_states = torch.zeros_like(of_chunks), states(torch.float32)
        of_chunks, d_states = of_chunks.to(x.dtype, copy=True), d_states.to(x.dtype, copy=True)
        decays += [per_chunk()]
        in_groups = [x.new_zeros(batch, tokens, groups, state, dtype=torch.float32) for _ in range(2)]
        decays += [per_chunk(), per_chunk()]
        d_scores = torch.zeros_like(scores)
        decays += [per_chunk()]
        del recomputed, convolved, d_convolved, d_normed, d_scanned, steps, decays, scores, of_chunks, d_states
        del in_groups, d_scores
        return dx, None, *(None if weight is None else torch.zeros_like(weight) for weight in weights)


def _mamba2(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    *,
    D: Tensor,
    chunk_size: int,
    rmsnorm_weight: Tensor,
    outproj_weight: Tensor,
    outproj_bias: Tensor | None,
    headdim: int,
    ngroups: int,
    **_: Any,
) -> Any:
    heads = D.shape[0]
    state = (weight.shape[0] - heads * headdim) // ngroups // 2
    sizes = (heads, headdim, ngroups, state, chunk_size)
    # The projection of the output is the last one.
    weights = (weight, bias, dt_bias, A, D, rmsnorm_weight, outproj_bias, outproj_weight)
    return _Mamba2.apply(x, sizes, *weights)  # type: ignore[no-untyped-call]


_KERNELS = {
    "causal_conv1d_fn": _causal_convolution,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "mamba2_split_conv1d_scan_combined": _mamba2,
}
"""By the name of the function that a model's module calls (transformers 5.17)."""


@contextmanager
def linear_attention_kernels(model: torch.nn.Module) -> Iterator[None]:
    """Let a model's linear attention keep what its kernels keep."""
    module = sys.modules[type(model).__module__]
    own = {name: getattr(module, name) for name in _KERNELS if hasattr(module, name)}
    # LFM2's convolutions were traced without their kernel, which keeps as much.
    own = own if own.keys() - {"causal_conv1d_fn"} else {}
    for name in own:
        setattr(module, name, _KERNELS[name])
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(module, name, function)
