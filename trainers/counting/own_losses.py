"""Losses that a user's Trainer computes: weights of micro-batches, so that a step equals one process.

A loss is a sum, a mean over labels, or a mean over samples. Each is a weighted sum of the losses of its parts:

    loss(all rows, n) = sum of p * loss(part, p * n),

where n is `num_items_in_batch` and p is 1 for a sum, or the part's share of the labels or of the samples. Since n
shrinks with p, terms that are divided by n are exact for each p, also beside a mean (`super().compute_loss` plus a
regularizer). The first batch shows which p holds; no source code is read for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins.transformers.training_arguments import own_class

if TYPE_CHECKING:
    import torch
    from transformers import Trainer

OwnLoss = Literal["sum", "mean", "sample_mean"]
"""What an own loss is of its batch: a sum, or terms divided by `num_items_in_batch`; a mean over labels; over samples.
Without labels of tokens or classes, both means are over samples."""
IGNORED = -100
_TOLERANCE = 1e-4
_FIX = 'pass own_loss="mean", "sample_mean" or "sum" to trainer_for, or set it as an attribute of the Trainer class'


def own_loss_of(trainer: Trainer) -> Callable[..., Any] | None:
    """Return the loss function of a user's Trainer; `None` if Transformers, TRL or Shardwright computes the loss.

    Also `None` for subclasses of TRL's trainers other than `SFTTrainer`, whose batches are no rows of labels.
    """
    function: Callable[..., Any] | None = trainer.compute_loss_func
    if function is not None:
        return function
    for base in own_class(trainer).__mro__:
        package = base.__module__.partition(".")[0]
        loss = vars(base).get("compute_loss")
        if loss is not None:
            return None if package in ("transformers", "trl", "shardwright") else inspect.unwrap(loss)
    return None


def computes_own_loss(trainer: Trainer) -> bool:
    """Return whether a Trainer computes another loss than the model's."""
    from transformers import Trainer

    return (
        own_class(trainer).compute_loss is not Trainer.compute_loss
        or trainer.compute_loss_func is not None
        or trainer.label_smoother is not None
    )


def is_loss_of_rows(trainer: Trainer) -> bool:
    """Return whether the batches of a Trainer can be concatenated row by row."""
    names = [base.__name__ for base in type(trainer).__mro__ if base.__module__.partition(".")[0] == "trl"]
    return not names or "SFTTrainer" in names


def requested_kind(trainer: Trainer) -> OwnLoss | None:
    """Return the attribute `own_loss` of a Trainer or its class.

    Raises:
        UsageError: it is not one of the kinds.
    """
    kind = getattr(trainer, "own_loss", None)
    if kind is not None and kind not in get_args(OwnLoss):
        rule = f"must be one of {', '.join(get_args(OwnLoss))}"
        raise UsageError(
            ConfigError(where="own_loss", value=kind, rule=rule, fix="or omit it: the first batch shows it")
        )
    return kind


def multiplies_by_ranks(loss: Callable[..., Any]) -> bool:
    """Return whether an own loss multiplies by the number of ranks itself, as Transformers' did before version 5."""
    code = getattr(loss, "__code__", None)
    names = set(code.co_names) if code is not None else set()
    return bool(names & {"num_processes", "world_size", "get_world_size"}) and (
        "average_tokens_across_devices" not in names
    )


def accepts_count(loss: Callable[..., Any]) -> bool:
    """Return whether `compute_loss` accepts `num_items_in_batch`; losses for Transformers before 4.46 do not."""
    parameters = inspect.signature(loss).parameters.values()
    return any(each.name == "num_items_in_batch" or each.kind is each.VAR_KEYWORD for each in parameters)


def checked_loss(result: Any, trainer: Trainer, *, return_outputs: bool) -> tuple[torch.Tensor, Any]:
    """Return loss and outputs from the result of an own loss.

    Raises:
        UsageError: the result is not one number, or not a number and outputs if these were requested.
    """
    import torch

    where = f"{type(trainer).__name__}.compute_loss"
    if return_outputs and isinstance(result, tuple) and len(result) == 2:
        loss, outputs = result
    else:
        loss, outputs = result, None
    if torch.is_tensor(loss) and loss.numel() == 1 and (outputs is not None or not return_outputs):
        return loss, outputs
    if return_outputs and torch.is_tensor(loss) and loss.numel() == 1:
        value = "a tensor without outputs"
    elif torch.is_tensor(loss):
        value = f"a tensor of {loss.numel()} values"
    else:
        value = f"a {type(loss).__name__}"
    rule = f"returned {value}; it must return one number as a tensor, and (loss, outputs) if return_outputs is true"
    fix = "add up the terms of the loss, and log them with self.log"
    raise UsageError(ConfigError(where=where, rule=rule, fix=fix))


def kind_of_loss(
    loss_of: Callable[[Mapping[str, Any], float | None], torch.Tensor],
    batch: Mapping[str, Any],
    count_labels: Callable[[Mapping[str, Any]], int],
    gather: Callable[[torch.Tensor], torch.Tensor],
    *,
    input_name: str,
) -> OwnLoss | None:
    """Return what kind of loss of its batch a function computes; `None` if it is none of them.

    The batch is followed by its own rows with reversed inputs and half of their labels. Every rank must call it.

    Args:
        loss_of: The loss of a batch, for a value of `num_items_in_batch`.
        batch: Tensors with one row per sample.
        count_labels: The number of labels of a batch.
        gather: Concatenates a tensor of every rank.
        input_name: Name of the model's main input.
    """
    import torch

    rows = len(next(value for value in batch.values() if torch.is_tensor(value)))
    halved = dict(batch)
    for name, value in batch.items():
        if name == input_name:
            halved[name] = value.flip(-1)
        elif name in ("labels", "shift_labels") and torch.is_tensor(value):
            if value.is_floating_point() or value.dim() < 2:
                continue
            has_label = value.ne(IGNORED).flatten()
            dropped = has_label & (has_label.cumsum(0) % 2 == 0)
            halved[name] = value.flatten().masked_fill(dropped, IGNORED).reshape(value.shape)
    both = {
        name: torch.cat([value, halved[name]])
        if torch.is_tensor(value) and value.dim() and len(value) == rows
        else value
        for name, value in batch.items()
    }
    counts = [count_labels(part) for part in (batch, halved)]
    items = float(sum(counts)) or None
    whole = loss_of(both, items)
    # Labels decide only where both parts have some, and a different number of them.
    labelled = all(counts) and counts[0] != counts[1]
    shares: dict[str, tuple[float, float]] = {"sum": (1.0, 1.0), "sample_mean": (0.5, 0.5)}
    shares["mean"] = (counts[0] / sum(counts), counts[1] / sum(counts)) if labelled else (0.5, 0.5)
    errors = []
    for kind in get_args(OwnLoss):
        parts = [
            share * loss_of(part, items and share * items)
            for share, part in zip(shares[kind], (batch, halved), strict=True)
        ]
        error = ((sum(parts) - whole).abs() / whole.abs().clamp(min=1e-7)).reshape(())
        # A rank without enough labels contributes nothing.
        errors.append(error.nan_to_num(torch.inf) if all(counts) else torch.zeros_like(error))
    # The nearest kind: a small regularizer changes a loss by less than the tolerance.
    every = gather(torch.stack(errors)[None]).amax(0).tolist()
    best = min(range(len(every)), key=every.__getitem__)
    return get_args(OwnLoss)[best] if every[best] <= _TOLERANCE else None


def unknown_kind_error(trainer: Trainer) -> UsageError:
    """Return the error about a loss that is neither a sum nor a mean over rows or labels."""
    name = "compute_loss_func" if trainer.compute_loss_func is not None else f"{type(trainer).__name__}.compute_loss"
    rule = (
        "is neither a sum nor a mean over the labels or samples of its batch, so micro-batches and ranks would train "
        "another loss than one process"
    )
    return UsageError(ConfigError(where=name, rule=rule, fix=f"rewrite it as one of these; if it is one, {_FIX}"))


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Compute without gradients, dropout and changes of the random state inside the block."""
    import torch

    training = model.training
    model.eval()
    # A loss may have terms that only a training step computes; layers such as dropout are inside the model.
    model.training = training
    try:
        with torch.no_grad(), torch.random.fork_rng():
            yield
    finally:
        model.train(training)
