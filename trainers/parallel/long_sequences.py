"""Trainer callback for long sequences: tiled MLPs, a tiled loss, and checkpoints that wait in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins import patches
from ...plugins.transformers.gradient_checkpointing import offload_checkpoints
from ...plugins.transformers.output_heads import accepts_shifted_labels, base_model
from ...plugins.transformers.tiled_compute import (
    IGNORED_LABEL,
    mlps,
    share_tiled_mlps,
    tile_mlps,
    tiled_cross_entropy,
    untile_mlps,
    untiled_experts,
)
from ...plugins.transformers.training_arguments import deepspeed_configuration
from ..counting.counts import computes_own_loss, shifted_labels
from ..exact import check_attached, make_exact
from ..losses.fused_loss import HeadReplacement

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, Trainer, TrainerControl, TrainerState, TrainingArguments

_LIGER_MLPS = ("swiglu", "geglu")


class LongSequenceCallback(TrainerCallback):
    """Train on long sequences with the stock Trainer under any engine, also with sequence or context parallelism.

    Losses and gradients are those of the plain run. With `use_liger_kernel`, its fused loss replaces `tiled_loss`.

    Args:
        tiled_mlp: Compute MLPs and experts in tiles of tokens and recompute them in the backward pass. A number sets
            how many tiles; `True` selects `ceil(tokens of a rank / hidden size)`.
        tiled_loss: Compute logits and the model's own loss in tiles; the outputs have no logits, except in evaluations
            that need them. A number sets how many tiles; `True` keeps the logits of a tile below 1 GiB.
        offloaded_checkpoints: Of the layers that gradient checkpointing recomputes, the number whose input waits for
            the backward pass in (pinned) host memory, counted from the first.

    Example:
        >>> trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
        >>> LongSequenceCallback(tiled_mlp=True, tiled_loss=True, offloaded_checkpoints=32).attach(trainer)
        >>> trainer.train()
    """

    def __init__(
        self,
        *,
        tiled_mlp: bool | int = False,
        tiled_loss: bool | int = False,
        offloaded_checkpoints: int | None = None,
    ) -> None:
        self.tiled_mlp, self.tiled_loss = tiled_mlp, tiled_loss
        self.offloaded_checkpoints = offloaded_checkpoints or 0
        self._trainer: Any = None

    def errors(self, trainer: Trainer) -> list[ConfigError]:
        """Return why the model, the arguments or the class of a Trainer do not support it."""
        arguments, inner = trainer.args, base_model(trainer.model)
        tiles = {"tiled_mlp": self.tiled_mlp, "tiled_loss": self.tiled_loss}
        values = tiles | {"offloaded_checkpoints": self.offloaded_checkpoints}
        errors: list[ConfigError] = []

        def reject(where: str, rule: str, fix: str) -> None:
            errors.append(ConfigError(where=where, value=values[where], rule=rule, fix=fix))

        for name, value in tiles.items():
            if not isinstance(value, bool) and value < 2:
                reject(name, "must be True, False or a number of tiles above 1", "use True")
        if self.tiled_mlp:
            if experts := untiled_experts(inner):
                block = type(experts[0]).__name__
                reject("tiled_mlp", f"cannot tile {block}, whose forward gets no routed tokens", "omit it")
            elif not mlps(inner):
                reject("tiled_mlp", f"finds no MLP in the layers of {type(inner).__name__}", "omit it")
            if ((deepspeed_configuration(arguments) or {}).get("expert_parallel") or {}).get("enabled"):
                rule = "is not supported with expert_parallel: DeepSpeed replaces blocks after they were tiled"
                reject("tiled_mlp", rule, "omit it, or remove expert_parallel from the DeepSpeed configuration")
            if _liger_replaces(arguments, _LIGER_MLPS):
                fix = f"set {' and '.join(_LIGER_MLPS)} to False in liger_kernel_config, or omit tiled_mlp"
                reject("tiled_mlp", "and use_liger_kernel both replace MLPs", fix)
        if self.tiled_loss:
            if not accepts_shifted_labels(inner):
                reject("tiled_loss", f"needs a causal language model, not {type(inner).__name__}", "omit it")
            if arguments.label_smoothing_factor:
                rule = "computes the model's own loss, and label smoothing needs its logits"
                reject("tiled_loss", rule, "set label_smoothing_factor to 0")
            if computes_own_loss(trainer):
                rule = "computes only the model's own loss, but this Trainer computes another one from logits"
                reject("tiled_loss", rule, "omit it")
        if self.offloaded_checkpoints < 0:
            reject("offloaded_checkpoints", "must be a number of layers", "omit it")
        if self.offloaded_checkpoints and not arguments.gradient_checkpointing:
            rule = "needs gradient checkpointing, which is off"
            reject("offloaded_checkpoints", rule, "set gradient_checkpointing in TrainingArguments")
        return errors

    def attach(self, trainer: Trainer) -> None:
        """Tile the model's MLPs and its loss; call it right after the Trainer is created.

        Raises:
            UsageError: model, arguments or Trainer do not support it; lists all errors.
        """
        if errors := self.errors(trainer):
            raise UsageError(errors)
        model = base_model(trainer.model)
        untile_mlps(model)
        if self.tiled_mlp:
            tile_mlps(model, None if self.tiled_mlp is True else self.tiled_mlp)
        if self.tiled_loss and not _liger_replaces(trainer.args, ("fused_linear_cross_entropy",)):
            make_exact(trainer).tiled_loss = TiledLoss(model, None if self.tiled_loss is True else self.tiled_loss)
        self._trainer = trainer
        trainer.add_callback(self)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel | None = None,
        **kwargs: object,
    ) -> None:
        """Check that `attach` was called, share tiled MLPs with ZeRO-3, and offload the inputs of layers.

        Raises:
            UsageError: `attach` was not called, or fewer layers are recomputed.
        """
        check_attached(self, self._trainer)
        if model is not None:
            share_tiled_mlps(base_model(model))
            offload_checkpoints(model, self.offloaded_checkpoints)


class TiledLoss:
    """Replaces the forward of a causal language model by one that computes its own loss in tiles."""

    def __init__(self, model: PreTrainedModel, tiles: int | None) -> None:
        self._checked = self._keeps_logits = False

        def tiling(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def forward(*args: Any, **inputs: Any) -> Any:
                labels_BL = shifted_labels(inputs)
                # A model that an earlier Trainer has tiled, and Accelerate wrapped, runs both forwards.
                if labels_BL is None or self._keeps_logits or hasattr(model, "_tiles_its_loss"):
                    return original(*args, **inputs)
                items = inputs.pop("num_items_in_batch", None)
                further = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}

                def work(hidden_BLH: torch.Tensor) -> torch.Tensor:
                    labels = labels_BL.to(hidden_BLH.device)
                    return tiled_cross_entropy(model, hidden_BLH, labels, tiles, replacement.head)

                replacement = HeadReplacement(model, work)
                model._tiles_its_loss = True
                try:
                    with replacement():
                        outputs = original(*args, **further)
                finally:
                    del model._tiles_its_loss
                if not self._checked:
                    replacement.check_logits(outputs.logits)
                    self._checked = True
                if items is None:
                    items = labels_BL.ne(IGNORED_LABEL).sum().clamp(min=1)
                loss = replacement.result / (items.to(replacement.result.device) if hasattr(items, "to") else items)
                # With labels, models of Transformers add their balance loss themselves.
                auxiliary = getattr(outputs, "aux_loss", None)
                if auxiliary is not None:
                    loss = loss + model.router_aux_loss_coef * auxiliary.to(loss.device)
                outputs["loss"], outputs["logits"] = loss, None
                return outputs

            return forward

        patches.apply("tiled-loss", tiling, on=model)

    @contextmanager
    def keeping_logits(self, is_needed: bool) -> Iterator[None]:
        """Compute logits of all tokens in the block, if they are needed."""
        self._keeps_logits = is_needed
        try:
            yield
        finally:
            self._keeps_logits = False


def _liger_replaces(arguments: TrainingArguments, kernels: tuple[str, ...]) -> bool:
    configuration = arguments.liger_kernel_config or {}
    return bool(arguments.use_liger_kernel) and any(configuration.get(name, True) for name in kernels)
