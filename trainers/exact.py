"""`ExactTrainer`: a training step from top to bottom, with what Shardwright corrects of the Trainer of Transformers.

The class precedes a Trainer's own class, so `super()` is the Trainer as its author wrote it. Its methods stand in the
order in which a run calls them, and each says which upstream line it corrects (transformers 5.17.0, `trainer.py`). Its
canary is the test that fails once upstream does not need it; `test_upstream_calls_the_methods_of_the_exact_trainer`
watches all of them. An optimizer step is (`_run_epoch`, line 1755):

1. Batch: `get_batch_samples` reads the micro-batches of this rank.
2. Counts: `_get_num_items_in_batch` counts the labels of all ranks, and weighs the micro-batches.
3. For each micro-batch, `training_step`: forward pass and loss (`compute_loss`), then the backward pass, in which
   engines average gradients over ranks. After the last one DeepSpeed clips and takes its optimizer step
   (`Accelerator.backward`), with the norm of `Axis.correct_clipping`.
4. Clipping: `_clip_grad_norm` of the Trainer, under DDP and FSDP2; `_get_grad_norm` returns the norm of any engine.
5. Optimizer step: `optimizer.step()` and `lr_scheduler.step()` of the loop, which DeepSpeed has taken already.
6. `log`, `evaluation_loop`, and save: `_save_checkpoint` of the Trainer writes the files of all ranks, which a
   `CheckpointCallback` then marks complete; the commands attach one. Experts of other ranks reach the files through
   `get_state_dict` of the accelerator.

`trainer_for` and `launch` set attributes of the object to what a layout needs; an attribute that is not set leaves the
Trainer's own behaviour. What a layout adds beyond data parallelism is an `Axis`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ..ds_configs.specs.errors import ConfigError, UsageError
from ..plugins import patches
from ..plugins.accelerate import RepeatedSamples, SamplesOnce, check_streams_of_ranks, hide_files
from ..plugins.deepspeed.engine import keep_gradient_norm
from ..plugins.launching.messages import note_on_first_rank
from ..plugins.peft import raise_rates_of_b
from ..plugins.transformers.length_groups import one_order
from ..plugins.transformers.loading import load_renamed_weights
from ..plugins.transformers.optimizers import OwnOptimizer
from ..plugins.transformers.prepared_model import (
    engine_kept,
    first_preparation,
    is_prepared,
    later_preparation,
    prepare_before_training,
)
from ..plugins.trl import weigh_evaluated_batches
from .counting.counts import (
    Counting,
    Evaluation,
    accepts_count,
    at_least_one,
    checked_loss,
    evaluated_mean,
    multiplies_by_ranks,
    predicts_next_token,
    with_values,
    without_balance_loss,
)

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader
    from transformers import PreTrainedModel, TrainingArguments
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class StepEvents:
    """Events that the Trainer lacks, for a callback of an `ExactTrainer`; these do nothing."""

    def around_training(self) -> AbstractContextManager[Any]:
        """Return the context of `train`: no callback event reports that an exception ended it.

        Canary: `test_no_callback_hears_of_an_exception`.
        """
        return nullcontext()

    def around_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches from which a step is collected."""
        return batches

    def on_loss(self, loss: torch.Tensor) -> None:
        """Receive the loss of a micro-batch, which the log replaces by the mean of the others if it is not finite."""

    def on_gradient_norm(self, norm: Any) -> None:
        """Receive the gradient norm before the optimizer steps."""

    def log_values(self) -> dict[str, float]:
        """Return values for the log of a step: `on_log` runs after the values are stored."""
        return {}


class Axis:
    """What a layout beyond data parallelism adds to a step; this one adds nothing."""

    computes_losses = True
    """Whether losses come from `compute_loss` and `prediction_step`; not those of pipeline stages."""

    def __init__(self, ranks_of_a_sample: int = 1) -> None:
        self.ranks_of_a_sample = ranks_of_a_sample
        """Ranks that read the same samples, where the Trainer counts each of them."""

    def seed_workers(self, trainer: ExactTrainer, loader: Any) -> None:
        """Change the seeds of a training loader's workers."""

    def group_parameters(self, trainer: ExactTrainer, optimizer: Any) -> None:
        """Mark or split the parameter groups of a new optimizer."""

    def preparing(self, trainer: ExactTrainer) -> AbstractContextManager[Any]:
        """Return the context in which the engine is created."""
        return nullcontext()

    def correct_clipping(self, engine: Any) -> None:
        """Make a new engine of DeepSpeed clip by the norm over all gradients, and keep that norm."""
        keep_gradient_norm(engine)

    def read(self, trainer: ExactTrainer, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches that this rank reads from its loader."""
        return batches

    def shards(self, trainer: ExactTrainer, batches: list[Any]) -> list[Any]:
        """Return this rank's shards of the micro-batches of a step."""
        return batches

    def labels(self, trainer: ExactTrainer, batches: list[Any], device: Any, count: Callable[..., Any]) -> Any:
        """Return the labels of a step on all ranks; `count` is the Trainer's method."""
        return count(batches, device)

    def running(self) -> AbstractContextManager[Any]:
        """Return the context of a forward and backward pass."""
        return nullcontext()

    def computing_loss(self, trainer: ExactTrainer, model: Any, inputs: Any) -> AbstractContextManager[Any]:
        """Return the context in which the loss of a micro-batch is computed."""
        return nullcontext()

    def loss_inputs(self, trainer: ExactTrainer, inputs: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the inputs and keywords of `compute_loss` on this rank."""
        return inputs, keywords

    def share_of_loss(self, trainer: ExactTrainer, result: Any) -> Any:
        """Return this rank's share of a loss, or of a loss and outputs."""
        return result

    def add_to_log(self, trainer: ExactTrainer, logs: dict[str, float]) -> dict[str, float]:
        """Return the log with further values; every rank calls it."""
        return logs

    def evaluating(self, trainer: ExactTrainer) -> AbstractContextManager[Any]:
        """Return the context of an evaluation."""
        return nullcontext()

    def evaluated_inputs(self, trainer: ExactTrainer, inputs: Any) -> Any:
        """Return what the model evaluates of a batch."""
        return inputs

    def whole_logits(self, trainer: ExactTrainer, logits: Any) -> Any:
        """Return the logits of complete samples from those of this rank."""
        return logits


class ExactTrainer(_Trainer):
    """Makes a Trainer train and evaluate as one process does, under every layout."""

    shared_axis: Axis = Axis()
    """What ranks that share samples or experts add."""
    step_counting: Counting | None = None
    """Counts of labels, samples and tokens; `None`: as the Trainer counts."""
    repeated_samples: RepeatedSamples | None = None
    """Gives samples that Accelerate repeats the weight zero."""
    reads_streams: bool = False
    """Whether every rank reads a stream completely and keeps its own rows."""
    given_optimizer: OwnOptimizer | None = None
    """Optimizer and scheduler of the script, where Transformers would drop or reject them."""
    rank_balance: Any = None
    """Balance loss of a mixture of experts over the tokens of all ranks: `BalanceOverRanks`."""
    label_ranks: int = 1
    """Ranks by which the number of labels is divided, for losses that do not multiply by them."""
    token_means: Callable[[Any], AbstractContextManager[Any]] | None = None
    """Context in which TRL's means over a rank's tokens are means over those of all ranks."""
    generating: Callable[[bool], AbstractContextManager[Any]] = nullcontext
    """Context in which TRL's trainers generate the completions of one process, in a micro-batch."""
    tiled_loss: Any = None
    """Loss in tiles, which returns no logits unless `keeps_logits` is true."""
    checked_checkpoint: Callable[[Any, Any], str] | None = None
    """Compares a checkpoint with the run before anything is loaded, and returns its path."""
    keeps_engine: bool = False
    """Whether a later `train` continues with the engine and the optimizer of an earlier one."""
    optimizer: Any
    lr_scheduler: Any
    gather_function: Any
    _tr_loss: Any
    _exact_evaluation: Evaluation | None = None
    _evaluates_a_step = False
    _counts_labels = False
    """Whether the Trainer counts labels for the model's loss, while a step is evaluated."""
    _evaluated_labels: Any = None
    """Labels of the batch that is evaluated; `None` if the model's loss does not need them."""

    @property
    def _step_events(self) -> list[StepEvents]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, StepEvents)]

    # Samples: which ones a rank reads, and in which order.

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """Enter the contexts of callbacks; `ComparesCheckpoints.train` gets what the user's class passes on."""
        with ExitStack() as contexts:
            for events in self._step_events:
                contexts.enter_context(events.around_training())
            return super().train(*arguments, **keywords)

    def _inner_training_loop(self, batch_size: int | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Keep the engine of an earlier `train`, which `free_memory` would destroy (line 1538).

        Canary: `test_the_trainer_still_destroys_the_engine_of_its_first_run`.
        """
        with engine_kept(self, batch_size):
            return super()._inner_training_loop(batch_size, *arguments, **keywords)

    def _update_auto_batch_size(self, batch_size: int) -> None:
        """With `auto_find_batch_size`, the Trainer forgets the prepared model even if the size stays (line 2564)."""
        if not self.keeps_engine:
            super()._update_auto_batch_size(batch_size)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Follow the loader's samples: Accelerate repeats some to fill the last batch of an epoch (line 884).

        The Trainer seeds data workers by rank, but ranks that share samples need the same ones (line 1030).
        Canary: `test_accelerate_repeats_samples_of_an_evaluation`.
        """
        loader = super().get_train_dataloader()
        if self.repeated_samples is not None:
            self.repeated_samples.follow(loader)
        self.shared_axis.seed_workers(self, loader)
        return loader

    def _get_dataloader(self, dataset: Any, *arguments: Any, **keywords: Any) -> Any:
        """Split a stream by rows: Accelerate gives each rank other files, so batches differ from one process's (975).

        Canary: `test_accelerate_still_gives_ranks_whole_files`.
        """
        if self.reads_streams:
            hide_files(dataset)
        return super()._get_dataloader(dataset, *arguments, **keywords)

    def _get_train_sampler(self, *arguments: Any, **keywords: Any) -> Any:
        """Draw one order of length groups on all ranks, and the same order in a resumed epoch (line 1041).

        Canary: `test_stock_ranks_draw_orders_of_their_own`.
        """
        return one_order(super()._get_train_sampler(*arguments, **keywords), self)

    # Model and optimizer.

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples of an optimizer step; ranks that share a sample count once (line 2482).

        Canary: `test_transformers_divides_by_tensor_parallel_size`.
        """
        samples, ranks = super().get_total_train_batch_size(args), self.shared_axis.ranks_of_a_sample
        # The Trainer has divided by the ranks of a ring.
        return int(samples if ranks == 1 else samples * self.get_cp_size() // ranks)

    def get_sp_size(self) -> int:
        """Return 1 where an axis shards sequences: the Trainer would count batches of a loader of its own (2500)."""
        return 1 if self.shared_axis.ranks_of_a_sample > 1 else super().get_sp_size()

    def get_tp_size(self) -> int:
        """Return 1 where an axis shards tensors, so that the labels and the factor of a loss count every rank (2516).

        Transformers does so up to 5.18, but `SFTTrainer` divides the factor by this size. From 5.19 on Transformers
        divides both by it, which breaks losses that multiply by `accelerator.num_processes`.
        Canary: `test_transformers_divides_by_tensor_parallel_size`.
        """
        return 1 if self.shared_axis.ranks_of_a_sample > 1 else super().get_tp_size()

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None = None
    ) -> Any:
        """Prepare model and optimizer once, for the first evaluation or training run and for all later ones (1657).

        Canary: `test_transformers_still_discards_the_optimizer_of_an_engine`.
        """
        arguments = (max_steps, train_dataloader, resume_from_checkpoint)
        if is_prepared(self):
            with later_preparation(self, resume_from_checkpoint):
                prepared = super()._prepare_for_training(*arguments)
        else:
            with self.shared_axis.preparing(self), first_preparation(self, resume_from_checkpoint):
                prepared = super()._prepare_for_training(*arguments)
        if self.step_counting is not None and self.is_deepspeed_enabled:
            self.shared_axis.correct_clipping(self.model_wrapped)
        return prepared

    def create_optimizer(self, *arguments: Any, **keywords: Any) -> Any:
        """Use the script's optimizer, which the Trainer drops under DeepSpeed and rejects under FSDP2 (line 1229).

        DeepSpeed needs groups that contain only experts, LoRA+ groups with a rate of their own, and a prepared
        optimizer keeps its groups.
        Canary: `test_the_trainer_still_drops_optimizers_under_deepspeed`.
        """
        if self.keeps_engine:
            return self.optimizer
        if self.given_optimizer is not None and self.optimizer is None:
            self.optimizer = self.given_optimizer.for_engine()
        creates = self.optimizer is None
        optimizer = super().create_optimizer(*arguments, **keywords)
        if creates:
            raise_rates_of_b(self.model, optimizer)
        self.shared_axis.group_parameters(self, optimizer)
        return optimizer

    def create_scheduler(self, *arguments: Any, **keywords: Any) -> Any:
        """Use the script's scheduler, which the Trainer drops under DeepSpeed and rejects under FSDP2 (line 1305).

        Canary: `test_the_trainer_still_drops_optimizers_under_deepspeed`.
        """
        if self.given_optimizer is not None and self.lr_scheduler is None:
            self.lr_scheduler = self.given_optimizer.scheduler
        return super().create_scheduler(*arguments, **keywords)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Restore weights whose names in the checkpoint differ from the model's, which the Trainer ignores (line 3555).

        Canary: `test_the_trainer_still_ignores_weights_of_other_names`.
        """
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._restore(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """Restore the weights of the best checkpoint, as `_load_from_checkpoint` (line 3591)."""
        super()._load_best_model()
        assert self.state.best_model_checkpoint, "the Trainer has loaded it"
        self._restore(self.state.best_model_checkpoint)

    def _restore(self, directory: str) -> None:
        # Engines restore their own files, and PEFT its adapters.
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled or hasattr(self.model, "peft_config")):
            load_renamed_weights(self.model, directory)

    # A step: batches, counts, loss.

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return this rank's micro-batches of a step, in which repeated samples have no labels (line 2207).

        Canary: `test_accelerate_repeats_samples_of_an_evaluation`.
        """
        for events in self._step_events:
            epoch_iterator = events.around_batches(epoch_iterator)
        if self.repeated_samples is not None:
            epoch_iterator = self.repeated_samples.unlabelled(self, epoch_iterator)
        batches, items = super().get_batch_samples(self.shared_axis.read(self, epoch_iterator), num_batches, device)
        return self.shared_axis.shards(self, batches), items

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count the labels of a step, and what weighs its losses: no other event comes before the first loss (2224).

        A step without labels must not divide by zero.
        """
        count = partial(self.shared_axis.labels, self, batch_samples, device, super()._get_num_items_in_batch)
        if self.step_counting is None:
            return count()
        if self._evaluates_a_step:

            def gather(value: torch.Tensor) -> torch.Tensor:
                # As if every rank had the labels of this one, so that losses are means over this rank's labels.
                return value.reshape(-1).repeat(self.args.world_size)

            with (
                patches.applied("evaluated-labels", lambda _: gather, on=self.accelerator),
                with_values(self, model_accepts_loss_kwargs=self._counts_labels),
            ):
                self._evaluated_labels = count()
            return at_least_one(self._evaluated_labels)
        check_streams_of_ranks(self, len(batch_samples))
        self.step_counting.count_tokens(batch_samples)
        items = count()
        self.step_counting.weigh(batch_samples, items)
        return at_least_one(items)

    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Run forward and backward pass of a micro-batch in the context of the layout's axis (line 1975)."""
        with self.shared_axis.running(), self.generating(True):
            loss = super().training_step(*arguments, **keywords)
        for events in self._step_events:
            events.on_loss(loss)
        return loss

    def compute_loss(
        self,
        model: PreTrainedModel,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **keywords: Any,
    ) -> Any:
        """Return this micro-batch's and rank's share of the loss of a step: what the Trainer returns, weighed.

        `Trainer.compute_loss` (line 2048) divides a sum by the labels of all ranks. Three kinds of losses are none:
        means of a model that ignores the number of labels; losses of a subclass, see `counting/counts.py`; and the
        balance loss of a mixture, which is added once per micro-batch and multiplied by the ranks.
        Canary: `test_classifiers_still_ignore_the_number_of_labels`.
        Canary: `test_the_trainer_still_multiplies_own_means_by_the_micro_batches`.
        """
        counting, weight = self.step_counting, None
        balance = self.rank_balance if self.rank_balance is not None and self.rank_balance.applies(model) else None
        with ExitStack() as contexts:
            if self.token_means is not None and model.training:
                contexts.enter_context(self.token_means(inputs))
            contexts.enter_context(self.shared_axis.computing_loss(self, model, inputs))
            if balance is not None:
                contexts.enter_context(balance.over_ranks(model, num_items_in_batch))
            # A trainer that returns no outputs shows not whether its model added a balance loss.
            if return_outputs or (balance is not None and not balance.is_added_by_trainer):
                keywords["return_outputs"] = True
            if counting is not None and counting.own_loss is not None:
                items = num_items_in_batch
                if counting.kind is None:
                    counting.measure_kind(model, inputs, items is not None, self._loss_of_user)
                if self._evaluates_a_step:
                    items = None if items is None else max(counting.labels_in(inputs), 1)
                else:
                    inputs, items, weight = counting.next_own(inputs, items)
                result = self._loss_of_user(model, inputs, items, keywords)
            else:
                if counting is not None and counting.weights and model.training:
                    inputs, weight = counting.next_mean(inputs)
                items = self._label_share(num_items_in_batch)
                inputs, keywords = self.shared_axis.loss_inputs(self, inputs, {**keywords, "num_items_in_batch": items})
                if items is None and not accepts_count(super().compute_loss):
                    # A class with a `training_step` of its own may not need the number.
                    keywords.pop("num_items_in_batch", None)
                result = super().compute_loss(model, inputs, **keywords)
                result = self.shared_axis.share_of_loss(self, result)
        if weight is None and balance is None:
            return result
        loss, outputs = result if isinstance(result, tuple) else (result, None)
        if weight is not None:
            loss = loss * weight
        if balance is not None:
            loss = balance.with_missing(loss, outputs)
        return (loss, outputs) if return_outputs else loss

    def _label_share(self, items: Any) -> Any:
        """Return the number of labels for losses of TRL that do not multiply by the ranks (trl 1.16.0).

        Canary: `test_a_loss_of_trl_still_divides_by_all_labels_without_multiplying_by_the_ranks`.
        """
        shared = items is not None and self.label_ranks > 1 and self.args.average_tokens_across_devices
        return items / self.label_ranks if shared else items

    def _loss_of_user(self, model: Any, inputs: Any, items: Any, keywords: dict[str, Any]) -> Any:
        """Return the loss of the user's class or function, before it is weighed."""
        assert self.step_counting is not None and self.step_counting.own_loss is not None
        # A loss that multiplies by all ranks must also divide by all labels as often.
        extra = self.args.world_size if multiplies_by_ranks(self.step_counting.own_loss) else 1
        # The weights include the number of ranks.
        with with_values(self.args, average_tokens_across_devices=extra > 1):
            if self.compute_loss_func is not None or accepts_count(self.step_counting.own_loss):
                items = None if items is None else items * extra
                keywords = {**keywords, "num_items_in_batch": self._label_share(items)}
            result = super().compute_loss(model, inputs, **keywords)
        return_outputs = bool(keywords.get("return_outputs"))
        loss, outputs = checked_loss(result, self, return_outputs=return_outputs)
        return (loss, outputs) if return_outputs else loss

    def _get_grad_norm(self, *arguments: Any, **keywords: Any) -> Any:
        """Pass the gradient norm on before the optimizer steps (line 2672)."""
        norm = super()._get_grad_norm(*arguments, **keywords)
        for events in self._step_events:
            events.on_gradient_norm(norm)
        return norm

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count tokens once, padded as one process pads them; the Trainer counts each rank that reads them (2585)."""
        if self.step_counting is not None and self.step_counting.tokens:
            self.state.num_input_tokens_seen += self.step_counting.tokens.pop(0)
        else:
            super()._track_num_input_tokens(inputs)

    # Log and end of the run.

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Add the values of the axis: `on_log` runs after the values are stored (line 4029)."""
        if "loss" in logs:
            logs = self.shared_axis.add_to_log(self, logs)
            for events in self._step_events:
                logs = logs | events.log_values()
        super().log(logs, *arguments, **keywords)

    def _finalize_training(self, *arguments: Any, **keywords: Any) -> Any:
        """Average `train_loss` over ranks: it contains only the first rank's losses since the last log (line 1926)."""
        if self.step_counting is not None:
            self._tr_loss = self.accelerator.gather(self._tr_loss).mean()
        return super()._finalize_training(*arguments, **keywords)

    # Evaluation.

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Average over all tokens, and read every sample once; the Trainer averages the means of batches (line 2787).

        An evaluation before training prepares model and optimizer as training does.
        Canary: `test_the_trainer_still_evaluates_first_without_an_optimizer`.
        """
        evaluation = None
        with ExitStack() as contexts:
            if self.step_counting is not None and self.shared_axis.computes_losses:
                evaluation = Evaluation(SamplesOnce(dataloader, self.accelerator.gradient_state))
                contexts.enter_context(without_balance_loss(self))
                contexts.enter_context(self._gathering_losses(evaluation))
            contexts.enter_context(self.shared_axis.evaluating(self))
            prepare_before_training(self, dataloader)
            output = super().evaluation_loop(
                dataloader,
                description,
                prediction_loss_only=prediction_loss_only,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
        name = f"{metric_key_prefix}_loss"
        if evaluation is None or name not in output.metrics:
            return output
        if not evaluation.batches:
            note_on_first_rank(
                f"{type(self).__name__} evaluates without prediction_step: {name} is the value that it returned"
            )
            return output
        import torch

        # Ranks that share samples count each as often as there are such ranks.
        gathered = self.accelerator.gather(torch.stack(evaluation.batches))
        if evaluation.weighs_samples:
            weigh_evaluated_batches(self, gathered[:, 1].view(-1, len(evaluation.batches)).sum(0).tolist())
        batches = gathered.tolist()
        # The mean over no token is NaN.
        labelled = [(loss * weight, weight) for loss, weight in batches if weight]
        output.metrics[name] = float("nan")
        if labelled or description == "Evaluation":
            output.metrics[name] = evaluated_mean([total for total, _ in labelled], [weight for _, weight in labelled])
        return output

    @contextmanager
    def _gathering_losses(self, evaluation: Evaluation) -> Iterator[None]:
        """Gather the loss of a batch once for each of its samples; the loop repeats it for a full batch (line 2874)."""
        gather = self.gather_function

        def gathered(data: Any, *arguments: Any, **keywords: Any) -> Any:
            if evaluation.rows is not None:
                data, evaluation.rows = data[: evaluation.rows], None
            return gather(data, *arguments, **keywords)

        self._exact_evaluation, self.gather_function = evaluation, gathered
        try:
            yield
        finally:
            self._exact_evaluation = None
            if self.gather_function is gathered:
                # The loop restores Accelerate's function at its end, but not after an exception.
                self.gather_function = gather

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Evaluate the samples of a batch that count, and keep its loss with the labels it is the mean over (3055)."""
        import torch

        evaluation, counting = self._exact_evaluation, self.step_counting
        if evaluation is None or counting is None:
            return self._predicted(model, inputs, prediction_loss_only, ignore_keys)
        step = evaluation.samples.step(inputs)
        self._evaluates_a_step, self._counts_labels = True, self.model_accepts_loss_kwargs
        # Models of sequences accept the number of labels and ignore it, and the Trainer multiplies by the ranks.
        # A model that does not get the number returns the mean.
        ignores = self.compute_loss_func is None and self.label_smoother is None and counting.own_loss is None
        try:
            weight = counting.evaluated_rows(step)
            if weight is None:
                evaluation.weighs_samples = False
                # Transformers derives from the class whether a loss shifts labels, and misses GPT-2.
                shifts = self._loss_shifts_labels or predicts_next_token(self.model)
                with with_values(self, _loss_shifts_labels=shifts):
                    self._get_num_items_in_batch([step.batch], self.args.device)
                weight = counting.labels_in(step.batch) if self._evaluated_labels is None else self._evaluated_labels
            with with_values(self, model_accepts_loss_kwargs=self.model_accepts_loss_kwargs and not ignores):
                loss, logits, labels = self._predicted(model, step.batch, prediction_loss_only, ignore_keys)
        finally:
            self._evaluates_a_step = False
        if loss is not None:
            mean = loss.detach().float().mean()
            evaluation.batches.append(torch.stack([mean, torch.as_tensor(weight, device=mean.device).float()]))
            evaluation.rows = step.rows
        return loss, logits, labels

    def _predicted(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[Any, Any, Any]:
        """Evaluate a batch in the context of the axis; a tiled loss returns logits only if they are needed."""
        keeps = nullcontext() if self.tiled_loss is None else self.tiled_loss.keeping_logits(not prediction_loss_only)
        with self.shared_axis.running(), self.generating(False), keeps:
            inputs = self.shared_axis.evaluated_inputs(self, inputs)
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        return loss, None if logits is None else self.shared_axis.whole_logits(self, logits), labels


@cache
def exact_class(own: Any) -> Any:
    """Return a Trainer class with `ExactTrainer` in front, the same for each call."""
    from transformers import Trainer

    if issubclass(own, ExactTrainer):
        return own
    # Python places the last base between the user's classes and `Trainer`; `Trainer` itself cannot precede it.
    own_bases = () if own is Trainer else (own,)
    bases = (ExactTrainer, *own_bases, _comparing_class())
    return type(own.__name__, bases, {"__module__": own.__module__, "own_class": own})


@cache
def _comparing_class() -> type:
    from transformers import Trainer

    class ComparesCheckpoints(Trainer):
        """Stands between a user's class and `Trainer`, because its `train` may select the checkpoint."""

        def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **keywords: Any) -> Any:
            """Compare a checkpoint with this run before anything is loaded.

            The Trainer loads checkpoints of other engines without their optimizer, or fails in a library (line 1408).
            Canary: `test_the_trainer_still_resumes_without_an_optimizer`.
            """
            if resume_from_checkpoint and (check := getattr(self, "checked_checkpoint", None)) is not None:
                resume_from_checkpoint = check(self, resume_from_checkpoint)
            return super().train(resume_from_checkpoint, *arguments, **keywords)

    return ComparesCheckpoints


def make_exact(trainer: Any) -> ExactTrainer:
    """Put `ExactTrainer` in front of the class of a Trainer, once, and return the Trainer."""
    if not isinstance(trainer, ExactTrainer):
        patches.swap_class("exact-trainer", trainer, exact_class(trainer.__class__))
    return trainer  # type: ignore[no-any-return]


def check_attached(callback: Any, trainer: Any) -> None:
    """Check that a callback has the Trainer that its `attach` stores.

    Raises:
        UsageError: it was passed to a Trainer without `attach`.
    """
    if trainer is None:
        name = type(callback).__name__
        fix = f"call {name}.attach(trainer) right after the Trainer is created, instead of callbacks=[{name}(...)]"
        raise UsageError(ConfigError(where=name, rule="is not attached to a Trainer", fix=fix))


def count_as_one_process(trainer: Any, axis: Axis | None = None, *, weighs_own_losses: bool = False) -> None:
    """Make a Trainer count labels, samples and tokens as one process does; call it after the Trainer was made.

    Args:
        weighs_own_losses: Whether to weigh a loss of the user as what its first batch shows. Layouts that split samples
            or experts, and models with a balance loss, keep the weights of the Trainer.
    """
    exact = make_exact(trainer)
    if axis is not None:
        exact.shared_axis = axis
    ranks, computes = exact.shared_axis.ranks_of_a_sample, exact.shared_axis.computes_losses
    counting = Counting(trainer, ranks, weighs_means=computes, weighs_own_losses=weighs_own_losses)
    if counting.weighs_means:
        # Then the Trainer neither passes the number of labels to the model nor multiplies by the ranks.
        trainer.model_accepts_loss_kwargs = False
    exact.step_counting = counting
