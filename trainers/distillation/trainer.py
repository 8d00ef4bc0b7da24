"""`DistillationTrainer`: a Transformers `Trainer` whose loss adds the terms of a teacher."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer
from transformers.utils import ModelOutput

from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ...ds_configs.specs.second_models import Placement
from ...plugins.deepspeed.ulysses import (
    gradients_are_added_over_a_sequence,
    keep_own_attention,
)
from ...plugins.launching.messages import note_on_first_rank
from ...plugins.transformers.attention import hidden_states_of
from ...plugins.transformers.output_heads import OutputHead, has_plain_head, output_head
from ...plugins.transformers.second_model import PlacedModel, gathered_head, place_second_model
from ...plugins.transformers.training_arguments import own_class, trainer_errors
from ..counting.counts import predicts_next_token
from ..losses.fused_loss import HeadReplacement, UnknownLogitsError, accepted_inputs, fused_token_loss, replaced_forward
from ..losses.objective import HiddenTargets, LogitTargets, TeacherTargets, TokenSums, plain_token_loss
from ..parallel.balance_loss import balance_over_ranks
from .feature_matching import FeatureMatching, load_projectors, save_projectors
from .settings import DistillationConfig
from .teacher import (
    SHIFT_LABELS,
    TEACHER_ROWS,
    DistillationBatch,
    EarlyExit,
    TeacherOutput,
    check_arguments,
    inner_model,
    run_teacher,
    split_batch,
    with_decoder_inputs,
)
from .teacher_cache import TeacherCache

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, TrainingArguments


PROJECTORS = "distillation_projectors"
NAMES = {
    "forward_kl": "kl_per_token",
    "divergence": "divergence",
    "agreement": "top1_agreement",
    "overlap": "speculative_acceptance",
    "student_cross_entropy": "student_cross_entropy",
    "teacher_cross_entropy": "teacher_cross_entropy",
    "hidden_states": "hidden_state_distance",
    "attention": "attention_distance",
}
"""Logged name of the mean of each sum in `TokenSums` and of each feature term."""
WEIGHT, NONFINITE = "weight", "nonfinite_teacher_rows"


class DistillationTrainer(Trainer):
    """Train a student on labels and on a teacher's outputs for the same tokens.

    The loss is the mean over all labelled tokens of an optimizer step, over all ranks and micro-batches:
    ``Σ w ℓ / Σ w`` with ``ℓ = (1 - α) CE + α τ² D`` plus the feature terms (`DistillationConfig`). Gradients do not
    depend on how the tokens are split.

    Args:
        model: Student.
        args: `TrainingArguments`.
        teacher: A Transformers model, a `PlacedModel` or a `TeacherCache`.
            `None` with ``distillation.self_teacher``, and if no term needs a teacher.
        teacher_placement: How a Transformers model is placed: replicated on every rank, sharded, offloaded, quantized.
        distillation: Terms of the loss.
        kwargs: Other arguments of `Trainer`.

    Raises:
        UsageError: terms, teacher and arguments cannot be combined; all errors together.
    """

    adds_balance_loss = True
    """Adds the balance loss that the student returns, as `balance_over_ranks` counts it."""
    shares_sequences = True
    """Shards sequences over ranks itself; `SequenceParallelCallback` skips this trainer."""

    def __init__(
        self,
        model: PreTrainedModel | None = None,
        args: TrainingArguments | None = None,
        *,
        teacher: Any = None,
        teacher_placement: Placement = "replica",
        distillation: DistillationConfig | None = None,
        **kwargs: Any,
    ) -> None:
        self.distillation = distillation or DistillationConfig()
        self.combined_settings = self.distillation.combined_settings
        check_arguments(model, teacher, self.distillation, args, kwargs)
        super().__init__(model=model, args=args, **kwargs)
        if getattr(self.accelerator, "parallelism_config", None) is None:
            balance_over_ranks(self)
        self._train_telemetry, self._eval_telemetry = Telemetry(), Telemetry()
        self._checked_first_step = self._checked_head = self._other_logits = self._omits_logits = False
        self._step_weight: torch.Tensor | None = None
        self.teacher: PlacedModel | None = None
        self.teacher_cache: TeacherCache | None = None
        self._features: FeatureMatching | None = None
        self._early_exit: EarlyExit | None = None
        if self.distillation.is_plain_training:
            return
        self.model_accepts_loss_kwargs = True
        inner = inner_model(self)
        self._loss_shifts_labels = predicts_next_token(inner)
        errors, fsdp = trainer_errors(self), getattr(self.accelerator.state, "fsdp_plugin", None)
        if fsdp is not None and fsdp.fsdp_version == 1:
            errors.append(
                ConfigError(where="fsdp_version", value=1, rule="is not supported", fix="set fsdp_version: 2")
            )
        if errors:
            raise UsageError(errors)
        own = self.distillation.self_teacher
        if own is not None:
            self._early_exit = EarlyExit(inner, own.exit_layer)
        elif isinstance(teacher, TeacherCache):
            self.teacher_cache = teacher
        else:
            placed = isinstance(teacher, PlacedModel)
            self.teacher = (
                teacher if placed else place_second_model(teacher, teacher_placement, accelerator=self.accelerator)
            )
            parallelism = getattr(self.accelerator, "parallelism_config", None)
            if parallelism is not None and parallelism.sp_enabled:
                keep_own_attention(self.teacher.model)
        terms = self.distillation.hidden_states, self.distillation.attention
        if terms != (None, None):
            assert self.teacher is not None, "feature terms are rejected without a model as teacher"
            self._features = FeatureMatching(inner.config, self.teacher.model.config, *terms)
            if self._features.projectors is not None:
                inner.add_module(PROJECTORS, self._features.projectors.to(self.args.device))

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = {*self._signature_columns, TEACHER_ROWS, SHIFT_LABELS, "position_ids"}
        teacher = getattr(self, "teacher", None)
        if teacher is not None:
            columns |= {*inspect.signature(type(teacher.model).forward).parameters} - {"self", "kwargs", "args"}
        self._signature_columns: list[str] = sorted(columns)

    def compute_loss(
        self,
        model: PreTrainedModel,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the share of this micro-batch and rank in the mean over all labelled tokens.

        With `return_outputs`, also a `ModelOutput` with `loss` and `logits`. The loss is then computed from full
        logits, which need more memory than the fused loss. `mean_over_step` normalizes own terms in the same way.

        Raises:
            UsageError: outputs are requested with a self-teacher, which computes no logits.
        """
        if self.distillation.is_plain_training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        keeps_logits = return_outputs and not self._omits_logits
        if self._early_exit is not None and keeps_logits:
            rule = "replaces the output head, so compute_loss cannot return logits"
            fix = "omit return_outputs=True; evaluate without compute_metrics, or with prediction_loss_only=True"
            raise UsageError(ConfigError(where="self_teacher", rule=rule, fix=fix))
        if self._early_exit is not None or self._other_logits or keeps_logits:
            fused = self._early_exit is not None
        elif self.distillation.implementation != "auto":
            fused = self.distillation.implementation == "fused"
        else:
            models = [inner_model(self)] + ([] if self.teacher is None else [self.teacher.model])
            fused = all(has_plain_head(each) for each in models)
        try:
            return self._distilled(model, inputs, return_outputs, num_items_in_batch, fused=fused)
        except UnknownLogitsError as error:
            if self.distillation.implementation == "fused" or self._early_exit is not None:
                raise
            # Every rank gets the same error in its first step, before any gradient.
            self._other_logits = True
            note_on_first_rank(f"{error.errors[0].where} {error.errors[0].rule}: computing the loss from full logits")
        return self._distilled(model, inputs, return_outputs, num_items_in_batch, fused=False)

    def _distilled(
        self,
        model: PreTrainedModel,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool,
        num_items_in_batch: torch.Tensor | int | None,
        *,
        fused: bool,
    ) -> Any:
        inner, features, early_exit = inner_model(self), self._features, self._early_exit
        batch = split_batch(with_decoder_inputs(inner, inputs), shifts=self._loss_shifts_labels)
        objective = self.distillation.objective
        taught = TeacherOutput()
        if self.teacher is not None:
            shards, checks = self._ranks_of_a_sequence() > 1, not self._checked_head
            taught = run_teacher(
                self.teacher, batch, fused=fused, features=features, sequence_sharded=shards, check_head=checks
            )
        token_loss = partial(fused_token_loss, labels_N=batch.labels_N)
        token_sums: list[TokenSums] = []
        losses: list[torch.Tensor] = []
        sums: dict[str, torch.Tensor] = {}
        # Why the fused loss does not fit this model; the returned loss is then meaningless.
        unknown_logits: list[UnknownLogitsError] = []

        def loss_at_head(hidden_BSH: torch.Tensor) -> torch.Tensor:
            """Compute the loss in place of the output head, from the head's input."""
            head, hidden_NH = output_head(inner), batch.rows_of(hidden_BSH)
            if early_exit is None:
                token_sums.append(token_loss(hidden_NH, head, teacher=targets, objective=objective))
            else:
                # The output learns from the labels only, and teaches the exit: CE(output) + (1 - α) CE(exit) + α τ² D.
                output = token_loss(hidden_NH, head, teacher=None, objective=replace(objective, alpha=0.0))
                own = HiddenTargets(hidden_NH=hidden_NH.detach(), head=_detached(head))
                exit_sums = token_loss(batch.rows_of(early_exit.hidden), head, teacher=own, objective=objective)
                token_sums.append(replace(exit_sums, loss=output.loss + exit_sums.loss))
            return token_sums[-1].loss

        def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
            """Run the inner student and return its loss, and its logits if outputs are requested.

            They pass the wrappers around it, whose hooks gather the weights for the gradient of each. The loss is
            normalised here, because FSDP2 casts what a model returns, and its gradient, to 16 bit.
            """
            if features is not None and features.hidden_term is not None:
                kwargs["output_hidden_states"] = True
            with ExitStack() as stack:
                head, attention = None, None
                if fused:
                    head = stack.enter_context(HeadReplacement(inner, loss_at_head)())
                if features is not None:
                    attention = stack.enter_context(features.capture(inner, is_student=True))
                if early_exit is not None:
                    stack.enter_context(early_exit())
                outputs = original(*args, **kwargs)
            if head is None:
                assert not isinstance(targets, HiddenTargets)
                student = plain_token_loss(batch.rows_of(outputs.logits), batch.labels_N, targets, objective)
                loss = student.loss
            else:
                try:
                    loss = head.result
                    if not self._checked_head:
                        head.check_logits(outputs.logits)
                except UnknownLogitsError as error:
                    # Raised after the wrappers have returned: an error here would leave their hooks half done.
                    unknown_logits.append(error)
                    return {"loss": outputs.logits.sum()}
                student = token_sums[-1]
            sums.update(student.sums | {WEIGHT: student.weight})
            if features is not None and features.hidden_term is not None:
                assert taught.hidden_states is not None, "the teacher returns them for this term"
                distance = features.hidden_sum(
                    hidden_states_of(outputs), taught.hidden_states, batch.position_weights()
                )
                sums["hidden_states"] = distance.detach()
                loss = loss + features.hidden_term.weight * distance
            if features is not None and features.attention_term is not None:
                assert attention is not None and taught.attention is not None, "both are captured for this term"
                weights_BS = batch.position_weights()
                distance = features.attention_sum(attention, taught.attention, weights_BS, batch.model_inputs)
                sums["attention"] = distance.detach()
                loss = loss + features.attention_term.weight * distance
            loss = self._normalised(loss, student.weight, num_items_in_batch)
            aux_loss = getattr(outputs, "aux_loss", None)
            coefficient = getattr(inner.config.get_text_config(), "router_aux_loss_coef", 0.0)
            if aux_loss is not None and coefficient:
                # Averaged over micro-batches and ranks: `balance_over_ranks` counts it so.
                counted = num_items_in_batch is not None
                micro_batches = self.current_gradient_accumulation_steps if counted and self.model.training else 1
                loss = loss + coefficient * aux_loss.to(loss.device) / micro_batches
            losses.append(loss)
            return {"loss": loss} | ({"logits": outputs.logits} if return_outputs and not fused else {})

        with self._targets(taught, batch) as targets, replaced_forward(inner, forward):
            outputs = model(**accepted_inputs(inner, batch.model_inputs))
        if unknown_logits:
            raise unknown_logits[0]
        self._checked_head = self._checked_head or fused
        # Without gradients, a training batch is computed to measure what kind of loss a subclass adds.
        if torch.is_grad_enabled() or not model.training:
            (self._train_telemetry if model.training else self._eval_telemetry).add(sums)
        if not self._checked_first_step:
            self._checked_first_step = True
            _check_finite(float(sums.get(NONFINITE, 0.0)))
            if model.training and self._step_weight is not None and float(self._step_weight) == 0:
                rule = "every label of the first batch is masked (-100), so there is nothing to learn"
                fix = "check the chat template or the prompt mask"
                raise UsageError(ConfigError(where="labels", rule=rule, fix=fix))
        # Engines may return the loss in 16 bit. The fp32 value replaces it; the gradient still passes the wrappers'
        # hooks. Only the value is multiplied: logs average over ranks whose gradients are added.
        returned = outputs["loss"].float()
        loss = returned + (losses[-1].detach() * self._ranks_with_added_gradients() - returned.detach())
        if not return_outputs:
            return loss
        return loss, ModelOutput(loss=loss, **({} if fused else {"logits": outputs["logits"]}))

    def mean_over_step(
        self, loss_sum: torch.Tensor, labelled_tokens: torch.Tensor | int, num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Return an own loss term as `compute_loss` returns its loss, for a subclass that adds the term to it.

        Args:
            loss_sum: Sum of the term over the labelled tokens of this micro-batch on this rank.
            labelled_tokens: Their number, which divides the sum in an evaluation.
            num_items_in_batch: What `compute_loss` received.
        """
        share = self._normalised(loss_sum.float(), labelled_tokens, num_items_in_batch)
        return share + share.detach() * (self._ranks_with_added_gradients() - 1)

    @contextmanager
    def _targets(self, taught: TeacherOutput, batch: DistillationBatch) -> Iterator[TeacherTargets | None]:
        """Give what the student's distributions are compared with; a sharded head is gathered inside the block."""
        if self.teacher_cache is not None:
            if batch.teacher_rows_N is None:
                rule = "a cached teacher needs `teacher_rows` in its batches"
                fix = "wrap the dataset in CachedTeacherDataset"
                raise UsageError(ConfigError(where=TEACHER_ROWS, rule=rule, fix=fix))
            yield self.teacher_cache.read(batch.teacher_rows_N, self.distillation.temperature)
        elif taught.hidden_NH is not None:
            assert self.teacher is not None
            with gathered_head(self.teacher.model) as head:
                yield HiddenTargets(hidden_NH=taught.hidden_NH, head=_detached(head))
        elif taught.logits is not None:
            yield LogitTargets(logits_NV=batch.rows_of(taught.logits))
        else:
            yield None

    def _normalised(
        self, loss: torch.Tensor, weight: torch.Tensor | int, num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Divide by the global count and undo the averaging over ranks that every engine does to gradients.

        Over the ranks that share a sequence some engines add instead (`gradients_are_added_over_a_sequence`).
        """
        counted = num_items_in_batch is not None
        ranks = self.accelerator.num_processes if counted and self.args.average_tokens_across_devices else 1
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        if ranks > 1 and parallelism is not None:
            ranks //= parallelism.tp_size * self._ranks_with_added_gradients()
        count = torch.as_tensor(num_items_in_batch if counted else weight, device=loss.device).float()
        return loss * ranks / torch.where(count > 0, count, torch.ones_like(count))

    def _ranks_of_a_sequence(self) -> int:
        """Return the ranks that share one sequence: under Ulysses while training; evaluation does not shard them."""
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        return parallelism.sp_size if parallelism is not None and self.model.training else 1

    def _ranks_with_added_gradients(self) -> int:
        ranks = self._ranks_of_a_sequence()
        if ranks == 1:
            return 1
        zero = self.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        return ranks if gradients_are_added_over_a_sequence(zero) else 1

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        if self.distillation.is_plain_training or not batch_samples:
            return super()._get_num_items_in_batch(batch_samples, device)
        own = [split_batch(batch, shifts=self._loss_shifts_labels).weights.sum() for batch in batch_samples]
        weight = torch.stack(own).sum().to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            weight = self.accelerator.gather(weight.reshape(1)).sum()
            parallelism = getattr(self.accelerator, "parallelism_config", None)
            if parallelism is not None:
                weight = weight / parallelism.tp_size
        self._step_weight = weight
        return weight

    def prediction_step(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Omit the logits of all tokens if neither the caller nor a subclass's `compute_loss` reads them."""
        has_own_loss = own_class(self).compute_loss is not DistillationTrainer.compute_loss
        self._omits_logits = prediction_loss_only and not has_own_loss
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]
        finally:
            self._omits_logits = False

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Add KL, agreement, overlap and both cross-entropies, over all tokens of the evaluation, to the metrics."""
        self._eval_telemetry = Telemetry()
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        means = self._eval_telemetry.means(self.accelerator)
        _check_finite(means.pop(NONFINITE, 0.0))
        output.metrics.update({f"{prefix}_{name}": value for name, value in means.items()})
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the means since the last log, and the current α and τ, to the log of training."""
        if "loss" in logs and not self.distillation.is_plain_training:
            means = self._train_telemetry.means(self.accelerator)
            _check_finite(means.pop(NONFINITE, 0.0))
            objective = self.distillation.objective
            logs = {**logs, **means, "alpha": objective.alpha, "temperature": objective.temperature}
        super().log(logs, *args, **kwargs)

    @property
    def _projectors(self) -> torch.nn.ModuleList | None:
        return None if self._features is None else self._features.projectors

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._projectors is None:
            super()._save(output_dir, state_dict)
            return
        tensors = self.model.state_dict() if state_dict is None else state_dict
        super()._save(output_dir, {name: value for name, value in tensors.items() if PROJECTORS not in name})
        # Transformers 5.23 calls this method on every rank.
        if self.args.should_save:
            save_projectors(tensors, PROJECTORS, output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._projectors is not None and not self.is_fsdp_enabled:
            load_projectors(self._projectors, resume_from_checkpoint)


class Telemetry:
    """Add up sums on the device, and reduce them over ranks when they are read."""

    def __init__(self) -> None:
        self._totals: dict[str, torch.Tensor] = {}

    def add(self, sums: dict[str, torch.Tensor]) -> None:
        """Add the sums of one micro-batch, without synchronising."""
        for name, value in sums.items():
            self._totals[name] = self._totals.get(name, 0.0) + value.double()

    def means(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the means over all ranks and reset the sums; a collective."""
        names = (*NAMES, WEIGHT, NONFINITE)
        zero = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        # A rank whose labels are all masked has fewer sums; all ranks reduce the same number of them.
        values = torch.stack([self._totals.get(name, zero) for name in names])
        present = torch.stack([zero + (name in self._totals) for name in names])
        self._totals = {}
        totals, ranks_with_sum = accelerator.reduce(torch.stack([values, present]), reduction="sum").tolist()
        by_name = {name: total for name, total, ranks in zip(names, totals, ranks_with_sum, strict=True) if ranks}
        weight = by_name.get(WEIGHT) or 1.0
        means = {logged: by_name[name] / weight for name, logged in NAMES.items() if name in by_name}
        if by_name.get(NONFINITE):
            means[NONFINITE] = by_name[NONFINITE]
        return means


def _detached(head: OutputHead) -> OutputHead:
    bias_V = None if head.bias_V is None else head.bias_V.detach()
    return replace(head, weight_VH=head.weight_VH.detach(), bias_V=bias_V)


def _check_finite(nonfinite_rows: float) -> None:
    if nonfinite_rows:
        rule = f"NaN or infinite logits at {nonfinite_rows:.0f} labelled tokens"
        raise ShardwrightError(f"teacher: {rule}; load it in bf16 or fp32, and check its weights")
