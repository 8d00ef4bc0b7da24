"""Puts a trainer's teacher in its place, and refuses what does not go together before anything is loaded or moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, UsageError
from ...ds_configs.specs.teacher_placement import TeacherPlacement
from ...plugins.launching.notes import note_on_first_rank
from ...plugins.transformers.output_heads import head_module, head_tensors
from .config import DistillationConfig, Schedule
from .self_teacher import MovingAverage, frozen_copy, without_adapter

if TYPE_CHECKING:
    from ..losses.cross_tokenizer import CrossTokenizerLoss
    from .feature_matching import FeatureMatching


class TeacherSetup:
    """Teacher as the user gave it, checked.

    Raises:
        UsageError: all faults together.
    """

    def __init__(
        self,
        student: Any,
        teacher: Any,
        placement: TeacherPlacement,
        distillation: DistillationConfig,
        arguments: Any,
    ) -> None:
        self._teacher, self._placement, self._distillation = teacher, placement, distillation
        faults = _argument_faults(student, arguments)
        if not distillation.is_plain_training:
            if arguments is not None and arguments.n_gpu > 1:
                rule = "one process drives several accelerators (DataParallel), which no loss here is exact under"
                faults.append(
                    Fault(where="n_gpu", value=arguments.n_gpu, rule=rule, fix="start with accelerate launch")
                )
            faults += _teacher_faults(teacher, distillation) + _shared_weight_faults(student, teacher)
        if faults:
            raise UsageError(faults)
        if teacher is not None and not distillation.is_plain_training:
            _warn_of_swapped_sizes(student, teacher)

    def check_trainer_arguments(self, given: dict[str, Any]) -> None:
        """Refuse what the Trainer takes and a distillation would leave unread.

        Raises:
            UsageError: a loss function of the user's own.
        """
        if given.get("compute_loss_func") is not None and not self._distillation.is_plain_training:
            rule = "would not be called: the terms of `distillation` are the loss"
            raise UsageError(Fault(where="compute_loss_func", rule=rule, fix="use the Trainer, or set alpha to 0"))

    def cross_tokenizer(self, arguments: dict[str, Any], teacher_tokenizer: Any) -> CrossTokenizerLoss | None:
        """Return the loss between different tokenizers, and let the collator give it what it reads; `None` without.

        Raises:
            UsageError: a tokenizer is missing or cannot be aligned.
        """
        kind = self._distillation.cross_tokenizer
        if kind is None:
            return None
        from ..losses.cross_tokenizer import CrossTokenizerCollator, CrossTokenizerLoss

        own = arguments.get("processing_class")
        given = {"processing_class": own, "teacher_tokenizer": teacher_tokenizer}
        missing = [name for name, tokenizer in given.items() if tokenizer is None]
        if arguments.get("data_collator") is None:
            missing.append("data_collator")
        if missing:
            raise UsageError([Fault(where=name, rule="is needed with cross_tokenizer") for name in missing])
        arguments["data_collator"] = CrossTokenizerCollator(own, teacher_tokenizer, arguments["data_collator"])
        return CrossTokenizerLoss(kind, own, teacher_tokenizer)

    def check_accelerator(self, accelerator: Any) -> None:
        """Refuse layouts that the losses are not exact under.

        Raises:
            UsageError: context parallelism, or FSDP1.
        """
        faults = []
        parallelism = getattr(accelerator, "parallelism_config", None)
        if parallelism is not None and parallelism.cp_enabled:
            rule = "torch's context parallelism reorders positions inside a step, where a teacher cannot follow"
            faults.append(Fault(where="cp_size", value=parallelism.cp_size, rule=rule, fix="use sp_size"))
        if parallelism is not None and parallelism.sp_enabled and self._distillation.attention is not None:
            rule = "no rank sees the attention of a whole sequence"
            faults.append(Fault(where="attention", rule=rule, fix="match hidden_states, or leave sp_size at 1"))
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.fsdp_version == 1:
            faults.append(Fault(where="fsdp_version", value=1, rule="is not supported", fix="set fsdp_version: 2"))
        if faults:
            raise UsageError(faults)

    def place(self, trainer: Any) -> tuple[Any, Any]:
        """Return the placed teacher and the cache; one or both are `None`."""
        own = self._distillation.self_teacher
        if own is not None:
            return self._own_teacher(trainer, own), None
        if hasattr(self._teacher, "rows_of"):
            return None, self._teacher
        placed = (
            self._teacher
            if hasattr(self._teacher, "gathered_head")
            else _placed(trainer, self._teacher, self._placement)
        )
        parallelism = getattr(trainer.accelerator, "parallelism_config", None)
        if parallelism is not None and parallelism.sp_enabled:
            from ...plugins.deepspeed.whole_sequence import keep_own_attention

            keep_own_attention(placed.model)
        return placed, None

    def _own_teacher(self, trainer: Any, own: Any) -> Any:
        if own.kind == "deeper_exit":
            return None
        if own.kind == "adapter_off":
            return AdapterOff(trainer)
        copied = frozen_copy(inner_model(trainer))
        if own.kind == "ema":
            copied = copied.float()
            trainer.moving_average = MovingAverage(copied, lambda: inner_model(trainer), own.decay)
            trainer.add_callback(trainer.moving_average)
        return _placed(trainer, copied, "replica")


class AdapterOff:
    """The student's base model as its teacher, through the student's own wrapper."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._running: Any = None
        if not hasattr(trainer.model, "disable_adapter"):
            rule = "the student has no PEFT adapter to switch off"
            raise UsageError(Fault(where="self_teacher", value="adapter_off", rule=rule, fix="use frozen_copy"))

    @property
    def model(self) -> Any:
        """The inner Transformers model, which is the student's."""
        return inner_model(self._trainer)

    def running(self, wrapped: Any) -> AdapterOff:
        """Return this teacher, run through a wrapper of the student."""
        self._running = wrapped
        return self

    def __call__(self, **inputs: Any) -> Any:
        """Run the base model without gradients."""
        import torch

        with torch.no_grad(), without_adapter(self._trainer.model):
            return self._running(**inputs)

    def gathered_head(self) -> Any:
        """Give the head without its adapter."""
        from ...plugins.transformers.teacher_placement import gathered_head

        return gathered_head(self.model)


def inner_model(trainer: Any) -> Any:
    """Return the Transformers model inside PEFT and wrappers."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def predicts_next_token(model: Any) -> bool:
    """Whether position t of the logits predicts token t + 1.

    The Trainer (transformers 5.17.0, trainer.py `_loss_shifts_labels`) reads it from the class name and misses GPT-2,
    whose tokens it then counts with the first of every sample.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return not model.config.is_encoder_decoder and type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def uses_fused(distillation: DistillationConfig, student: Any, teacher: Any) -> bool:
    """Whether the loss is computed in place of the head."""
    if distillation.implementation != "auto":
        return distillation.implementation == "fused"
    if distillation.cross_tokenizer is not None:
        return False
    models = [student] if teacher is None else [student, teacher.model]
    return all(_has_plain_head(model) for model in models)


def _has_plain_head(model: Any) -> bool:
    try:
        head_tensors(head_module(model))
    except UsageError:
        return False
    return True


def feature_matching(distillation: DistillationConfig, student: Any, teacher: Any) -> FeatureMatching | None:
    """Return what matches features, or `None` where nothing asks for it."""
    if distillation.hidden_states is None and distillation.attention is None:
        return None
    from .feature_matching import FeatureMatching

    return FeatureMatching(student.config, teacher.model.config, distillation.hidden_states, distillation.attention)


def _placed(trainer: Any, teacher: Any, placement: TeacherPlacement) -> Any:
    """Place a Transformers model; weights that ZeRO-3 partitioned while loading stay so."""
    from ...plugins.transformers.teacher_placement import place_teacher

    partitioned = any(hasattr(parameter, "ds_id") for parameter in teacher.parameters())
    return place_teacher(
        teacher,
        "sharded" if partitioned and placement == "replica" else placement,
        accelerator=trainer.accelerator,
        micro_batch_size=trainer.args.per_device_train_batch_size,
    )


def _argument_faults(student: Any, arguments: Any) -> list[Fault]:
    faults = []
    if student is None:
        faults.append(Fault(where="model", rule="a student is needed; model_init is not supported"))
    if arguments is not None and arguments.label_smoothing_factor:
        value, rule = arguments.label_smoothing_factor, "softens labels that the teacher softens already"
        faults.append(Fault(where="label_smoothing_factor", value=value, rule=rule, fix="set it to 0"))
    return faults


def _teacher_faults(teacher: Any, distillation: DistillationConfig) -> list[Fault]:
    faults = []
    features = distillation.hidden_states is not None or distillation.attention is not None
    if teacher is None and distillation.self_teacher is None:
        rule = f"alpha = {distillation.alpha} and the other terms need a teacher"
        faults.append(Fault(where="teacher", rule=rule, fix="give one, or set self_teacher"))
    if teacher is not None and distillation.self_teacher is not None:
        faults.append(Fault(where="teacher", rule="self_teacher makes the teacher of the student; give one of both"))
    if hasattr(teacher, "rows_of"):
        if features:
            faults.append(Fault(where="teacher", rule="a cache holds no hidden states", fix="use a live teacher"))
        if distillation.on_policy is not None:
            faults.append(
                Fault(where="on_policy", rule="a cache knows the data's tokens only", fix="use a live teacher")
            )
        if distillation.cross_tokenizer is not None:
            faults.append(Fault(where="cross_tokenizer", rule="a cache holds one tokenizer's distributions"))
        if isinstance(distillation.temperature, Schedule):
            faults.append(Fault(where="temperature", rule="a cache holds fixed temperatures", fix="use one of them"))
    return faults


def _shared_weight_faults(student: Any, teacher: Any) -> list[Fault]:
    """Return the fault of a teacher that is the student, or holds weights of it: to freeze one freezes both."""
    models = [student, teacher.model if hasattr(teacher, "gathered_head") else teacher]
    if not all(hasattr(model, "named_parameters") for model in models):
        return []
    own = {id(parameter) for parameter in student.parameters()}
    shared = [name for name, parameter in models[1].named_parameters() if id(parameter) in own]
    if not shared:
        return []
    rule = f"shares {len(shared)} tensors with the student, such as {shared[0]}, which could not train then"
    fix = "load it a second time, or set distillation.self_teacher"
    return [Fault(where="teacher", value=type(models[1]).__name__, rule=rule, fix=fix)]


def _warn_of_swapped_sizes(student: Any, teacher: Any) -> None:
    # A Transformers model has a `model` too: itself without its head.
    teacher_model = teacher.model if hasattr(teacher, "gathered_head") else teacher
    if not hasattr(teacher_model, "num_parameters") or not hasattr(student, "num_parameters"):
        return
    own, taught_by = (sum(_elements(p) for p in model.parameters()) for model in (student, teacher_model))
    if own > taught_by:
        note_on_first_rank(f"the student has {own:,} parameters and the teacher {taught_by:,}: are they swapped?")


def _elements(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))
