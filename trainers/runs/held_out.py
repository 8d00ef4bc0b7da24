"""Cross-entropy on held-out samples while a Trainer's model is wrapped.

Seen with transformers 5.17.0: `Trainer.evaluate` averages batches of different numbers of labels, and before training
it starts another DeepSpeed engine; here every labelled token counts the same, and the engine that trains is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data.chat import IGNORED_LABEL
from ..evaluation.estimates import STANDARD_ERROR, Estimate, token_mean


def held_out_cross_entropy(trainer: Any) -> Estimate:
    """Return the mean over all labelled tokens of the evaluation set, in nats; every rank must call it.

    Its error is over samples, and holds where ranks do not share them.
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
    return token_mean(sums, counts)


def logged(name: str, found: Estimate) -> dict[str, float]:
    """Return what the Trainer's log keeps of a mean, and checkpoints with it."""
    return {name: found.value} | (
        {} if found.standard_error is None else {f"{name}_{STANDARD_ERROR}": found.standard_error}
    )


def read_logged(state: Any, name: str) -> Estimate | None:
    """Return a mean that was logged, also where a run was resumed since."""
    entry: dict[str, float] = next((one for one in state.log_history if name in one), {})
    return Estimate(value=entry[name], standard_error=entry.get(f"{name}_{STANDARD_ERROR}")) if entry else None


def result_fields(means: Mapping[str, Estimate | None]) -> dict[str, float | None]:
    """Return means and their standard errors as fields of a result."""
    found: dict[str, float | None] = {}
    for name, mean in means.items():
        found |= {name: None if mean is None else mean.value}
        found |= {f"{name}_{STANDARD_ERROR}": None if mean is None else mean.standard_error}
    return found
