"""Fused attention whose values are narrower than its queries, as a GPU keeps it (torch 2.13).

CUDA's memory-efficient kernel takes such values (`check_head_dim_size_mem_efficient`, aten sdp_utils.cpp), 128 beside
192 wide in DeepSeek's latent attention; the CPU's fused kernel does not, and its math kernel would keep every score.
Bytes depend on shapes alone, so outputs and gradients are zeros.
"""

from __future__ import annotations

from typing import Any

import torch


def values_are_narrow(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a fused kernel is allowed, and the CPU has none for these widths."""
    return bool(query.shape[-1] != value.shape[-1] and torch.backends.cuda.flash_sdp_enabled())


def fused_attention_of_narrow_values(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return zeros [batch, heads, tokens, value width], and keep what the kernel does until the backward pass."""
    parts = [query, key, value]
    if torch.is_autocast_enabled("cpu"):
        parts = [part.to(torch.get_autocast_dtype("cpu")) for part in parts]
    result: torch.Tensor = _ShapesOfAttention.apply(*parts)
    return result


class _ShapesOfAttention(torch.autograd.Function):
    """Inputs, output and one fp32 log-sum of exponentials for each query are kept; each input has a gradient."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, tokens, _ = query.shape
        # The kernels lay heads of a token beside each other, so that no copy joins them afterwards.
        output = value.new_zeros(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_zeros(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
