"""DeepSpeed's tiled autograd functions for the MLPs and the loss of a Transformers model.

Observed with deepspeed 0.19.8 (runtime/sequence_parallel/ulysses_sp.py):

- `TiledFusedLogitsLoss` runs the backward pass of the head inside its forward: the head's gradient misses every factor
  that is applied to the loss afterwards, and reaches ZeRO before its backward pass has begun. The loss here uses
  `SequenceTiledCompute`, which has neither problem.
- Both functions make ZeRO reduce a parameter's gradient with the last tile. A head that is tied to the embedding gets
  more gradient later, which ZeRO then rejects ("already been reduced").
- The output of `TiledMLP` requires a gradient only if its input does: adapters of a first MLP behind a frozen embedding
  would never learn.
- Both recompute tiles in the backward pass without restoring the random state: dropout would differ.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import ConfigError, UsageError
from .. import patches
from ..transformers.output_heads import head_module, output_head
from .engine import share_with_zero3

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_MLP_NAMES = ("mlp", "feed_forward")
_LOGITS_BYTES_OF_A_TILE = 2**30
# The `ignore_index` of torch's cross-entropy.
_IGNORED_LABEL = -100


def mlps(model: PreTrainedModel) -> list[Any]:
    """Return the MLPs of a model's layers."""
    return [child for module in model.modules() for name, child in module.named_children() if name in _MLP_NAMES]


def has_dropout(module: torch.nn.Module) -> bool:
    """Return whether a module contains active dropout."""
    import torch

    return any(isinstance(child, torch.nn.Dropout) and child.p > 0 for child in module.modules())


def tile_mlps(model: PreTrainedModel, tiles: int | None) -> None:
    """Make every MLP process the sequence in `tiles` parts, which are recomputed in the backward pass.

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
    """Make ZeRO-3 gather an MLP's weights once for all of its tiles."""
    share_with_zero3(mlp for mlp in mlps(model) if _is_tiled(mlp))


def _is_tiled(mlp: torch.nn.Module) -> bool:
    forward = vars(mlp).get("forward")
    return isinstance(forward, functools.partial) and forward.func is _tiled_mlp


def _tiled_mlp(
    mlp: torch.nn.Module,
    tiles: int | None,
    hidden: int,
    forward: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
) -> torch.Tensor:
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    count = math.ceil(x.shape[-2] / hidden) if tiles is None else tiles
    if count < 2:
        return forward(x)
    parameters = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
    if torch.is_grad_enabled() and parameters and not x.requires_grad:
        x = x.detach().requires_grad_()
    return TiledMLP.apply(lambda _mlp, tile: forward(tile), mlp, x, count, parameters)


def tiled_cross_entropy(
    model: PreTrainedModel, hidden_BLH: torch.Tensor, labels_BL: torch.Tensor, tiles: int | None
) -> torch.Tensor:
    """Return the sum of the cross-entropies of all labelled positions, from logits of one tile at a time.

    Without `tiles`, a tile's fp32 logits need up to 1 GiB. Labels are shifted to the position that predicts them.
    """
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute

    head = head_module(model)
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    if torch.is_grad_enabled() and parameters and not hidden_BLH.requires_grad:
        hidden_BLH = hidden_BLH.detach().requires_grad_()
    embedding = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    tied = [parameter for parameter in parameters if id(parameter) in embedding]
    samples, length = labels_BL.shape
    size = samples * length * output_head(model).vocab_size * 4
    count = math.ceil(size / _LOGITS_BYTES_OF_A_TILE) if tiles is None else tiles

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = output_head(model).logits(x).float()
        return torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), y.reshape(-1), ignore_index=_IGNORED_LABEL, reduction="sum"
        )

    def set_ready(ready: bool) -> None:
        """Set whether ZeRO may reduce the gradients of tied weights."""
        for parameter in tied:
            parameter.ds_grad_is_ready = ready

    if hidden_BLH.requires_grad and tied:
        hidden_BLH.register_hook(lambda _gradient: set_ready(True))
    total: torch.Tensor = sequence_tiled_compute(
        loss_of,
        seqlen=length,
        shards=max(1, min(count, length)),
        kwargs_to_shard={"x": hidden_BLH, "y": labels_BL},
        kwargs_to_pass={},
        grad_requiring_tensor_key="x",
        compute_params=[parameter for parameter in parameters if id(parameter) not in embedding],
        output_unshard_dimension=0,
        output_reduction="sum",
    )
    if total.requires_grad and tied:
        total.register_hook(lambda _gradient: set_ready(False))
    return total
