"""One stage of a causal language model: its own part of Transformers' modules, under their own names.

B sequences, S tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ds_configs.specs.stages import PipelineStage
from .families import attention_masks
from .loading import StageParts
from .tensor_parallel import divide_layer


def stage_inputs(
    first: Tensor, attention_mask_BS: Tensor | None = None, position_ids_BS: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return what a stage reads: ids or hidden states, then padding mask and positions where there are any.

    Positions without a mask tell packed sequences apart, as in Transformers, so they are known by their dtype.

    Args:
        first: Token ids [B, S], or hidden states [B, S, D].
        attention_mask_BS: 1 for tokens and 0 for padding.
        position_ids_BS: Position of each token in its sequence.
    """
    mask = () if attention_mask_BS is None else (attention_mask_BS.to(torch.uint8),)
    positions = () if position_ids_BS is None else (position_ids_BS.to(torch.int32),)
    return (first, *mask, *positions)


def _mask_and_positions(others: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    positions = next((tensor for tensor in others if tensor.dtype == torch.int32), None)
    mask = next((tensor for tensor in others if tensor is not positions), None)
    return mask, positions


class CausalLMStage(nn.Module):
    """Contiguous layers of a model, with embedding or head where the stage has them.

    The first stage reads `stage_inputs(...)`; every stage but the last returns hidden states with the same padding mask
    (uint8) and positions (int32) behind them, because rotary tables and causal masks are cheaper to make on each stage
    than to send: one byte and four bytes for each token, against `2 * D` for the hidden states in 16 bit. The last
    stage returns logits.
    """

    def __init__(
        self,
        parts: StageParts,
        stage: PipelineStage,
        *,
        activation_checkpointing: bool = False,
        tensor_group: Any = None,
    ) -> None:
        """Take the modules of a stage.

        Args:
            parts: Where they come from.
            stage: Which they are.
            activation_checkpointing: Whether each decoder layer is recomputed in the backward pass.
            tensor_group: Ranks that hold the matrices of the layers together; `None` when this rank holds them whole.
        """
        super().__init__()
        self.config, self.stage, self._family = parts.config, stage, parts.family
        for name in parts.names(stage):
            module = parts.part(name)
            # One after the other, so that no more than one layer is whole.
            if tensor_group is not None and name.startswith(f"{self._family.layers}."):
                divide_layer(module, tensor_group)
            _attach(self, name, module)
        self.tied_name = f"{parts.family.head}.weight" if parts.tied and stage.has_head else None
        """Name of the head's weight where it is the token embedding's, which another stage may hold."""
        if activation_checkpointing:
            for index in self._layers:
                layer: Any = self.get_submodule(f"{self._family.layers}.{index}")
                layer.gradient_checkpointing = True
                layer._gradient_checkpointing_func = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)

    @property
    def _layers(self) -> range:
        return range(self.stage.first_layer, self.stage.end_layer)

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Return what the next stage reads, or logits on the last one."""
        first, *others = (inputs,) if isinstance(inputs, Tensor) else inputs
        sent = stage_inputs(first, *_mask_and_positions(others))[1:]
        mask_BS, given_BS = _mask_and_positions(sent)
        # Counted from 0 where none are given, padding included, as the models do.
        counted_BS = torch.arange(first.shape[1], device=first.device)[None]
        position_ids_BS = counted_BS if given_BS is None else given_BS.long()
        hidden_BSD = self._embedded(first, position_ids_BS) if self.stage.has_embedding else first
        hidden_BSD = self._through_layers(hidden_BSD, mask_BS, position_ids_BS)
        if self.stage.has_head:
            return self._logits(hidden_BSD)
        return (hidden_BSD, *sent) if sent else hidden_BSD

    def _embedded(self, input_ids_BS: Tensor, position_ids_BS: Tensor) -> Tensor:
        family = self._family
        hidden_BSD: Tensor = self.get_submodule(family.embedding)(input_ids_BS)
        if family.position_embedding:
            hidden_BSD = hidden_BSD + self.get_submodule(family.position_embedding)(position_ids_BS)
        return self.get_submodule(family.dropout)(hidden_BSD) if family.dropout else hidden_BSD

    def _through_layers(self, hidden_BSD: Tensor, mask_BS: Tensor | None, position_ids_BS: Tensor) -> Tensor:
        family = self._family
        masks = attention_masks(family, self.config, hidden_BSD, mask_BS, position_ids_BS, self._layers)
        rotary = {}
        if family.rotary:
            rotary["position_embeddings"] = self.get_submodule(family.rotary)(hidden_BSD, position_ids_BS)
        for index in self._layers:
            hidden_BSD = self.get_submodule(f"{family.layers}.{index}")(
                hidden_BSD, attention_mask=masks[index], position_ids=position_ids_BS, use_cache=False, **rotary
            )
        return hidden_BSD

    def _logits(self, hidden_BSD: Tensor) -> Tensor:
        logits_BSV: Tensor = self.get_submodule(self._family.head)(self.get_submodule(self._family.norm)(hidden_BSD))
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits_BSV if cap is None else torch.tanh(logits_BSV / cap) * cap


def causal_lm_loss(logits_BSV: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Return `scale * sum(-log p(label))` over the tokens that a label follows, summed in fp32.

    DeepSpeed averages a step's loss over micro-batches and data-parallel ranks, so that
    `scale = micro_batches * data_parallel_size / tokens`, with the tokens of the whole global batch, makes it the mean
    over tokens that the Trainer computes from `num_items_in_batch` (transformers/loss/loss_utils.py).

    Args:
        logits_BSV: Logits of the last stage.
        labels: Labels [B, S], not shifted, -100 where no loss is taken; and the scale, a scalar.
    """
    labels_BS, scale = labels
    # Shifting the labels leaves the logits as they are; shifting these would copy them.
    next_BS = nn.functional.pad(labels_BS[:, 1:], (0, 1), value=-100)
    losses = nn.functional.cross_entropy(
        logits_BSV.flatten(0, 1).float(), next_BS.flatten(), ignore_index=-100, reduction="sum"
    )
    return losses * scale.to(losses.dtype)


def _attach(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, module)
