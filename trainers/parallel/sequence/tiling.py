"""Legality of computing MLPs and the loss in tiles, and the tiled loss of a shard."""

from __future__ import annotations

from typing import Any

from ....ds_configs.specs.errors import Fault
from ....plugins.deepspeed.tiled_compute import has_dropout, mlps, tiled_cross_entropy
from ...losses.head_forward import HeadReplacement
from .checks import base_model
from .shards import Shard

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def tiling_faults(
    model: Any, arguments: Any, *, size: int, tiled_mlp: bool | int, tiled_loss: bool | int
) -> list[Fault]:
    """Return what forbids to compute MLPs or the loss in tiles."""
    faults = [
        Fault(where=name, value=value, rule="must be True, False or a number of tiles above 1", fix="use True")
        for name, value in (("tiled_mlp", tiled_mlp), ("tiled_loss", tiled_loss))
        if not isinstance(value, bool) and value < 2
    ]
    inner = base_model(model)
    config = inner.config.get_text_config()
    if tiled_mlp and any((getattr(config, name, None) or 0) > 1 for name in _EXPERT_COUNTS):
        rule = "tiles dense MLPs, and the model routes tokens to experts"
        faults.append(Fault(where="tiled_mlp", value=tiled_mlp, rule=rule, fix="leave it out"))
    elif tiled_mlp:
        found = mlps(inner)
        if not found:
            rule = f"finds no MLP in the layers of {type(inner).__name__}"
            faults.append(Fault(where="tiled_mlp", value=tiled_mlp, rule=rule, fix="leave it out"))
        if any(has_dropout(mlp) for mlp in found):
            rule = "computes tiles twice, and dropout would differ"
            faults.append(Fault(where="tiled_mlp", value=tiled_mlp, rule=rule, fix="set the model's dropout to 0"))
    if tiled_loss and size == 1:
        rule = "computes the loss of a shard, and sequences are not shared"
        faults.append(Fault(where="tiled_loss", value=tiled_loss, rule=rule, fix="use sequence_parallel_size > 1"))
    if getattr(arguments, "use_liger_kernel", False):
        replaced = {"tiled_mlp": (tiled_mlp, "MLPs"), "tiled_loss": (tiled_loss, "the loss")}
        faults += [
            Fault(where=name, value=value, rule=f"and use_liger_kernel both replace {what}", fix="choose one of them")
            for name, (value, what) in replaced.items()
            if value
        ]
    if tiled_loss and arguments.label_smoothing_factor:
        rule = "computes the model's own loss, and label smoothing needs its logits"
        faults.append(Fault(where="tiled_loss", value=tiled_loss, rule=rule, fix="set label_smoothing_factor to 0"))
    return faults


def tile_count(tiles: bool | int) -> int | None:
    """Return how many tiles a switch asks for; `None` where the size decides."""
    return None if isinstance(tiles, bool) else tiles


class TiledLoss:
    """The mean cross-entropy of a shard's labels, from the input of the model's head."""

    def __init__(self, model: Any, tiles: bool | int) -> None:
        self._model = base_model(model)
        self._tiles = tile_count(tiles)
        self._checked = False

    def __call__(self, model: Any, shard: Shard) -> tuple[Any, Any]:
        """Run the model on a shard and return its loss, with outputs that have no logits."""
        assert shard.labelled is not None
        labels_BL = shard.labels(shifts=False)
        inner = self._model
        replacement = HeadReplacement(inner, lambda hidden: tiled_cross_entropy(inner, hidden, labels_BL, self._tiles))
        with replacement():
            outputs = model(**shard.inputs)
        if not self._checked:
            replacement.check_logits(outputs.logits)
            self._checked = True
        loss = replacement.result / shard.labelled.clamp(min=1)
        outputs["logits"] = None
        coefficient = getattr(inner.config.get_text_config(), "router_aux_loss_coef", 0.0)
        auxiliary = getattr(outputs, "aux_loss", None)
        if auxiliary is not None and coefficient:
            loss = loss + coefficient * auxiliary.to(loss.device)
        return loss, outputs
