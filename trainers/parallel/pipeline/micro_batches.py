"""Micro-batches of one optimizer step for the stages of a pipeline: one shape, and the weight of each one's loss.

Shapes: B samples of a micro-batch, S tokens of its longest sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....ds_configs.specs.errors import Fault, UsageError

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""Label of a token without a loss."""

_FILL = {"input_ids": 0, "attention_mask": 0, "position_ids": 0, "labels": IGNORED}


def sampled_batch_faults(batch: Mapping[str, Any]) -> list[Fault]:
    """Return a fault for everything in a collated batch that stages cannot pass on, and for what is missing."""
    import torch

    names = ", ".join(_FILL)
    faults = [
        Fault(where="batch", value=name, rule=f"stages of a pipeline take {names}", fix="leave it out in the collator")
        for name in batch
        if name not in _FILL
    ]
    for name in ("input_ids", "labels"):
        if name not in batch:
            faults.append(Fault(where="batch", rule=f"needs {name}", fix="add it in the collator"))
    for name, tensor in batch.items():
        if name in _FILL and (not torch.is_tensor(tensor) or tensor.dim() != 2):
            shape = str(list(tensor.shape)) if torch.is_tensor(tensor) else type(tensor).__name__
            faults.append(Fault(where=f"batch: {name}", value=shape, rule="must be a tensor [samples, tokens]"))
    return faults


def predicted_tokens(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return how many labels of a batch the model is trained to predict; the first of a sample is none of them."""
    return batch["labels"][:, 1:].ne(IGNORED).sum()


def of_one_shape(batches: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Pad the batches of a step to the most samples and the most tokens among them.

    Added tokens stand on the right, where no token attends to them, and have no label. A mask that is there leaves them
    out, and none is made, since positions without one tell packed sequences apart. Added samples repeat the first one
    of their batch without its labels: a sample without any visible token would give attention nothing to normalise.

    Raises:
        UsageError: a batch holds what stages cannot pass on, or only some have positions.
    """
    faults = [fault for batch in batches for fault in sampled_batch_faults(batch)]
    if len({"position_ids" in batch for batch in batches}) > 1:
        rule = "must be in every micro-batch of a step or in none: stages are told once what follows"
        faults.append(Fault(where="batch: position_ids", rule=rule, fix="add it in the collator"))
    if faults:
        raise UsageError(list(dict.fromkeys(faults)))
    samples = max(len(batch["input_ids"]) for batch in batches)
    tokens = max(batch["input_ids"].shape[1] for batch in batches)
    masked = any("attention_mask" in batch for batch in batches)
    return [_padded(batch, samples, tokens, masked=masked) for batch in batches]


def _padded(batch: Mapping[str, torch.Tensor], samples: int, tokens: int, *, masked: bool) -> dict[str, torch.Tensor]:
    import torch

    whole = dict(batch)
    if masked and "attention_mask" not in whole:
        whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    padded = {}
    for name, tensor_BS in whole.items():
        missing = tokens - tensor_BS.shape[1]
        grown_BS = torch.nn.functional.pad(tensor_BS, (0, missing), value=_FILL[name]) if missing else tensor_BS
        if more := samples - len(grown_BS):
            added_BS = grown_BS[:1].expand(more, -1)
            grown_BS = torch.cat([grown_BS, added_BS if name != "labels" else torch.full_like(added_BS, IGNORED)])
        padded[name] = grown_BS
    return padded


def without_labels(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch that takes its place in a schedule and adds nothing to the loss."""
    import torch

    return {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}


def for_stages(
    batch: Mapping[str, torch.Tensor], loss_factor: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, torch.Tensor]]:
    """Return the inputs of the first stage, and labels with the factor of their summed loss for the last one.

    Args:
        batch: Tensors [B, S] by name.
        loss_factor: What the last stage multiplies the summed cross-entropy by, a float32 scalar.
    """
    from ....plugins.deepspeed_pipeline.stage import stage_inputs

    inputs = stage_inputs(batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids"))
    return inputs, (batch["labels"], loss_factor)
