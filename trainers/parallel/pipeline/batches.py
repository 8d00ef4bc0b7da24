"""Batches for the stages of a pipeline: one shape per step.

Shapes: B samples of a micro-batch, S tokens of its longest sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....ds_configs.specs.errors import ConfigError, UsageError
from ...data.chat import IGNORED_LABEL as IGNORED

if TYPE_CHECKING:
    import torch

_FILL = {"input_ids": 0, "attention_mask": 0, "position_ids": 0, "labels": IGNORED}


def sampled_batch_errors(batch: Mapping[str, Any]) -> list[ConfigError]:
    """Return an error for each entry of a collated batch that stages cannot pass on, and for each missing entry."""
    import torch

    rule, fix = f"pipeline stages accept only {', '.join(_FILL)}", "omit it in the collator"
    errors = [ConfigError(where="batch", value=name, rule=rule, fix=fix) for name in batch if name not in _FILL]
    for name in ("input_ids", "labels"):
        if name not in batch:
            errors.append(ConfigError(where="batch", rule=f"needs {name}", fix="add it in the collator"))
    for name, tensor in batch.items():
        if name in _FILL and (not torch.is_tensor(tensor) or tensor.dim() != 2):
            shape = str(list(tensor.shape)) if torch.is_tensor(tensor) else type(tensor).__name__
            errors.append(ConfigError(where=f"batch: {name}", value=shape, rule="must be a tensor [samples, tokens]"))
    return errors


def of_one_shape(batches: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Pad the batches of a step to the largest number of samples and of tokens among them.

    Added tokens are on the right, where no token attends to them, and have no label. An existing mask excludes them. A
    batch without a mask gets one only if another batch of the step has one: without a mask, positions separate packed
    sequences. Added samples repeat the first sample of their batch without its labels, because attention cannot
    normalize over a sample without visible tokens.

    Raises:
        UsageError: a batch has entries that stages cannot pass on, or only some batches have positions.
    """
    import torch

    errors = [error for batch in batches for error in sampled_batch_errors(batch)]
    if len({"position_ids" in batch for batch in batches}) > 1:
        rule = "must be in every micro-batch of a step or in none of them"
        errors.append(ConfigError(where="batch: position_ids", rule=rule, fix="add it in the collator"))
    if errors:
        raise UsageError(list(dict.fromkeys(errors)))
    samples = max(len(batch["input_ids"]) for batch in batches)
    tokens = max(batch["input_ids"].shape[1] for batch in batches)
    is_masked = any("attention_mask" in batch for batch in batches)
    padded = []
    for batch in batches:
        entries = dict(batch)
        if is_masked and "attention_mask" not in entries:
            entries["attention_mask"] = torch.ones_like(entries["input_ids"])
        for name, tensor_BS in entries.items():
            missing = tokens - tensor_BS.shape[1]
            grown_BS = torch.nn.functional.pad(tensor_BS, (0, missing), value=_FILL[name]) if missing else tensor_BS
            if more := samples - len(grown_BS):
                added_BS = grown_BS[:1].expand(more, -1)
                grown_BS = torch.cat([grown_BS, added_BS if name != "labels" else torch.full_like(added_BS, IGNORED)])
            entries[name] = grown_BS
        padded.append(entries)
    return padded


def for_stages(
    batch: Mapping[str, torch.Tensor], loss_factor: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, torch.Tensor]]:
    """Return the inputs of the first stage, and for the last stage the labels with the factor of their summed loss.

    Args:
        batch: Tensors [B, S] by name.
        loss_factor: Factor of the summed cross-entropy, a float32 scalar.
    """
    from ....plugins.deepspeed_pipeline.stage import stage_inputs

    inputs = stage_inputs(batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids"))
    return inputs, (batch["labels"], loss_factor)
