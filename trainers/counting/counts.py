"""Counts of labels, samples and tokens with which a Trainer trains and evaluates as one process does.

With transformers 5.17.0 and 5.23.0:

- `evaluate` averages the means of batches, also over samples that Accelerate repeats, so `eval_loss` depends on the
  number of ranks and the batch size.
- `num_input_tokens_seen` adds up all ranks, also those that read the same samples, and counts the padding that a
  layout adds.
- A step without any label divides by zero.
- Losses that are means over their own batch are averaged over ranks and micro-batches, whatever these contain.

`exact.ExactTrainer` calls what is here.

A loss that a user's Trainer computes is a sum, a mean over labels, or a mean over samples. Each is a weighted sum of
the losses of its parts, so that a step with weighted micro-batches equals one process:

    loss(all rows, n) = sum of p * loss(part, p * n),

where n is `num_items_in_batch` and p is 1 for a sum, or the part's share of the labels or of the samples. Since n
shrinks with p, terms that are divided by n are exact for each p, also beside a mean (`super().compute_loss` plus a
regularizer). The first batch shows which p holds; no source code is read for it.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, get_args

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins.accelerate import EvaluationStep, SamplesOnce, trained_rows
from ...plugins.transformers.output_heads import base_model
from ...plugins.transformers.training_arguments import balances_experts, own_class
from ..data.chat import IGNORED_LABEL

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, Trainer

UNPADDED = "unpadded_tokens"
"""Entry of a batch that a layout has padded: its number of tokens before that, and of those that are not padding."""
_COUNT = "num_items_in_batch"


def evaluated_mean(sums: Sequence[float], weights: Sequence[float]) -> float:
    """Return the mean loss of an evaluation from sums over labelled tokens, or samples, and their numbers.

    Raises:
        UsageError: all weights are 0.
    """
    if not any(weights):
        rule = "has no token with a label, so there is no loss to average"
        fix = "check the chat template or the prompt mask"
        raise UsageError(ConfigError(where="eval_dataset", rule=rule, fix=fix))
    return math.fsum(sums) / math.fsum(weights)


def returns_mean(trainer: Trainer) -> bool:
    """Return whether the loss of a Trainer is its model's, and a mean over the batch for any number of labels.

    With transformers 5.17.0 and 5.23.0, a model whose `forward` accepts any keyword gets `num_items_in_batch`, and the
    Trainer multiplies its loss by the ranks. Classifiers of tokens and sequences, and most encoders, ignore the number
    and return a mean. Loss and gradients are then too large by the number of ranks and micro-batches.
    """
    from transformers import Trainer
    from transformers.loss.loss_utils import LOSS_MAPPING

    if trainer.compute_loss_func is not None or not isinstance(trainer, Trainer):
        return False
    kinds = own_class(trainer).__mro__
    above = kinds[: kinds.index(Trainer)]
    own_losses = [vars(base)["compute_loss"] for base in above if "compute_loss" in vars(base)]
    if not all("super" in inspect.unwrap(loss).__code__.co_names for loss in own_losses):
        return False
    if not trainer.model_accepts_loss_kwargs:
        return True
    if trainer.label_smoother is not None:
        # It divides by the number itself.
        return False
    model = base_model(trainer.model)
    if getattr(model, "accepts_loss_kwargs", False):
        return False
    config, loss = getattr(model, "config", None), LOSS_MAPPING.get(getattr(model, "loss_type", None))
    if config is not None and loss is LOSS_MAPPING["ForSequenceClassification"]:
        # The losses of regression and of several labels per sample are not divided by a number of labels.
        undivided = ("regression", "multi_label_classification")
        if config.num_labels == 1 or config.problem_type in undivided:
            return True
    return not divides_by_count(type(model).forward)


@cache
def _table() -> dict[str, Any]:
    table = tomllib.loads(files(__package__).joinpath("data", "label_counts.toml").read_text(encoding="utf-8"))
    return {name: value.split() if isinstance(value, str) else value for name, value in table.items()}


def divides_by_count(forward: Callable[..., Any]) -> bool:
    """Return whether the `forward` of a model passes the number of labels to the function that computes its loss.

    `data/label_counts.toml` says it of the classes of Transformers, and the source of all others. A function without
    source is assumed to.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING

    forward = inspect.unwrap(forward)
    kind, _, rest = getattr(forward, "__qualname__", "").partition(".")
    if rest != "forward" or not forward.__module__.startswith("transformers."):
        try:
            return passes_count(ast.parse(textwrap.dedent(inspect.getsource(forward))))
        except (OSError, TypeError, SyntaxError):
            return True
    if kind.endswith("ForCTC"):
        # Releases that have a function for this loss give it the number.
        return "ForCTC" in LOSS_MAPPING
    is_language_model = kind.endswith(tuple(_table()["language_models"]))
    return kind in _table()["dividing"] or (is_language_model and kind not in _table()["averaging"])


def passes_count(forward: ast.AST) -> bool:
    """Return whether source names the number of labels, or calls anything with labels and all other keywords."""
    for node in ast.walk(forward):
        if (isinstance(node, ast.Name) and node.id == _COUNT) or (
            isinstance(node, ast.Constant) and node.value == _COUNT
        ):
            return True
        if isinstance(node, ast.Call) and any(keyword.arg in (None, _COUNT) for keyword in node.keywords):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            names = (part for argument in arguments for part in ast.walk(argument) if isinstance(part, ast.Name))
            if any("label" in name.id for name in names):
                return True
    return False


def mean_weights(own: Sequence[int], total: float, *, ranks: int) -> list[float]:
    """Return the factor of each micro-batch's mean loss on a rank, so that a step is the mean over all labels.

    Args:
        own: Labels of the micro-batches.
        total: Labels of all of them on all ranks; ranks that read the same samples count each.
        ranks: All ranks, over which the engine averages. The Trainer averages over the micro-batches.

    >>> mean_weights([3, 1], 8, ranks=2)
    [1.5, 0.5]
    """
    return [count * ranks * len(own) / total if total else 0.0 for count in own]


@dataclass
class Evaluation:
    """Running sums of an evaluation."""

    samples: SamplesOnce
    batches: list[torch.Tensor] = field(default_factory=list)
    """Loss and weight of each batch of this rank."""
    rows: int | None = None
    """Samples of the last batch, until its losses were gathered."""
    weighs_samples: bool = True
    """Whether the weight of a batch is its number of samples, not of labels."""


class Counting:
    """Counts of one Trainer's steps."""

    def __init__(
        self, trainer: Trainer, ranks_of_a_sample: int, *, weighs_means: bool, weighs_own_losses: bool
    ) -> None:
        self._trainer, self._ranks_of_a_sample = trainer, ranks_of_a_sample
        # Ranks of a sequence hold parts of it, and a balance loss inside the model's is not a mean over labels.
        shares_sequences = getattr(trainer.accelerator, "parallelism_config", None) is not None
        is_plain = weighs_means and not shares_sequences and not balances_experts(trainer.model)
        own, weighs = own_loss_of(trainer), weighs_own_losses and is_plain and ranks_of_a_sample == 1
        self.own_loss = own if weighs and is_loss_of_rows(trainer) else None
        """Loss of the user that is weighed as what it is of its batch, `kind`; `None` if no such loss."""
        self.kind = requested_kind(trainer)
        self.weighs_means = self.own_loss is None and is_plain and returns_mean(trainer)
        """Whether the model's losses are means over the labels of their batch."""
        # Of the remaining micro-batches of a step:
        self.tokens: list[int] = []
        self.weights: list[float] = []
        """`mean_weights`."""
        self._shares: list[tuple[float, float]] = []
        """Shares of the labels and of the samples of a step."""

    def weigh(self, batches: list[Any], items: Any) -> None:
        """Compute the weights of a step's micro-batches; `items` is the number of labels that the Trainer counted.

        Raises:
            UsageError: the loss of the model itself would be the mean over no token on some rank.
        """
        import torch
        from transformers import Trainer

        args, gather = self._trainer.args, self._trainer.accelerator.gather
        if self.own_loss is not None:
            own = [(self.labels_in(batch), self.rows_in(batch)) for batch in batches]
            sums = torch.tensor(own, dtype=torch.float64, device=args.device).reshape(-1, 2).sum(0)
            # Ranks that read the same samples count each of them.
            labels, rows = (total / self._ranks_of_a_sample for total in gather(sums[None]).sum(0).tolist())
            self._shares = [(own_labels / (labels or 1), own_rows / (rows or 1)) for own_labels, own_rows in own]
        if self.weighs_means:
            self.weights = []
            if all("labels" in batch for batch in batches):
                counts = [self.labels_in(batch) for batch in batches]
                total = gather(torch.tensor(sum(counts), device=args.device)).sum()
                self.weights = mean_weights(counts, float(total), ranks=args.world_size)
        elif items is None and args.world_size > 1 and own_class(self._trainer).compute_loss is Trainer.compute_loss:
            # The model's own loss must not be the mean over no token on some rank.
            labelled = [tensor for batch in batches if (tensor := _labels(batch)) is not None]
            if not batches or len(labelled) < len(batches):
                return
            fewest = min(int(tensor.ne(IGNORED_LABEL).sum()) for tensor in labelled)
            if int(gather(torch.tensor(fewest, device=args.device)).min()) == 0:
                rule = "has no labelled token on some rank, so the loss of this model is a mean over nothing"
                fix = "use batches with labels, a number of samples that all ranks share, or dataloader_drop_last=True"
                value = type(self._trainer.model).__name__
                raise UsageError(ConfigError(where="batch", value=value, rule=rule, fix=fix))

    def next_mean(self, inputs: Any) -> tuple[Any, float]:
        """Return the next micro-batch and the weight of its mean loss."""
        weight = self.weights.pop(0)
        return _labelled_if_weightless(inputs, weight), weight

    def next_own(self, inputs: Any, items: Any) -> tuple[Any, Any, float | None]:
        """Return the next micro-batch, the number of labels that its loss gets, and the weight of the loss."""
        if not self._shares:
            return inputs, items, None
        trainer = self._trainer
        labels, rows = self._shares.pop(0)
        assert self.kind is not None, "measured with the first batch"
        share = {"sum": 1.0, "mean": labels, "sample_mean": rows}[self.kind]
        weight = share * trainer.args.world_size / self._ranks_of_a_sample
        if (not trainer.model_accepts_loss_kwargs or items is None) and trainer.compute_loss_func is None:
            # The Trainer divides by the micro-batches.
            weight *= trainer.current_gradient_accumulation_steps
        return _labelled_if_weightless(inputs, share), None if items is None else items * (share or 1.0), weight

    def measure_kind(self, model: Any, inputs: Any, counts_labels: bool, own_loss: Callable[..., Any]) -> None:
        """Set the kind of a user's loss from its values for a few rows; every rank calls it.

        Raises:
            UsageError: it is neither a sum nor a mean.
        """
        import torch

        trainer = self._trainer
        if isinstance(inputs, Mapping) and any(torch.is_tensor(value) for value in inputs.values()):
            rows = next(len(value) for value in inputs.values() if torch.is_tensor(value))
            first = {
                name: value[: -(-rows // 2)] if torch.is_tensor(value) and len(value) == rows else value
                for name, value in inputs.items()
            }

            def loss_of(batch: Mapping[str, Any], items: float | None) -> torch.Tensor:
                # A loss may remove entries of its batch.
                number = torch.tensor(items, device=trainer.args.device) if counts_labels and items else None
                loss: torch.Tensor = own_loss(model, dict(batch), number, {}).float()
                return loss

            with evaluating(model), without_balance_loss(trainer):
                name = getattr(trainer.model, "main_input_name", "input_ids")
                gather = trainer.accelerator.gather
                self.kind = kind_of_loss(loss_of, first, self.labels_in, gather, input_name=name)
        if self.kind is None:
            raise unknown_kind_error(trainer)

    def count_tokens(self, batches: list[Any]) -> None:
        """Count the tokens of each micro-batch over all ranks, padded as one process pads them."""
        import torch

        trainer, mode = self._trainer, self._trainer.args.include_num_input_tokens_seen
        unpadded = [batch.pop(UNPADDED, None) if isinstance(batch, dict) else None for batch in batches]
        name = getattr(trainer.model, "main_input_name", "input_ids")
        self.tokens = []
        if mode == "no" or not batches or any(name not in batch for batch in batches):
            return
        pad = getattr(trainer.processing_class, "pad_token_id", None)
        # All ranks gather the same number of micro-batches, also if the data of one ends before the others'.
        own = torch.zeros((1, max(len(batches), trainer.args.gradient_accumulation_steps), 3), dtype=torch.int64)
        for index, (batch, before) in enumerate(zip(batches, unpadded, strict=True)):
            inputs, rows, mask = batch[name], trained_rows(batch), batch.get("attention_mask")
            if mode == "all":
                counts = _padded_tokens(batch, name, before)
            elif before is not None:
                counts = (0, 0, before[1])
            elif mask is not None:
                counts = (0, 0, int(mask[:rows].sum()))
            else:
                counts = (0, 0, int(inputs[:rows].numel() if pad is None else (inputs[:rows] != pad).sum()))
            own[0, index] = torch.tensor(counts)
        gathered = trainer.accelerator.gather(own.to(trainer.args.device)).cpu()
        tokens = gathered[..., 0].sum(0) * gathered[..., 1].amax(0) + gathered[..., 2].sum(0)
        self.tokens = [int(count) // self._ranks_of_a_sample for count in tokens[: len(batches)]]

    def labels_in(self, batch: Any) -> int:
        """Return the number of labels that a model's loss is the mean over: of tokens, classes, or else samples."""
        labels = _labels(batch)
        if labels is None:
            return self.rows_in(batch)
        shifts = self._trainer._loss_shifts_labels or predicts_next_token(self._trainer.model)
        shifts = shifts and batch.get("shift_labels") is None
        return int((labels[..., 1:] if shifts else labels).ne(IGNORED_LABEL).sum())

    def rows_in(self, batch: Any) -> int:
        """Return the number of samples of a training batch that are not repeated."""
        from accelerate.utils import find_batch_size

        rows = trained_rows(batch)
        return (find_batch_size(batch) or 1) if rows is None else rows

    def evaluated_rows(self, step: EvaluationStep) -> int | None:
        """Return the number of samples that the loss of an evaluated batch is the mean over; `None` if over labels."""
        from accelerate.utils import find_batch_size

        if _labels(step.batch) is not None and (self.own_loss is None or self.kind != "sample_mean"):
            return None
        rows = step.rows
        if rows is None and isinstance(step.batch, list):
            # Rows that a trainer tokenizes itself, such as prompts.
            rows = len(step.batch)
        elif rows is None:
            # Texts beside the tensors have no batch size.
            tensors = {name: value for name, value in step.batch.items() if not isinstance(value, list)}
            rows = find_batch_size(tensors)
        return (rows or 1) if step.samples is None else step.samples


def at_least_one(items: Any) -> Any:
    """Replace a divisor of 0 labels by 1, so that the loss is 0."""
    import torch

    if torch.is_tensor(items):
        return torch.where(items == 0, torch.ones_like(items), items)
    return 1 if items == 0 else items


def predicts_next_token(model: PreTrainedModel) -> bool:
    """Return whether position t of the logits predicts token t + 1.

    The Trainer (transformers 5.17.0, trainer.py `_loss_shifts_labels`) derives it from the class name and misses
    GPT-2, whose count then includes the first token of every sample.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    inner = base_model(model)
    return getattr(inner, "loss_function", None) is ForCausalLMLoss and not inner.config.is_encoder_decoder


def _labelled_if_weightless(inputs: Any, weight: float) -> Any:
    """Return a batch without NaN as its mean loss: with any labels it is a number, which the weight 0 removes."""
    labels = _labels(inputs)
    return inputs if weight or labels is None else {**inputs, "labels": labels.clamp(min=0)}


def _labels(batch: Any) -> torch.Tensor | None:
    """Return the labels of tokens or classes; `None` for regression, and for losses without labels."""
    import torch

    if not hasattr(batch, "get"):
        # Collators of some trainers return a list of samples.
        return None
    for name in ("shift_labels", "labels"):
        labels = batch.get(name)
        if torch.is_tensor(labels):
            return None if labels.is_floating_point() else labels
    return None


def _padded_tokens(batch: Any, name: str, unpadded: tuple[int, int] | None) -> tuple[int, int, int]:
    """Return rows, the length of the longest, and the tokens of documents that are packed in one row."""
    inputs = batch[name]
    rows = len(inputs)
    tokens = inputs.numel() if unpadded is None else unpadded[0]
    if rows == 1 and "position_ids" in batch and "attention_mask" not in batch:
        return 0, 0, tokens
    trained, mask = trained_rows(batch), batch.get("attention_mask")
    if trained is None or trained == rows:
        return rows, tokens // rows, 0
    if trained and mask is not None and mask.dim() == 2 and int(mask.sum(1).max()) == tokens // rows:
        # One process pads the rows that count to the longest of them, unless its collator pads to a fixed length.
        return trained, int(mask[:trained].sum(1).max()), 0
    return trained, tokens // rows if trained else 0, 0


def shifted_labels(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the label that each position predicts, [B, S]; `None` for a batch without labels."""
    import torch

    if batch.get("shift_labels") is not None:
        return batch["shift_labels"]
    if batch.get("labels") is None:
        return None
    return torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)


def labelled_tokens(batches: Sequence[Mapping[str, Any]]) -> torch.Tensor | None:
    """Return how many tokens of unsharded batches have a label; `None` if a batch has no labels."""
    import torch

    shifted = [shifted_labels(batch) for batch in batches]
    counts = [labels.ne(IGNORED_LABEL).sum() for labels in shifted if labels is not None]
    return torch.stack(counts).sum() if counts and len(counts) == len(shifted) else None


@contextmanager
def without_balance_loss(trainer: Trainer) -> Iterator[None]:
    """Omit the load-balancing loss of a mixture inside the block: it is a mean over a batch, not over tokens."""
    name, model = "router_aux_loss_coef", trainer.model
    inner = base_model(model)
    config = getattr(inner, "config", None)
    text: Any = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    with ExitStack() as stack:
        for owner in (trainer, inner, text):
            if isinstance(getattr(owner, name, None), float | int):
                stack.enter_context(with_values(owner, **{name: 0.0}))
        yield


@contextmanager
def with_values(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object inside the block."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


OwnLoss = Literal["sum", "mean", "sample_mean"]
"""What an own loss is of its batch: a sum, or terms divided by `num_items_in_batch`; a mean over labels; over samples.
Without labels of tokens or classes, both means are over samples."""
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
            has_label = value.ne(IGNORED_LABEL).flatten()
            dropped = has_label & (has_label.cumsum(0) % 2 == 0)
            halved[name] = value.flatten().masked_fill(dropped, IGNORED_LABEL).reshape(value.shape)
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


SIGNIFICANT_STANDARD_ERRORS = 2.0
"""Standard errors above which a difference is not explained by the choice of text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over a text, in the unit of the averaged values."""

    value: float
    """The mean over all evaluated tokens."""
    standard_error: float | None
    """Of that mean, over windows; `None` with a single window."""

    @property
    def is_significant(self) -> bool | None:
        """Whether it is more than two standard errors away from 0; `None` without a standard error."""
        if self.standard_error is None:
            return None
        return abs(self.value) > SIGNIFICANT_STANDARD_ERRORS * self.standard_error


def token_mean(sums: Sequence[float], counts: Sequence[float]) -> Estimate:
    """Return ``m = Σ sᵢ / Σ tᵢ`` over windows i with sum sᵢ over tᵢ tokens, with the standard error of a ratio.

    ``SE = √(n / (n - 1) · Σ (sᵢ - m tᵢ)²) / Σ tᵢ`` over the n windows that have tokens (Cochran, Sampling Techniques,
    3rd ed., eq. 6.13 without the finite population); with equal tᵢ it is the standard deviation of the windows' means
    over √n. For the paired error of a difference between two models, pass the differences of the sums.

    Windows are treated as independent samples. Those of one document are still related, so the errors are rather too
    small than too large.
    """
    total = sum(counts)
    mean = math.fsum(sums) / total
    windows = sum(count > 0 for count in counts)
    if windows < 2:
        return Estimate(value=mean, standard_error=None)
    scatter = math.fsum((total_loss - mean * count) ** 2 for total_loss, count in zip(sums, counts, strict=True))
    return Estimate(value=mean, standard_error=math.sqrt(windows / (windows - 1) * scatter) / total)


def exponential(loss: Estimate) -> Estimate:
    """Return ``exp(m)`` of a mean loss in nats, with the first-order standard error ``exp(m) · SE``."""
    value = math.exp(min(loss.value, 700.0))
    error = None if loss.standard_error is None else value * loss.standard_error
    return Estimate(value=value, standard_error=error)
