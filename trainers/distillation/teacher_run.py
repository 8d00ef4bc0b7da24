"""Asks the teacher: one forward pass without gradients, and what the losses read of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ...ds_configs.specs.errors import Fault, UsageError
from ...plugins.deepspeed.whole_sequence import own_shard, whole_sequences
from ...plugins.transformers.attention_capture import hidden_states_of
from ..losses.cross_tokenizer import TEACHER_IDS, TEACHER_MASK
from ..losses.head_forward import accepted_inputs, captured_head_input
from ..losses.objective import HiddenTargets, LogitTargets, TeacherTargets
from .batch import DistillationBatch

if TYPE_CHECKING:
    import torch

    from .feature_matching import FeatureMatching


class Teacher(Protocol):
    """A frozen model, however it is held."""

    model: Any
    """The inner Transformers model."""

    def __call__(self, **inputs: Any) -> Any:
        """Run it without gradients."""

    def gathered_head(self) -> Any:
        """Return a context manager that gives its `OutputHead` with whole weights."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """Results of one forward pass of the teacher."""

    hidden_NH: torch.Tensor | None = None
    """Input of the head at the rows that count."""
    logits: torch.Tensor | None = None
    """Logits of all positions."""
    hidden_states: tuple[torch.Tensor, ...] | None = None
    """Hidden states of all layers."""
    attention: Any = None
    """Captured attention, as the feature terms read it."""


def ask(
    teacher: Teacher,
    batch: DistillationBatch,
    *,
    fused: bool,
    features: FeatureMatching | None,
    sequence_sharded: bool,
    check_head: bool,
) -> Lesson:
    """Run the teacher on a batch; with sharded sequences it reads the whole ones, and its own shard is kept.

    Raises:
        UnknownLogitsError: with `fused` and `check_head`, where its logits are not those of its head.
    """
    inputs = whole_sequences(batch.model_inputs) if sequence_sharded else batch.model_inputs
    wants_hidden_states = features is not None and features.hidden_term is not None
    if wants_hidden_states:
        inputs = {**inputs, "output_hidden_states": True}
    own = own_shard if sequence_sharded else _unchanged
    with ExitStack() as stack:
        kept = stack.enter_context(captured_head_input(teacher.model)) if fused else None
        attention = None if features is None else stack.enter_context(features.capture_teacher(teacher.model))
        outputs = teacher(**accepted_inputs(teacher.model, inputs))
    hidden_NH = None
    if kept is not None:
        if check_head:
            kept.check(f"teacher {type(teacher.model).__name__}", outputs.logits)
        hidden_NH = batch.rows_of(own(kept.inputs[0]))
    return Lesson(
        hidden_NH=hidden_NH,
        logits=None if fused else own(outputs.logits),
        hidden_states=tuple(own(states) for states in hidden_states_of(outputs)) if wants_hidden_states else None,
        attention=attention,
    )


def ask_in_its_own_tokens(teacher: Teacher, batch: DistillationBatch) -> Lesson:
    """Run the teacher on its own tokens of the same texts."""
    others = batch.other_inputs
    if batch.has_token_weights:
        rule = "spans of several tokens have no weight of their own"
        raise UsageError(Fault(where="token_weights", rule=rule, fix="mask labels, or use one tokenizer"))
    if TEACHER_IDS not in others:
        rule = "batches lack the teacher's own tokens"
        raise UsageError(Fault(where="cross_tokenizer", rule=rule, fix="collate with CrossTokenizerCollator"))
    inputs = {"input_ids": others[TEACHER_IDS], "attention_mask": others[TEACHER_MASK]}
    return Lesson(logits=teacher(**accepted_inputs(teacher.model, inputs)).logits)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def targets_of(
    lesson: Lesson, batch: DistillationBatch, gathered_head: Callable[[], Any] | None
) -> Iterator[TeacherTargets | None]:
    """Give the teacher's targets; the head's weights are whole inside the block."""
    if lesson.hidden_NH is not None and gathered_head is not None:
        with gathered_head() as head:
            bias_V = None if head.bias_V is None else head.bias_V.detach()
            frozen = replace(head, weight_VH=head.weight_VH.detach(), bias_V=bias_V)
            yield HiddenTargets(hidden_NH=lesson.hidden_NH, head=frozen)
    elif lesson.logits is not None:
        yield LogitTargets(logits_NV=batch.rows_of(lesson.logits))
    else:
        yield None
