"""DeepSpeed's tiled autograd functions on MLPs and on the loss of a Transformers model.

Seen with deepspeed 0.19.8 (runtime/sequence_parallel/ulysses_sp.py):

- `TiledFusedLogitsLoss` runs the backward pass of the head inside its forward: the head's gradient misses every factor
  that is applied to the loss afterwards, and reaches ZeRO before its backward pass has begun. `SequenceTiledCompute`
  does neither, so that the loss uses that;
- both functions let ZeRO reduce a parameter's gradient with the last tile; a head that is tied to the embedding gets
  more gradient later, which ZeRO then refuses ("already been reduced");
- the output of `TiledMLP` needs a gradient only if its input does: adapters of a first MLP behind a frozen embedding
  would never learn;
- both compute tiles anew in the backward pass without restoring the random state: dropout would differ.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, UsageError
from ..transformers.output_heads import head_module, output_head
from .engine import share_with_zero3

if TYPE_CHECKING:
    import torch

_MLP_NAMES = ("mlp", "feed_forward")
_LOGITS_BYTES_OF_A_TILE = 2**30
# The `ignore_index` of torch's cross-entropy.
_IGNORED_LABEL = -100


def mlps(model: Any) -> list[Any]:
    """Return the MLPs of a model's layers."""
    return [child for module in model.modules() for name, child in module.named_children() if name in _MLP_NAMES]


def has_dropout(module: Any) -> bool:
    """Return whether anything in a module drops values while it trains."""
    import torch

    return any(isinstance(one, torch.nn.Dropout) and one.p > 0 for one in module.modules())


def tile_mlps(model: Any, tiles: int | None) -> None:
    """Let every MLP compute `tiles` parts of the sequence one after the other, and again in the backward pass.

    `None` makes parts of as many tokens as the model is wide. What tiled them before is replaced.

    Raises:
        UsageError: something else has replaced the forward of an MLP.
    """
    untile_mlps(model)
    hidden = model.config.get_text_config().hidden_size
    for mlp in mlps(model):
        if "forward" in vars(mlp):
            rule = "has a forward of somebody else's, which tiles would lose"
            fix = "leave tiled_mlp out, or what replaces MLPs (Liger kernels, hooks)"
            raise UsageError(Fault(where="tiled_mlp", value=type(mlp).__name__, rule=rule, fix=fix))
        mlp.forward = functools.partial(_tiled_mlp, mlp, mlp.forward, tiles, hidden)


def untile_mlps(model: Any) -> None:
    """Give the MLPs of a model back the forward of their class, where an earlier run tiled them."""
    for mlp in mlps(model):
        if _is_tiled(mlp):
            del mlp.forward


def share_tiled_mlps(model: Any) -> None:
    """Let ZeRO-3 gather an MLP's weights once for all of its tiles, however many each rank has."""
    share_with_zero3(mlp for mlp in mlps(model) if _is_tiled(mlp))


def _is_tiled(mlp: Any) -> bool:
    forward = vars(mlp).get("forward")
    return isinstance(forward, functools.partial) and forward.func is _tiled_mlp


def _tiled_mlp(
    mlp: Any, forward: Callable[[torch.Tensor], torch.Tensor], tiles: int | None, hidden: int, x: torch.Tensor
) -> torch.Tensor:
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    count = math.ceil(x.shape[-2] / hidden) if tiles is None else tiles
    if count < 2:
        return forward(x)
    parameters = [one for one in mlp.parameters() if one.requires_grad]
    if torch.is_grad_enabled() and parameters and not x.requires_grad:
        x = x.detach().requires_grad_()
    return TiledMLP.apply(lambda _mlp, tile: forward(tile), mlp, x, count, parameters)


def tiled_cross_entropy(
    model: Any, hidden_BLH: torch.Tensor, labels_BL: torch.Tensor, tiles: int | None
) -> torch.Tensor:
    """Return the sum of the cross-entropies of all labelled positions, from logits of one tile at a time.

    `None` makes tiles whose fp32 logits take up to 1 GiB. Labels stand beside the positions that predict them.
    """
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute

    head = head_module(model)
    parameters = [one for one in head.parameters() if one.requires_grad]
    if torch.is_grad_enabled() and parameters and not hidden_BLH.requires_grad:
        hidden_BLH = hidden_BLH.detach().requires_grad_()
    embedding = {id(one) for one in model.get_input_embeddings().parameters()}
    tied = [one for one in parameters if id(one) in embedding]
    samples, length = labels_BL.shape
    size = samples * length * output_head(model).vocab_size * 4
    count = math.ceil(size / _LOGITS_BYTES_OF_A_TILE) if tiles is None else tiles

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = output_head(model).logits(x).float()
        return torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), y.reshape(-1), ignore_index=_IGNORED_LABEL, reduction="sum"
        )

    if hidden_BLH.requires_grad and tied:
        hidden_BLH.register_hook(lambda _gradient: _say_ready(tied, ready=True))
    total: torch.Tensor = sequence_tiled_compute(
        loss_of,
        seqlen=length,
        shards=max(1, min(count, length)),
        kwargs_to_shard={"x": hidden_BLH, "y": labels_BL},
        kwargs_to_pass={},
        grad_requiring_tensor_key="x",
        compute_params=[one for one in parameters if id(one) not in embedding],
        output_unshard_dimension=0,
        output_reduction="sum",
    )
    if total.requires_grad and tied:
        total.register_hook(lambda _gradient: _say_ready(tied, ready=False))
    return total


def _say_ready(parameters: list[Any], *, ready: bool) -> None:
    """Tell ZeRO whether the gradients of parameters are complete."""
    for parameter in parameters:
        parameter.ds_grad_is_ready = ready
