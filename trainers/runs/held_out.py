"""Cross-entropy on held-out samples while a Trainer's model is wrapped.

Seen with transformers 5.17.0: `Trainer.evaluate` averages batches of different numbers of labels, and before training
it starts another DeepSpeed engine; here every labelled token counts the same, and the engine that trains is asked.
"""

from __future__ import annotations

import math
from typing import Any

from ..data.chat import IGNORED_LABEL


def held_out_cross_entropy(trainer: Any) -> float:
    """Return the mean over all labelled tokens of the evaluation set, in nats; every rank must call it."""
    sums, counts = held_out_sums(trainer)
    return math.fsum(sums) / sum(counts)


def held_out_sums(trainer: Any) -> tuple[list[float], list[float]]:
    """Return the cross-entropy of each sample, in nats, and its labelled tokens; every rank must call it.

    Every rank gets all of them, rank after rank. Ranks that share samples have them as often as they are read.
    """
    import torch

    model = trainer.model_wrapped
    was_training = model.training
    model.eval()
    found = []
    with torch.no_grad(), trainer.compute_loss_context_manager():
        for batch in trainer.get_eval_dataloader():
            inputs = trainer._prepare_inputs(batch)
            labels = inputs.pop("labels")
            logits = model(**inputs, use_cache=False).logits
            for row, own in zip(logits[:, :-1], labels[:, 1:], strict=True):
                nats = torch.nn.functional.cross_entropy(row.float(), own, ignore_index=IGNORED_LABEL, reduction="sum")
                found.append(torch.stack([nats.double(), (own != IGNORED_LABEL).sum().double()]))
    model.train(was_training)
    sums, counts = trainer.accelerator.gather(torch.stack(found)).T.tolist()
    return sums, counts
