"""The teacher of a distillation: checks, teachers made of the student, batches, and the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins.deepspeed.ulysses import own_shard, whole_sequences
from ...plugins.transformers.attention import hidden_states_of
from ...plugins.transformers.output_heads import base_model
from ...plugins.transformers.second_model import PlacedModel
from ..data.chat import IGNORED_LABEL
from ..losses.fused_loss import accepted_inputs, captured_head_input
from .settings import DistillationConfig
from .teacher_cache import TeacherCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainingArguments

    from .feature_matching import Captured, FeatureMatching

TEACHER_ROWS, SHIFT_LABELS = "teacher_rows", "shift_labels"


def check_arguments(
    student: Any,
    teacher: Any,
    distillation: DistillationConfig,
    arguments: TrainingArguments | None,
    trainer_arguments: Mapping[str, Any],
) -> None:
    """Reject a teacher, terms and arguments that cannot be combined.

    Raises:
        UsageError: all errors together.
    """
    errors = []
    model = teacher.model if isinstance(teacher, PlacedModel) else teacher

    def reject(where: str, rule: str, fix: str = "", value: object = None) -> None:
        errors.append(ConfigError(where=where, value=value, rule=rule, fix=fix))

    if student is None:
        reject("model", "a student is required; model_init is not supported")
    if arguments is not None and arguments.label_smoothing_factor:
        rule = "must be 0: the teacher's distributions already smooth the labels"
        reject("label_smoothing_factor", rule, "set it to 0", value=arguments.label_smoothing_factor)
    if not distillation.is_plain_training:
        if arguments is not None and arguments.n_gpu > 1:
            rule = "one process drives several accelerators (DataParallel), with which the losses are not exact"
            reject("n_gpu", rule, "start with accelerate launch", value=arguments.n_gpu)
        if trainer_arguments.get("compute_loss_func") is not None:
            rule = "would not be called: the terms of `distillation` are the loss"
            reject("compute_loss_func", rule, "use the Trainer, or set alpha to 0")
        if teacher is None and distillation.self_teacher is None:
            rule = f"alpha = {distillation.alpha} and the other terms need a teacher"
            reject("teacher", rule, "pass a teacher, or set self_teacher")
        if teacher is not None and distillation.self_teacher is not None:
            reject("teacher", "self_teacher makes the student its own teacher", "pass only one of the two")
        has_features = distillation.hidden_states is not None or distillation.attention is not None
        if isinstance(teacher, TeacherCache) and has_features:
            reject("teacher", "a cache has no hidden states", "use a live teacher")
        if hasattr(model, "named_parameters") and hasattr(student, "parameters"):
            student_ids = {id(parameter) for parameter in student.parameters()}
            shared = [name for name, parameter in model.named_parameters() if id(parameter) in student_ids]
            if shared:
                # Freezing the teacher would freeze the student.
                rule = f"shares {len(shared)} tensors with the student, such as {shared[0]}, which could not be trained"
                fix = "load the teacher separately, or set distillation.self_teacher"
                reject("teacher", rule, fix, value=type(model).__name__)
    if errors:
        raise UsageError(errors)


def inner_model(trainer: Trainer) -> PreTrainedModel:
    """Return the Transformers model inside PEFT and wrappers."""
    inner: PreTrainedModel = base_model(trainer.accelerator.unwrap_model(trainer.model))
    return inner


class EarlyExit:
    """Hidden states of an earlier layer, normalised like the last layer's, so that the same head reads them.

    Raises:
        UsageError: the model has no list of layers or no final norm.
    """

    def __init__(self, model: PreTrainedModel, exit_layer: int | None) -> None:
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        layers = next((getattr(decoder, name) for name in ("layers", "h") if hasattr(decoder, name)), None)
        norms = ("norm", "ln_f", "final_layernorm")
        norm = next((getattr(decoder, name) for name in norms if hasattr(decoder, name)), None)
        if layers is None or norm is None:
            rule = "has no list of layers with a final norm, which an earlier exit requires"
            raise UsageError(ConfigError(where=type(model).__name__, rule=rule))
        number = len(layers) // 2 if exit_layer is None else exit_layer
        if not 0 < number < len(layers):
            rule = f"must be from 1 to {len(layers) - 1}; the model has {len(layers)} layers"
            raise UsageError(ConfigError(where="self_teacher.exit_layer", value=number, rule=rule))
        self._layer, self._norm = layers[number - 1], norm
        self._output: torch.Tensor | None = None

    @contextmanager
    def __call__(self) -> Iterator[EarlyExit]:
        """Keep the layer's output inside the block."""
        self._output = None

        def keep(_module: object, _inputs: object, output: Any) -> None:
            self._output = output[0] if isinstance(output, tuple) else output

        handle = self._layer.register_forward_hook(keep)
        try:
            yield self
        finally:
            handle.remove()

    @property
    def hidden(self) -> torch.Tensor:
        """The normalised hidden states at the exit, [B, S, H]."""
        hidden: torch.Tensor = self._norm(self._output)
        return hidden


@dataclass(frozen=True, kw_only=True)
class DistillationBatch:
    """One micro-batch, split into what models read and what losses read."""

    model_inputs: dict[str, Any]
    """Inputs of the models, without labels."""
    labels: torch.Tensor
    """[B, S], row t holding the token that position t predicts; [B] for the classification of sequences."""
    weights: torch.Tensor
    """fp32, shaped as the labels: 1 where there is a label, else 0."""
    rows_N: torch.Tensor
    """Flat indices of the rows with a label."""
    teacher_rows_N: torch.Tensor | None = None
    """Row numbers in a teacher's cache, of the rows with a label."""

    @property
    def labels_N(self) -> torch.Tensor:
        return self.labels.reshape(-1)[self.rows_N]

    def rows_of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the rows that count of [B, S, ...], as [N, ...]; of [B, ...] where sequences are classified."""
        return values.reshape(-1, values.shape[-1]).index_select(0, self.rows_N)

    def position_weights(self) -> torch.Tensor:
        """Return the weight of every position [B, S]; a classified sequence spreads its weight over its tokens."""
        if self.labels.dim() > 1:
            return self.weights
        mask_BS = self.model_inputs.get("attention_mask")
        mask_BS = torch.ones_like(self.model_inputs["input_ids"]).float() if mask_BS is None else mask_BS.float()
        return self.weights[:, None] * mask_BS / mask_BS.sum(dim=1, keepdim=True).clamp(min=1)


def split_batch(inputs: dict[str, Any], *, shifts: bool) -> DistillationBatch:
    """Split a batch; labels move one to the left if the model predicts the next token.

    Raises:
        UsageError: no labels, or labels that are not classes.
    """
    inputs = dict(inputs)
    labels, shifted = inputs.pop("labels", None), inputs.pop(SHIFT_LABELS, None)
    if labels is None and shifted is None:
        rule = "batches need labels, which select the positions to distill"
        fix = "copy input_ids and mask what is not to be learned"
        raise UsageError(ConfigError(where="labels", rule=rule, fix=fix))
    teacher_rows = inputs.pop(TEACHER_ROWS, None)
    labels, is_shifted = (labels, False) if shifted is None else (shifted, True)
    if labels.is_floating_point():
        rule = "must be classes: regression and multi-label classification have no distribution to distill"
        raise UsageError(ConfigError(where="labels", value=str(labels.dtype), rule=rule))
    if shifts and not is_shifted:
        labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL)
    weights = labels.ne(IGNORED_LABEL).float()
    rows_N = weights.reshape(-1).nonzero().squeeze(1)
    return DistillationBatch(
        model_inputs=inputs,
        labels=labels,
        weights=weights,
        rows_N=rows_N,
        teacher_rows_N=None if teacher_rows is None else teacher_rows.reshape(-1)[rows_N],
    )


def with_decoder_inputs(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """Add the decoder's input, which encoder-decoder models would make from labels that they do not get here.

    Some make it only inside their forward (Blenderbot, SeamlessM4T): labels move one to the right, after the start
    token.
    """
    if not model.config.is_encoder_decoder or "decoder_input_ids" in inputs:
        return inputs
    labels = inputs["labels"]
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return {**inputs, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=labels)}
    shifted = labels.roll(1, dims=-1)
    shifted[..., 0] = model.config.decoder_start_token_id
    return {**inputs, "decoder_input_ids": shifted.masked_fill(shifted == IGNORED_LABEL, model.config.pad_token_id)}


@dataclass(frozen=True, kw_only=True)
class TeacherOutput:
    """Results of one forward pass of the teacher."""

    hidden_NH: torch.Tensor | None = None
    """Input of the head at the rows that count."""
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attention: Captured | None = None


def run_teacher(
    teacher: PlacedModel,
    batch: DistillationBatch,
    *,
    fused: bool,
    features: FeatureMatching | None,
    sequence_sharded: bool,
    check_head: bool,
) -> TeacherOutput:
    """Run the teacher on a batch; with sharded sequences it reads full sequences and keeps this rank's shard.

    Raises:
        UnknownLogitsError: with `fused` and `check_head`, if its logits are not those of its head.
    """
    inputs = whole_sequences(batch.model_inputs) if sequence_sharded else batch.model_inputs
    wants_hidden_states = features is not None and features.hidden_term is not None
    if wants_hidden_states:
        inputs = {**inputs, "output_hidden_states": True}
    own: Callable[[torch.Tensor], torch.Tensor] = own_shard if sequence_sharded else lambda tensor: tensor
    with ExitStack() as stack:
        head, head_inputs = None, list[torch.Tensor]()
        if fused:
            name = f"teacher {type(teacher.model).__name__}"
            replacement, head_inputs = captured_head_input(teacher.model, name)
            head = stack.enter_context(replacement())
        attention = None if features is None else stack.enter_context(features.capture(teacher.model, is_student=False))
        outputs = teacher(**accepted_inputs(teacher.model, inputs))
    if head is not None and check_head:
        head.check_logits(outputs.logits)
    return TeacherOutput(
        hidden_NH=None if head is None else batch.rows_of(own(head_inputs[0])),
        logits=None if fused else own(outputs.logits),
        hidden_states=tuple(own(states) for states in hidden_states_of(outputs)) if wants_hidden_states else None,
        attention=attention,
    )
