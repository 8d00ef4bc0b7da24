"""Cross-entropy on held-out samples while a Trainer's model is wrapped.

Seen with transformers 5.17.0: `Trainer.evaluate` averages batches of different numbers of labels, and before training
it starts another DeepSpeed engine; here every labelled token counts the same, and the engine that trains is asked.
"""

from __future__ import annotations

from typing import Any

from ..data.chat import IGNORED_LABEL


def held_out_cross_entropy(trainer: Any) -> float:
    """Return the mean over all labelled tokens of the evaluation set, in nats; every rank must call it."""
    import torch

    model = trainer.model_wrapped
    was_training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)
    with torch.no_grad(), trainer.compute_loss_context_manager():
        for batch in trainer.get_eval_dataloader():
            inputs = trainer._prepare_inputs(batch)
            labels = inputs.pop("labels")
            logits = model(**inputs, use_cache=False).logits
            for row, own in zip(logits[:, :-1], labels[:, 1:], strict=True):
                sums[0] += torch.nn.functional.cross_entropy(
                    row.float(), own, ignore_index=IGNORED_LABEL, reduction="sum"
                )
                sums[1] += (own != IGNORED_LABEL).sum()
    model.train(was_training)
    total, count = trainer.accelerator.reduce(sums, "sum").tolist()
    return float(total / count)
