"""MLPs, experts and the loss of a Transformers model, computed in tiles of tokens that the backward pass recomputes.

A tile's gradients of parameters are added up and returned to autograd once, so engines reduce each parameter once:
DDP, ZeRO, FSDP2 and tied weights need nothing else. DeepSpeed 0.19.8 has `TiledMLP`, `SequenceTiledCompute` and
`TiledFusedLogitsLoss` (runtime/sequence_parallel/ulysses_sp.py, arXiv 2506.13996). They are not used here because they

- run the backward pass of each tile on the parameters, which DDP rejects ("marked ready twice");
- tell ZeRO to reduce with tile number `shards`, which never comes where `torch.chunk` makes fewer tiles;
- restore neither the random state nor autocast when they recompute a tile;
- need an input that requires a gradient: adapters of a first MLP behind a frozen embedding would never learn.

A mixture's router runs on all tokens, because its balance loss needs the logits of all of them; its experts and shared
experts run in tiles.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

from ...ds_configs.memory import activations
from ...ds_configs.specs.errors import ConfigError, UsageError
from .. import patches
from .loading import share_with_zero3, without_zero3_hooks
from .output_heads import further_bias, head_module, shaped_head, shaped_logits

if TYPE_CHECKING:
    import torch
    from torch.autograd.function import FunctionCtx
    from transformers import PreTrainedModel

_MLP_NAMES = ("mlp", "feed_forward", "shared_expert", "shared_experts", "shared_mlp")
_EXPERTS = "experts"
# The `ignore_index` of torch's cross-entropy.
IGNORED_LABEL = -100


def mlps(model: PreTrainedModel) -> list[Any]:
    """Return the modules of a model's layers that can run in tiles: MLPs, and experts that get routed tokens."""
    named = [named for module in model.modules() for named in module.named_children()]
    mixtures = {
        child for name, child in named if any(path.rpartition(".")[2] == _EXPERTS for path, _ in child.named_modules())
    }
    dense = [child for name, child in named if name in _MLP_NAMES and child not in mixtures]
    return dense + [child for name, child in named if name == _EXPERTS and _takes_routed_tokens(child)]


def untiled_experts(model: PreTrainedModel) -> list[Any]:
    """Return experts whose forward does not take tokens, their experts and their weights."""
    named = [named for module in model.modules() for named in module.named_children()]
    return [child for name, child in named if name == _EXPERTS and not _takes_routed_tokens(child)]


def _takes_routed_tokens(experts: Any) -> bool:
    import inspect

    return len(inspect.signature(type(experts).forward).parameters) == 4


def tile_mlps(model: PreTrainedModel, tiles: int | None) -> None:
    """Make MLPs and experts process their tokens in `tiles` parts, which are recomputed in the backward pass.

    `None` uses parts of as many tokens as the hidden size. Earlier tiling is replaced.

    Raises:
        UsageError: other code has replaced the forward of an MLP.
    """
    untile_mlps(model)
    hidden = model.config.get_text_config().hidden_size
    for mlp in mlps(model):
        if "forward" in vars(mlp):
            rule = "has a replaced forward, which tiling would discard"
            fix = "disable tiled_mlp, or disable what replaces the MLP's forward (Liger kernels, hooks)"
            raise UsageError(ConfigError(where="tiled_mlp", value=type(mlp).__name__, rule=rule, fix=fix))
        tiled = functools.partial(functools.partial, _tiled_mlp, mlp, tiles, hidden)
        patches.apply("tiled-mlp", tiled, on=mlp)


def untile_mlps(model: PreTrainedModel) -> None:
    """Restore the forward of MLPs that an earlier run tiled."""
    for mlp in mlps(model):
        if _is_tiled(mlp):
            patches.remove("tiled-mlp", on=mlp)


def share_tiled_mlps(model: PreTrainedModel) -> None:
    """Make ZeRO-3 gather the weights of an MLP, and of a head with adapters, once for all tiles."""
    head = model.get_output_embeddings()
    share_with_zero3([mlp for mlp in mlps(model) if _is_tiled(mlp)] + ([] if head is None else [head]))


def _is_tiled(mlp: torch.nn.Module) -> bool:
    forward = vars(mlp).get("forward")
    return isinstance(forward, functools.partial) and forward.func is _tiled_mlp


def _tiled_mlp(
    mlp: torch.nn.Module,
    tiles: int | None,
    hidden: int,
    _original: Callable[..., torch.Tensor],
    x: torch.Tensor,
    *routing: torch.Tensor,
) -> torch.Tensor:
    def forward(*tensors: torch.Tensor) -> torch.Tensor:
        with without_zero3_hooks(mlp):
            # QAT may have changed the class since the forward was replaced.
            result: torch.Tensor = type(mlp).forward(mlp, *tensors)
        return result

    rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, *routing)]
    count = len(rows[0])
    if any(len(tensor) != count for tensor in rows):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (x, *routing))
        rule = f"gets tensors of different numbers of tokens: {shapes}"
        raise UsageError(ConfigError(where="tiled_mlp", value=type(mlp).__name__, rule=rule, fix="disable tiled_mlp"))
    # One tile too: ZeRO-1 and 2 need gradients in the same order on all ranks, whose batches may have other lengths.
    size = hidden if tiles is None else math.ceil(count / tiles)

    has_samples = x.dim() > 2

    # It must not refer to `x`, which would live until the backward pass in layers that are recomputed.
    def work(tile: torch.Tensor, *further: torch.Tensor) -> torch.Tensor:
        # Blocks of Transformers expect a dimension of samples, but experts do not.
        return forward(tile[None], *further)[0] if has_samples else forward(tile, *further)

    result = in_tiles(work, rows, list(mlp.parameters()), size)
    return result.reshape(*x.shape[:-1], result.shape[-1])


def tiled_cross_entropy(
    model: PreTrainedModel,
    hidden_BLH: torch.Tensor,
    labels_BL: torch.Tensor,
    tiles: int | None,
    head: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the sum of the cross-entropies of all labelled positions, from logits of one tile at a time.

    Without `tiles`, a tile's fp32 logits need up to 1 GiB. Labels are shifted to the position that predicts them.
    `head` is the forward of the model's head, if other code has replaced it.
    """
    import torch

    module = head_module(model)
    head = head or module
    shape = shaped_head(model, module.weight, None)
    bias_V = further_bias(model)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with without_zero3_hooks(module):
            logits = head(x)
        product = logits if bias_V is None else logits + bias_V
        logits = shaped_logits(product, shape.scale, shape.soft_cap).float()
        return torch.nn.functional.cross_entropy(logits, y[:, 0], ignore_index=IGNORED_LABEL, reduction="sum")

    rows, vocabulary = labels_BL.numel(), int(getattr(module, "out_features", None) or module.weight.shape[0])
    size = activations.LOGITS_BYTES_OF_A_TILE // (4 * vocabulary) if tiles is None else math.ceil(rows / tiles)
    tensors = [hidden_BLH.reshape(rows, -1), labels_BL.reshape(rows, 1)]
    return in_tiles(loss_of, tensors, list(module.parameters()), max(1, size), is_sum=True)


def in_tiles(
    work: Callable[..., torch.Tensor],
    rows: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    size: int,
    *,
    is_sum: bool = False,
) -> torch.Tensor:
    """Return `work(*rows)` computed for `size` rows at a time; autograd recomputes each tile.

    `work` maps tensors [N, ...], one entry per token, to as many rows, or with `is_sum` to the sum of a loss. It uses
    `parameters` beside its arguments.
    """
    used = [parameter for parameter in parameters if parameter.requires_grad]
    result: torch.Tensor = _autograd_function().apply((work, size, is_sum, len(rows)), *rows, *used)
    return result


@cache
def _autograd_function() -> Any:
    """Return the autograd function; importing this module must not import torch."""
    import torch
    from torch.autograd.function import once_differentiable

    class InTiles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, settings: Any, *tensors: torch.Tensor) -> torch.Tensor:
            ctx.settings = settings
            work, size, is_sum, count = settings
            rows, ctx.used_parameters = tensors[:count], tensors[count:]
            ctx.save_for_backward(*rows)
            first = rows[0]
            ctx.device = first.device.type
            ctx.autocast_state = torch.is_autocast_enabled(ctx.device), torch.get_autocast_dtype(ctx.device)
            ctx.random = torch.get_rng_state(), torch.cuda.get_rng_state(first.device) if first.is_cuda else None
            result: Any = 0.0
            for start in range(0, len(first), size):
                part = work(*(tensor[start : start + size] for tensor in rows))
                if is_sum:
                    result = result + part
                    continue
                if not torch.is_tensor(part):
                    rule = f"returns {type(part).__name__}, but tiles are joined from one tensor"
                    raise UsageError(ConfigError(where="tiled_mlp", rule=rule, fix="disable tiled_mlp"))
                if start == 0:
                    result = part.new_empty((len(first), *part.shape[1:]))
                result[start : start + size] = part
            return result

        @staticmethod
        @once_differentiable  # type: ignore[untyped-decorator]
        def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            work, size, is_sum, count = ctx.settings
            rows, needs = ctx.saved_tensors, ctx.needs_input_grad[1 : 1 + count]
            totals = [torch.empty_like(tensor) if need else None for tensor, need in zip(rows, needs, strict=True)]
            sums: list[torch.Tensor | None] = [None] * len(ctx.used_parameters)

            def add(tile: slice, found: Sequence[torch.Tensor | None]) -> None:
                written = [total for total in totals if total is not None]
                for total, own in zip(written, found, strict=False):
                    total[tile] = 0 if own is None else own
                for index, own in enumerate(found[len(written) :]):
                    earlier = sums[index]
                    if own is not None and size < len(rows[0]):
                        # Parameters that are added to each other get the same tensor.
                        own = own.clone() if earlier is None else earlier.add_(own)
                    sums[index] = earlier if own is None else own

            with ExitStack() as stack:
                devices = [rows[0].device] if rows[0].is_cuda else []
                stack.enter_context(torch.random.fork_rng(devices=devices))
                torch.set_rng_state(ctx.random[0])
                if devices:
                    torch.cuda.set_rng_state(ctx.random[1], rows[0].device)
                enabled, dtype = ctx.autocast_state
                stack.enter_context(torch.autocast(ctx.device, dtype=dtype, enabled=enabled))
                stack.enter_context(torch.enable_grad())
                for start in range(0, len(rows[0]), size):
                    tile = slice(start, start + size)
                    parts = [
                        tensor[tile].detach().requires_grad_(need) for tensor, need in zip(rows, needs, strict=True)
                    ]
                    inputs = [part for part in parts if part.requires_grad]
                    result = work(*parts)
                    used = [*inputs, *ctx.used_parameters]
                    upper = gradient if is_sum else gradient[tile]
                    # No name may keep a tile's gradients while the next tile is computed.
                    add(tile, torch.autograd.grad(result, used, upper, allow_unused=True))
                    del result
            return (None, *totals, *sums)

    return InTiles
