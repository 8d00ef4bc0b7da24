"""Layers that allocate and save what Liger's kernels do, for traces on CPU tensors, where Triton does not run.

Follows liger-kernel 0.8.5: `LigerRMSNormFunction` (ops/rms_norm.py), `LigerSiLUMulFunction` (ops/swiglu.py) and
`LigerGELUMulFunction` (ops/geglu.py). Values are not those of the kernels. Rotary embeddings, which Liger computes in
place and which save nothing else than eager ones, and mixtures' experts stay eager: both need less.
"""

from __future__ import annotations

import re
from types import MethodType
from typing import Any

import torch
from shardwright.ds_configs.specs.images import image_part
from shardwright.ds_configs.specs.model import TEXT_MODEL, liger_kernels
from torch import nn

_PATCHED_BESIDE_TEXT = re.compile(r"\.blocks\.|\.encoder\.layer\.|\.mm_soft_emb_norm$")


class _Norm(torch.autograd.Function):
    """Saves its input in its own type and a number per row; the gradient overwrites that of the output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, in_place: bool) -> torch.Tensor:
        x = x.contiguous()
        rows = torch.ones(x.numel() // x.shape[-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        ctx.in_place = in_place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _, weight, _ = ctx.saved_tensors
        gradient = gradient.contiguous()
        return gradient if ctx.in_place else torch.zeros_like(gradient), torch.zeros_like(weight), None


class _Gated(torch.autograd.Function):
    """Saves gate and up projections, which their gradients overwrite."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return gate.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.saved_tensors


def with_liger_layers(model: nn.Module) -> nn.Module:
    """Replace the norms and gated MLPs of a model that Liger replaces.

    Beside language models these are RMS norms of blocks and heads of vision towers, and the norm of Gemma 3's projector
    (monkey_patch.py, `apply_liger_kernel_to_qwen2_5_vl`, `_internvl`, `_gemma3`); of layer norms, Liger's kernel saves
    what the eager one does.
    """

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        # Gemma's norms do not write in place (monkey_patch.py, `_patch_rms_norm_module_for_gemma2`).
        return _Norm.apply(x, self.weight, "Gemma" not in type(self).__name__)  # type: ignore[no-any-return,no-untyped-call]

    def gated(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(_Gated.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-untyped-call]

    def fused(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(_Gated.apply(*self.gate_up_proj(x).chunk(2, dim=-1)))  # type: ignore[no-untyped-call]

    model_type: Any = getattr(getattr(model, "config", None), "model_type", "")
    kernels = liger_kernels().get(model_type, {})
    gates = any(kernels.get(name) for name in ("swiglu", "geglu", TEXT_MODEL))
    for path, module in model.named_modules():
        name, of_text = type(module).__name__, image_part(path) is None
        if name.endswith("RMSNorm") and (of_text or _PATCHED_BESIDE_TEXT.search(path)):
            module.forward = MethodType(norm, module)
        elif name.endswith("MLP") and gates and of_text:
            module.forward = MethodType(fused if hasattr(module, "gate_up_proj") else gated, module)
    return model
