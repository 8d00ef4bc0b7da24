"""Make a Trainer count labels, samples and tokens as one process does, under every layout.

With transformers 5.17.0 and 5.23.0:

- `evaluate` averages the means of batches, also over samples that Accelerate repeats, so `eval_loss` depends on the
  number of ranks and the batch size.
- `num_input_tokens_seen` adds up all ranks, also those that read the same samples, and counts the padding that a
  layout adds.
- `train_loss` contains the losses of the first rank since the last log.
- A step without any label divides by zero.
- Losses that are means over their own batch are averaged over ranks and micro-batches, whatever these contain.
- Without ZeRO, DeepSpeed does not keep the gradient norm that it clips by.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins import patches
from ...plugins.accelerate.repeated_samples import EvaluationStep, SamplesOnce, check_streams_of_ranks, trained_rows
from ...plugins.deepspeed.engine import keep_gradient_norm
from ...plugins.launching.messages import note_on_first_rank
from ...plugins.transformers.prepared_model import prepare_models_once
from ...plugins.transformers.run_settings import balances_experts
from ..data.chat import IGNORED_LABEL
from . import own_losses

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader
    from transformers import PreTrainedModel, Trainer

UNPADDED = "unpadded_tokens"
"""Entry of a batch that a layout has padded: its number of tokens before that, and of those that are not padding."""
_COUNT = "num_items_in_batch"
Method = Callable[..., Any]


def count_as_one_process(
    trainer: Trainer, *, ranks_of_a_sample: int = 1, evaluates: bool = True, weighs_own_losses: bool = False
) -> None:
    """Make a Trainer count labels, samples and tokens as one process does; call it after the Trainer was made.

    A second call replaces the first. Trainers of the process then also prepare their models once.

    Args:
        ranks_of_a_sample: Ranks that read the same samples.
        evaluates: Whether the Trainer evaluates with `prediction_step`, as the stock one does.
        weighs_own_losses: Whether to weigh a loss of the user as what its first batch shows. Layouts that split samples
            or experts, and models with a balance loss, keep the weights of the Trainer.
    """
    prepare_models_once()
    counts = _Counts(trainer, ranks_of_a_sample, weighs_own_losses=weighs_own_losses and evaluates)
    if counts.weighs_means:
        # Then the Trainer neither passes the number of labels to the model nor multiplies by the ranks.
        trainer.model_accepts_loss_kwargs = False
        patches.apply("mean-loss-weight", counts.weighing_means, on=trainer)
    if counts.own_loss is not None:
        patches.apply("own-loss-weight", counts.weighing_own_losses, on=trainer)
    patches.apply("counted-labels", counts.counting_labels, on=trainer)
    patches.apply("counted-tokens", counts.adding_tokens, on=trainer)
    patches.apply("loss-of-all-ranks", counts.averaging_the_rest, on=trainer)
    patches.apply("trainer-without-zero", counts.keeping_the_norm, on=trainer)
    if evaluates:
        patches.apply("evaluated-step", counts.evaluating_a_step, on=trainer)
        patches.apply("evaluated-samples", counts.evaluating, on=trainer)


def check_labelled(weights: Iterable[float]) -> None:
    """Check that an evaluation has labels.

    Raises:
        UsageError: no batch or sample has a weight.
    """
    if not any(weights):
        rule = "has no token with a label, so there is no loss to average"
        fix = "check the chat template or the prompt mask"
        raise UsageError(ConfigError(where="eval_dataset", rule=rule, fix=fix))


def evaluated_mean(sums: Sequence[float], weights: Sequence[float]) -> float:
    """Return the mean loss of an evaluation from sums over labelled tokens, or samples, and their numbers.

    Raises:
        UsageError: all weights are 0.
    """
    check_labelled(weights)
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
    above = type(trainer).__mro__[: type(trainer).__mro__.index(Trainer)]
    own_losses = [vars(base)["compute_loss"] for base in above if "compute_loss" in vars(base)]
    if not all("super" in inspect.unwrap(loss).__code__.co_names for loss in own_losses):
        return False
    if not trainer.model_accepts_loss_kwargs:
        return True
    if trainer.label_smoother is not None:
        # It divides by the number itself.
        return False
    model = trainer.model.get_base_model() if hasattr(trainer.model, "peft_config") else trainer.model
    if getattr(model, "accepts_loss_kwargs", False):
        return False
    config, loss = getattr(model, "config", None), LOSS_MAPPING.get(getattr(model, "loss_type", None))
    if config is not None and loss is LOSS_MAPPING["ForSequenceClassification"]:
        # The losses of regression and of several labels per sample are not divided by a number of labels.
        undivided = ("regression", "multi_label_classification")
        if config.num_labels == 1 or config.problem_type in undivided:
            return True
    return not _divides_by_count(type(model).forward)


def _divides_by_count(forward: Method) -> bool:
    """Return whether a model passes the number of labels to the function that computes its loss.

    It does so if it names the number, or calls anything with labels and all other keywords. A function without source
    is assumed to.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return True
    for node in ast.walk(tree):
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
class _Evaluation:
    """Running sums of an evaluation."""

    samples: SamplesOnce
    batches: list[torch.Tensor] = field(default_factory=list)
    """Loss and weight of each batch of this rank."""
    rows: int | None = None
    """Samples of the last batch, until its losses were gathered."""


class _Counts:
    def __init__(self, trainer: Trainer, ranks_of_a_sample: int, *, weighs_own_losses: bool) -> None:
        self._trainer, self._ranks_of_a_sample = trainer, ranks_of_a_sample
        self._evaluation: _Evaluation | None = None
        self._evaluates_a_step = False
        self._items: Any = None
        """Labels of the batch that is evaluated; `None` if the model's loss does not need them."""
        self._counts_labels = False
        """Whether the Trainer counts labels for the model's loss, while it evaluates a step."""
        self._tokens: list[int] = []
        """Tokens of the remaining micro-batches of this step."""
        # Ranks of a sequence hold parts of it, and a balance loss inside the model's is not a mean over labels.
        shares = ranks_of_a_sample > 1 or getattr(trainer.accelerator, "parallelism_config", None) is not None
        own = own_losses.own_loss_of(trainer)
        weighs = weighs_own_losses and not shares and not balances_experts(trainer.model)
        self.own_loss = own if weighs and own_losses.is_loss_of_rows(trainer) else None
        self._kind = own_losses.requested_kind(trainer)
        self._shares: list[tuple[float, float]] = []
        """Shares of the labels and of the samples of a step, of its remaining micro-batches."""
        self.weighs_means = self.own_loss is None and not shares and returns_mean(trainer)
        self.weighs_means = self.weighs_means and not balances_experts(trainer.model)
        self._weights: list[float] = []
        """`mean_weights` of the remaining micro-batches of this step."""

    # Training.

    def counting_labels(self, count: Method) -> Method:
        def get_num_items_in_batch(batch_samples: list[Any], device: torch.device) -> Any:
            import torch

            if self._evaluates_a_step:
                trainer = self._trainer

                def gather(value: torch.Tensor) -> torch.Tensor:
                    # As if every rank had the labels of this one, so that losses are means over this rank's labels.
                    return value.reshape(-1).repeat(trainer.args.world_size)

                with (
                    patches.applied("evaluated-labels", lambda _: gather, on=trainer.accelerator),
                    _set(trainer, model_accepts_loss_kwargs=self._counts_labels),
                ):
                    self._items = count(batch_samples, device)
                return _at_least_one(self._items)
            check_streams_of_ranks(self._trainer, len(batch_samples))
            self._tokens = self._count_tokens(batch_samples)
            items = count(batch_samples, device)
            if self.own_loss is not None:
                self._share(batch_samples)
            if self.weighs_means and all("labels" in batch for batch in batch_samples):
                own = [self._labels_in(batch) for batch in batch_samples]
                args = self._trainer.args
                total = self._trainer.accelerator.gather(torch.tensor(sum(own), device=args.device)).sum()
                self._weights = mean_weights(own, float(total), ranks=args.world_size)
            elif self.weighs_means:
                self._weights = []
            elif items is None:
                self._check_labels_of_every_rank(batch_samples)
            return _at_least_one(items)

        return get_num_items_in_batch

    def weighing_means(self, compute: Method) -> Method:
        def compute_loss(
            model: PreTrainedModel,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: torch.Tensor | int | None = None,
            **keywords: Any,
        ) -> Any:
            if not (model.training and self._weights):
                return compute(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch, **keywords)
            weight = self._weights.pop(0)
            labels = _labels(inputs)
            if not weight and labels is not None:
                # The mean over no label is NaN. With any labels it is a number, which the weight 0 removes.
                inputs = {**inputs, "labels": labels.clamp(min=0)}
            loss, outputs = compute(model, inputs, True, num_items_in_batch=num_items_in_batch, **keywords)
            loss = loss * weight
            return (loss, outputs) if return_outputs else loss

        return compute_loss

    def _share(self, batches: list[Any]) -> None:
        import torch

        own = [(self._labels_in(batch), self._rows_in(batch)) for batch in batches]
        sums = torch.tensor(own, dtype=torch.float64, device=self._trainer.args.device).reshape(-1, 2).sum(0)
        labels, rows = self._trainer.accelerator.gather(sums[None]).sum(0).tolist()
        # Ranks that read the same samples count each of them.
        labels, rows = labels / self._ranks_of_a_sample, rows / self._ranks_of_a_sample
        self._shares = [(own_labels / (labels or 1), own_rows / (rows or 1)) for own_labels, own_rows in own]

    def weighing_own_losses(self, compute: Method) -> Method:
        """Weigh a user's loss by its share of the step: see `own_losses`."""
        trainer, loss = self._trainer, self.own_loss
        assert loss is not None
        # A loss that multiplies by all ranks must also divide by all labels as often.
        extra = trainer.args.world_size if own_losses.multiplies_by_ranks(loss) else 1
        is_method = trainer.compute_loss_func is None
        accepts = not is_method or own_losses.accepts_count(loss)

        def computed(model: Any, inputs: Any, items: Any, return_outputs: bool, keywords: Any) -> Any:
            if accepts:
                items = None if items is None else items * extra
                keywords = {**keywords, "num_items_in_batch": items}
            # The weights below include the number of ranks.
            with _set(trainer.args, average_tokens_across_devices=extra > 1):
                result = compute(model, inputs, return_outputs, **keywords)
            return own_losses.checked_loss(result, trainer, return_outputs=return_outputs)

        def compute_loss(
            model: PreTrainedModel,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: torch.Tensor | int | None = None,
            **keywords: Any,
        ) -> Any:
            items, weight = num_items_in_batch, 1.0
            if self._kind is None:
                self._kind = self._kind_of(model, inputs, items is not None, computed)
            if self._evaluates_a_step:
                items = None if items is None else max(self._labels_in(inputs), 1)
            elif self._shares:
                labels, rows = self._shares.pop(0)
                share = {"sum": 1.0, "mean": labels, "sample_mean": rows}[self._kind]
                weight = share * trainer.args.world_size / self._ranks_of_a_sample
                if (not trainer.model_accepts_loss_kwargs or items is None) and is_method:
                    # The Trainer divides by the micro-batches.
                    weight *= trainer.current_gradient_accumulation_steps
                tensor = _labels(inputs)
                if not share and tensor is not None:
                    # The mean over no label is NaN. With any labels it is a number, which the weight 0 removes.
                    inputs = {**inputs, "labels": tensor.clamp(min=0)}
                items = None if items is None else items * (share or 1.0)
            result, outputs = computed(model, inputs, items, return_outputs, keywords)
            return (result * weight, outputs) if return_outputs else result * weight

        return compute_loss

    def _kind_of(self, model: Any, inputs: Any, counts_labels: bool, computed: Method) -> own_losses.OwnLoss:
        """Return the kind of a user's loss, from its values for a few rows; every rank calls it."""
        import torch

        trainer = self._trainer
        kind: own_losses.OwnLoss | None = None
        if isinstance(inputs, Mapping) and any(torch.is_tensor(value) for value in inputs.values()):
            rows = next(len(value) for value in inputs.values() if torch.is_tensor(value))
            first = {
                name: value[: -(-rows // 2)] if torch.is_tensor(value) and len(value) == rows else value
                for name, value in inputs.items()
            }

            def loss_of(batch: Mapping[str, Any], items: float | None) -> torch.Tensor:
                # A loss may remove entries of its batch.
                number = torch.tensor(items, device=trainer.args.device) if counts_labels and items else None
                loss: torch.Tensor = computed(model, dict(batch), number, False, {})[0].float()
                return loss

            with own_losses.evaluating(model), _without_balance_loss(trainer):
                name = getattr(trainer.model, "main_input_name", "input_ids")
                gather = trainer.accelerator.gather
                kind = own_losses.kind_of_loss(loss_of, first, self._labels_in, gather, input_name=name)
        if kind is None:
            raise own_losses.unknown_kind_error(trainer)
        return kind

    def adding_tokens(self, track: Method) -> Method:
        def track_num_input_tokens(inputs: Any) -> None:
            if self._tokens:
                self._trainer.state.num_input_tokens_seen += self._tokens.pop(0)
            else:
                track(inputs)

        return track_num_input_tokens

    def averaging_the_rest(self, finish: Method) -> Method:
        def finalize_training(*args: Any, **kwargs: Any) -> Any:
            trainer = self._trainer
            trainer._tr_loss = trainer.accelerator.gather(trainer._tr_loss).mean()
            return finish(*args, **kwargs)

        return finalize_training

    def keeping_the_norm(self, prepare: Method) -> Method:
        def prepare_for_training(*args: Any, **kwargs: Any) -> Any:
            prepared = prepare(*args, **kwargs)
            if self._trainer.is_deepspeed_enabled:
                keep_gradient_norm(self._trainer.model_wrapped)
            return prepared

        return prepare_for_training

    def _count_tokens(self, batches: list[Any]) -> list[int]:
        """Return the tokens of each micro-batch over all ranks, padded as one process pads them."""
        import torch

        trainer, mode = self._trainer, self._trainer.args.include_num_input_tokens_seen
        unpadded = [batch.pop(UNPADDED, None) if isinstance(batch, dict) else None for batch in batches]
        name = getattr(trainer.model, "main_input_name", "input_ids")
        if mode == "no" or not batches or any(name not in batch for batch in batches):
            return []
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
        return [int(count) // self._ranks_of_a_sample for count in tokens[: len(batches)]]

    def _labels_in(self, batch: Any) -> int:
        """Return the number of labels that a model's loss is the mean over: of tokens, classes, or else samples."""
        labels = _labels(batch)
        if labels is None:
            return self._rows_in(batch)
        shifts = self._trainer._loss_shifts_labels or _shifts_labels(self._trainer.model)
        shifts = shifts and batch.get("shift_labels") is None
        return int((labels[..., 1:] if shifts else labels).ne(IGNORED_LABEL).sum())

    def _rows_in(self, batch: Any) -> int:
        from accelerate.utils import find_batch_size

        rows = trained_rows(batch)
        return (find_batch_size(batch) or 1) if rows is None else rows

    def _check_labels_of_every_rank(self, batches: list[Any]) -> None:
        """Reject a step in which the model's own loss is the mean over no token on some rank."""
        import torch
        from transformers import Trainer

        trainer = self._trainer
        if trainer.args.world_size == 1 or type(trainer).compute_loss is not Trainer.compute_loss:
            return
        labels = [tensor for batch in batches if (tensor := _labels(batch)) is not None]
        if not batches or len(labels) < len(batches):
            return
        fewest = min(int(tensor.ne(IGNORED_LABEL).sum()) for tensor in labels)
        if int(trainer.accelerator.gather(torch.tensor(fewest, device=trainer.args.device)).min()) == 0:
            rule = "has no labelled token on some rank, so the loss of this model is a mean over nothing"
            fix = "use batches with labels, a number of samples that all ranks share, or dataloader_drop_last=True"
            raise UsageError(ConfigError(where="batch", value=type(trainer.model).__name__, rule=rule, fix=fix))

    # Evaluation.

    def evaluating(self, loop: Method) -> Method:
        def evaluation_loop(
            dataloader: DataLoader,
            description: str,
            prediction_loss_only: bool | None = None,
            ignore_keys: list[str] | None = None,
            metric_key_prefix: str = "eval",
        ) -> Any:
            trainer = self._trainer
            evaluation = _Evaluation(SamplesOnce(dataloader, trainer.accelerator.gradient_state))
            self._evaluation = evaluation
            # The loop restores Accelerate's function at its end.
            patches.apply("evaluated-losses", self._gathering_losses, on=trainer)
            try:
                with _without_balance_loss(trainer):
                    output = loop(
                        dataloader,
                        description,
                        prediction_loss_only=prediction_loss_only,
                        ignore_keys=ignore_keys,
                        metric_key_prefix=metric_key_prefix,
                    )
            finally:
                self._evaluation = None
            name = f"{metric_key_prefix}_loss"
            if name in output.metrics and evaluation.batches:
                import torch

                # Ranks that share samples count each as often as there are such ranks.
                batches = trainer.accelerator.gather(torch.stack(evaluation.batches)).tolist()
                # The mean over no token is NaN.
                labelled = [(loss * weight, weight) for loss, weight in batches if weight]
                if labelled or description == "Evaluation":
                    mean = evaluated_mean([total for total, _ in labelled], [weight for _, weight in labelled])
                else:
                    mean = float("nan")
                output.metrics[name] = mean
            elif name in output.metrics:
                note_on_first_rank(
                    f"{type(trainer).__name__} evaluates without prediction_step: {name} is the value that it returned"
                )
            return output

        return evaluation_loop

    def evaluating_a_step(self, predict: Method) -> Method:
        def prediction_step(
            model: PreTrainedModel, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
        ) -> Any:
            import torch

            evaluation = self._evaluation
            if evaluation is None:
                return predict(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
            step = evaluation.samples.step(inputs)
            trainer, self._evaluates_a_step = self._trainer, True
            self._counts_labels = accepts = trainer.model_accepts_loss_kwargs
            # Models of sequences accept the number of labels and ignore it, and the Trainer multiplies by the ranks.
            # A model that does not get the number returns the mean.
            if trainer.compute_loss_func is None and trainer.label_smoother is None and self.own_loss is None:
                accepts = False
            try:
                weight = self._weight(step)
                with _set(trainer, model_accepts_loss_kwargs=accepts):
                    loss, logits, labels = predict(model, step.batch, prediction_loss_only, ignore_keys=ignore_keys)
            finally:
                self._evaluates_a_step = False
            if loss is not None:
                mean = loss.detach().float().mean()
                weights = torch.as_tensor(weight, device=mean.device).float()
                evaluation.batches.append(torch.stack([mean, weights]))
                evaluation.rows = step.rows
            return loss, logits, labels

        return prediction_step

    def _weight(self, step: EvaluationStep) -> Any:
        """Return the number of labels that the loss of a batch is the mean over: tokens, classes, or else samples."""
        from accelerate.utils import find_batch_size

        labels = _labels(step.batch)
        if labels is None or (self.own_loss is not None and self._kind == "sample_mean"):
            rows = find_batch_size(step.batch) if step.rows is None else step.rows
            return (rows or 1) if step.samples is None else step.samples
        trainer = self._trainer
        # Transformers derives from the class whether a loss shifts labels, and misses GPT-2.
        shifts = trainer._loss_shifts_labels or _shifts_labels(trainer.model)
        with _set(trainer, _loss_shifts_labels=shifts):
            trainer._get_num_items_in_batch([step.batch], trainer.args.device)
        return self._labels_in(step.batch) if self._items is None else self._items

    def _gathering_losses(self, gather: Method) -> Method:
        """Gather the loss of a batch once for each of its samples; the loop repeats it for a full batch."""

        def gathered(data: Any, *args: Any, **kwargs: Any) -> Any:
            evaluation = self._evaluation
            if evaluation is not None and evaluation.rows is not None:
                data, evaluation.rows = data[: evaluation.rows], None
            return gather(data, *args, **kwargs)

        return gathered


def _at_least_one(items: Any) -> Any:
    """Replace a divisor of 0 labels by 1, so that the loss is 0."""
    import torch

    if torch.is_tensor(items):
        return torch.where(items == 0, torch.ones_like(items), items)
    return 1 if items == 0 else items


def _shifts_labels(model: PreTrainedModel) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(inner, "loss_function", None) is ForCausalLMLoss


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
    # One process pads the rows that count to the longest of them.
    longest = int(mask[:trained].sum(1).max()) if trained and mask is not None and mask.dim() == 2 else tokens // rows
    return trained, longest if trained else 0, 0


@contextmanager
def _without_balance_loss(trainer: Trainer) -> Iterator[None]:
    """Omit the load-balancing loss of a mixture inside the block: it is a mean over a batch, not over tokens."""
    name, model = "router_aux_loss_coef", trainer.model
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(inner, "config", None)
    text: Any = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    with ExitStack() as stack:
        for owner in (trainer, inner, text):
            if isinstance(getattr(owner, name, None), float | int):
                stack.enter_context(_set(owner, **{name: 0.0}))
        yield


@contextmanager
def _set(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object inside the block."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
