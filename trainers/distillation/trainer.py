"""`DistillationTrainer`: the Trainer of Transformers with a teacher, exact under every plan."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from ...ds_configs.specs.teacher_placement import TeacherPlacement
from ...plugins.deepspeed.whole_sequence import gradients_are_added_over_a_sequence
from ...plugins.launching.notes import note_on_first_rank
from ...plugins.transformers.run_settings import trainer_faults
from ..losses.head_forward import UnknownLogitsError, accepted_inputs, replaced_forward
from ..losses.objective import TeacherTargets, TokenObjective
from .batch import EXTRA_COLUMNS, DistillationBatch, global_weight, split_batch, with_decoder_inputs
from .config import DistillationConfig
from .on_policy import completed_by_student, is_generated
from .projector_files import load_projectors, save_projectors, split_projectors
from .student_step import StudentStep
from .teacher_run import Lesson, ask, ask_in_its_own_tokens, targets_of
from .teacher_setup import TeacherSetup, feature_matching, inner_model, predicts_next_token, uses_fused
from .telemetry import NONFINITE, Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

PROJECTORS = "distillation_projectors"


class DistillationTrainer(Trainer):
    """Trains a student on labels and on what a teacher makes of the same tokens.

    The loss is the mean over all labelled tokens of an optimizer step, over all ranks and micro-batches:
    ``Σ w ℓ / Σ w`` with ``ℓ = (1 - α) CE + α τ² D`` plus the feature terms (`DistillationConfig`). Gradients do not
    depend on how the tokens are split.

    ``teacher`` is a Transformers model, which ``teacher_placement`` keeps whole on every rank or shards, a placed
    teacher (`plugins.teacher_placement`), or a `TeacherCache`; ``None`` with ``distillation.self_teacher``, or where no
    term needs one. ``teacher_tokenizer`` belongs to ``distillation.cross_tokenizer``, and `processing_class` is then
    the student's.

    Raises:
        UsageError: terms, teacher and arguments do not go together; all faults at once.
    """

    corrects_balance_loss = True
    shares_sequences = True
    """Cuts sequences over ranks by itself, so that `SequenceParallelCallback` leaves it alone."""

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        teacher: Any = None,
        teacher_placement: TeacherPlacement = "replica",
        teacher_tokenizer: Any = None,
        distillation: DistillationConfig | None = None,
        **kwargs: Any,
    ) -> None:
        self.distillation = distillation or DistillationConfig()
        self.combined_settings = self.distillation.combined_settings
        setup = TeacherSetup(model, teacher, teacher_placement, self.distillation, args)
        setup.check_trainer_arguments(kwargs)
        self._cross_tokenizer = setup.cross_tokenizer(kwargs, teacher_tokenizer)
        super().__init__(model=model, args=args, **kwargs)
        self._train_telemetry, self._eval_telemetry = Telemetry(), Telemetry()
        self._checked_first_step = self._checked_head = self._other_logits = False
        self._keeps_logits = False
        self.teacher: Any = None
        self.teacher_cache: Any = None
        self.moving_average: Any = None
        self._features: Any = None
        if self.distillation.is_plain_training:
            return
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = predicts_next_token(inner_model(self))
        setup.check_accelerator(self.accelerator)
        if faults := trainer_faults(self):
            raise UsageError(faults)
        self.teacher, self.teacher_cache = setup.place(self)
        self._features = feature_matching(self.distillation, inner_model(self), self.teacher)
        if self._features is not None and self._features.projectors is not None:
            inner_model(self).add_module(PROJECTORS, self._features.projectors.to(self.args.device))

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        teacher = getattr(self, "teacher", None)
        extra = {*EXTRA_COLUMNS}
        if teacher is not None:
            import inspect

            extra |= {*inspect.signature(type(teacher.model).forward).parameters} - {"self", "kwargs", "args"}
        self._signature_columns: list[str] = sorted({*self._signature_columns, *extra})

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the share of this micro-batch and rank in the mean over all labelled tokens."""
        if self.distillation.is_plain_training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        fused = self._uses_fused(return_outputs)
        try:
            return self._distilled(model, inputs, return_outputs, num_items_in_batch, fused=fused)
        except UnknownLogitsError as error:
            if self.distillation.implementation == "fused" or self._exits_early:
                raise
            # Every rank finds the same in its first step, before any gradient.
            self._other_logits = True
            note_on_first_rank(
                f"{error.faults[0].where} {error.faults[0].rule}: the loss is computed from whole logits"
            )
        return self._distilled(model, inputs, return_outputs, num_items_in_batch, fused=False)

    def _uses_fused(self, return_outputs: bool) -> bool:
        keeps_logits = return_outputs and self._keeps_logits
        if self._exits_early and keeps_logits:
            rule = "learns in the place of the head, so that nobody can read the logits of an evaluation besides"
            fix = "evaluate without compute_metrics, or with prediction_loss_only=True"
            raise UsageError(Fault(where="self_teacher", value="deeper_exit", rule=rule, fix=fix))
        if self._exits_early:
            return True
        if self._other_logits or keeps_logits:
            return False
        return uses_fused(self.distillation, inner_model(self), self.teacher)

    def _distilled(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool, num_items_in_batch: Any, *, fused: bool
    ) -> Any:
        inner = inner_model(self)
        batch = split_batch(with_decoder_inputs(inner, inputs), shifts=self._loss_shifts_labels)
        objective = self.distillation.objective(self._progress())
        lesson = self._lesson(model, batch, fused)
        with self._targets(lesson, batch, objective) as targets:
            step = StudentStep(
                model=inner,
                batch=batch,
                objective=objective,
                targets=targets,
                lesson=lesson,
                fused=fused,
                telemetry=self.distillation.telemetry,
                features=self._features,
                cross_tokenizer=self._cross_tokenizer,
                early_exit=self._early_exit(inner),
                normalise=self._normaliser(inner, num_items_in_batch),
                check_head=fused and not self._checked_head,
            )
            with replaced_forward(inner, step.forward):
                outputs = model(**accepted_inputs(inner, batch.model_inputs))
        if step.unknown_logits is not None:
            raise step.unknown_logits
        self._checked_head = self._checked_head or fused
        self._record(model, step, num_items_in_batch)
        loss = step.exact_loss(outputs, times=self._added_ranks())
        if not return_outputs:
            return loss
        return loss, {"loss": loss} | ({} if step.logits is None else {"logits": step.logits})

    def _normaliser(self, inner: Any, num_items_in_batch: Any) -> Callable[..., torch.Tensor]:
        """Divide by the global count and undo the averaging over ranks that every engine does to gradients.

        Over the ranks that share a sequence some engines add instead (`gradients_are_added_over_a_sequence`).
        A mixture's load-balancing loss is averaged over micro-batches and ranks; the Trainer (transformers 5.17.0)
        adds one per micro-batch and multiplies it by the ranks.
        """
        import torch

        counted = num_items_in_batch is not None
        ranks = self.accelerator.num_processes if counted and self.args.average_tokens_across_devices else 1
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        if ranks > 1 and parallelism is not None:
            ranks //= parallelism.tp_size * self._added_ranks()
        micro_batches = self.current_gradient_accumulation_steps if counted and self.model.training else 1
        coefficient = getattr(inner.config.get_text_config(), "router_aux_loss_coef", 0.0)

        def normalise(loss: torch.Tensor, weight: torch.Tensor, aux_loss: torch.Tensor | None) -> torch.Tensor:
            count = torch.as_tensor(num_items_in_batch if counted else weight, device=loss.device).float()
            loss = loss * ranks / torch.where(count > 0, count, torch.ones_like(count))
            if aux_loss is None or not coefficient:
                return loss
            return loss + coefficient * aux_loss.to(loss.device) / micro_batches

        return normalise

    def _lesson(self, model: Any, batch: DistillationBatch, fused: bool) -> Lesson:
        if self.teacher is None:
            return Lesson()
        teacher = self.teacher.running(model) if hasattr(self.teacher, "running") else self.teacher
        if self._cross_tokenizer is not None:
            return ask_in_its_own_tokens(teacher, batch)
        sharded = self._ranks_of_a_sequence() > 1
        return ask(
            teacher,
            batch,
            fused=fused,
            features=self._features,
            sequence_sharded=sharded,
            check_head=not self._checked_head,
        )

    @contextmanager
    def _targets(
        self, lesson: Lesson, batch: DistillationBatch, objective: TokenObjective
    ) -> Iterator[TeacherTargets | None]:
        if self.teacher_cache is not None:
            if batch.teacher_rows_N is None:
                rule = "a cached teacher needs `teacher_rows` in its batches"
                raise UsageError(Fault(where="teacher_rows", rule=rule, fix="wrap the dataset in CachedTeacherDataset"))
            yield self.teacher_cache.read(batch.teacher_rows_N, objective.temperature)
            return
        if self._cross_tokenizer is not None:
            yield None
            return
        with ExitStack() as stack:
            yield stack.enter_context(targets_of(lesson, batch, getattr(self.teacher, "gathered_head", None)))

    def _record(self, model: Any, step: StudentStep, num_items_in_batch: Any) -> None:
        (self._train_telemetry if model.training else self._eval_telemetry).add(step.sums, step.sample_sums)
        if self._checked_first_step:
            return
        self._checked_first_step = True
        _refuse_nonfinite(float(step.sums.get(NONFINITE, 0.0)))
        if num_items_in_batch is not None and float(num_items_in_batch) == 0:
            rule = "every label of the first batch is masked (-100), so there is nothing to learn"
            raise UsageError(Fault(where="labels", rule=rule, fix="check the chat template or the prompt mask"))

    def _progress(self) -> float:
        return float(self.state.global_step / max(1, self.state.max_steps))

    @property
    def _exits_early(self) -> bool:
        own = self.distillation.self_teacher
        return own is not None and own.kind == "deeper_exit"

    def _early_exit(self, inner: Any) -> Any:
        own = self.distillation.self_teacher
        if own is None or not self._exits_early:
            return None
        from .self_teacher import EarlyExit

        return EarlyExit(inner, own.exit_layer)

    def _ranks_of_a_sequence(self) -> int:
        """Ranks that share one sequence: under Ulysses while training; each evaluates whole ones."""
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        return parallelism.sp_size if parallelism is not None and self.model.training else 1

    def _added_ranks(self) -> int:
        ranks = self._ranks_of_a_sequence()
        if ranks == 1:
            return 1
        zero = self.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        return ranks if gradients_are_added_over_a_sequence(zero) else 1

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Let the student complete some of the micro-batches, and count tokens afterwards."""
        own = self.distillation.on_policy
        if own is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[no-any-return]
        from itertools import islice

        batches = list(islice(epoch_iterator, num_batches))
        for index, batch in enumerate(batches):
            if is_generated(own, self.args.seed, self.state.global_step, index):
                batches[index] = completed_by_student(self, batch, own, index)
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> torch.Tensor | int | None:
        if self.distillation.is_plain_training or not batch_samples:
            return super()._get_num_items_in_batch(batch_samples, device)
        weight = global_weight(batch_samples, shifts=self._loss_shifts_labels).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            weight = self.accelerator.gather(weight.reshape(1)).sum()
            parallelism = getattr(self.accelerator, "parallelism_config", None)
            if parallelism is not None:
                weight = weight / parallelism.tp_size
        return weight

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Keep the logits of all tokens only where somebody reads them."""
        self._keeps_logits = not prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]
        finally:
            self._keeps_logits = False

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Add KL, agreement, overlap and both cross-entropies, over all tokens of the evaluation, to the metrics.

        Beside each stands its standard error over samples, where ranks do not share them.
        """
        self._eval_telemetry = Telemetry()
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        means = self._eval_telemetry.means(self.accelerator)
        _refuse_nonfinite(means.pop(NONFINITE, 0.0))
        means |= self._eval_telemetry.standard_errors(self.accelerator)
        output.metrics.update({f"{prefix}_{name}": value for name, value in means.items()})
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the means since the last log, and the present α and τ, to the log of training."""
        if "loss" in logs and not self.distillation.is_plain_training:
            means = self._train_telemetry.means(self.accelerator)
            _refuse_nonfinite(means.pop(NONFINITE, 0.0))
            objective = self.distillation.objective(self._progress())
            logs = {**logs, **means, "alpha": objective.alpha, "temperature": objective.temperature}
        super().log(logs, *args, **kwargs)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is not None and self.moving_average is not None:
            self.moving_average.load(resume_from_checkpoint)
        return prepared

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Give projectors a learning rate of their own where one is set."""
        optimizer = super().create_optimizer(*args, **kwargs)
        own = self.distillation.hidden_states
        if own is not None and own.projector_learning_rate is not None and self._features.projectors is not None:
            split_projectors(optimizer, self._features.projectors, own.projector_learning_rate)
        return optimizer

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._features is None or self._features.projectors is None:
            super()._save(output_dir, state_dict)
            return
        whole = self.model.state_dict() if state_dict is None else state_dict
        super()._save(output_dir, {name: value for name, value in whole.items() if PROJECTORS not in name})
        save_projectors(whole, PROJECTORS, output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._features is not None and self._features.projectors is not None and not self.is_fsdp_enabled:
            load_projectors(self._features.projectors, resume_from_checkpoint)


def _refuse_nonfinite(rows: float) -> None:
    if rows:
        rule = f"NaN or infinite logits at {rows:.0f} labelled tokens"
        raise ShardwrightError(f"teacher: {rule}; load it in bf16 or fp32, and check its weights")
