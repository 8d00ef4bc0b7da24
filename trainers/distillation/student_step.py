"""The student's forward pass with every term of the loss in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...plugins.transformers.attention_capture import hidden_states_of
from ...plugins.transformers.output_heads import OutputHead, output_head
from ..losses.fused_loss import fused_token_loss
from ..losses.head_forward import HeadReplacement, UnknownLogitsError
from ..losses.objective import HiddenTargets, TeacherTargets, TokenObjective, TokenSums
from ..losses.plain_loss import plain_token_loss
from .batch import DistillationBatch
from .teacher_run import Lesson
from .telemetry import WEIGHT, sums_by_name

if TYPE_CHECKING:
    import torch

    from ..losses.cross_tokenizer import CrossTokenizerLoss
    from .feature_matching import FeatureMatching
    from .self_teacher import EarlyExit


@dataclass(kw_only=True)
class StudentStep:
    """Stands in for the forward of the inner student for one call; the wrappers around it stay in charge."""

    model: Any
    """The inner Transformers model."""
    batch: DistillationBatch
    objective: TokenObjective
    targets: TeacherTargets | None
    lesson: Lesson
    fused: bool
    telemetry: bool
    features: FeatureMatching | None = None
    cross_tokenizer: CrossTokenizerLoss | None = None
    early_exit: EarlyExit | None = None
    normalise: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    """Makes the final loss of Σ of all terms, Σ of weights and a mixture's load-balancing loss."""
    check_head: bool = False
    """Whether to compare what the model makes of its head's output with what the fused loss assumes."""
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Detached sums by name, once the forward has run."""
    sample_sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """[B] shares of the samples in those of these sums that are over tokens, in an evaluation."""
    logits: torch.Tensor | None = None
    """Logits of all positions, where the plain loss made them."""
    unknown_logits: UnknownLogitsError | None = None
    """Why the fused loss is not that of this model; what was returned means nothing then."""
    _loss: Any = None

    def forward(self, original: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return ``{"loss": loss}``, normalised here: FSDP2 casts what a model returns to 16 bit, and its gradient."""
        if self.features is not None and self.features.hidden_term is not None:
            kwargs["output_hidden_states"] = True
        with ExitStack() as stack:
            head = stack.enter_context(HeadReplacement(self.model, self._head_work)()) if self.fused else None
            attention = stack.enter_context(self.features.capture_student(self.model)) if self.features else None
            stack.enter_context(self.early_exit() if self.early_exit else nullcontext())
            outputs = original(*args, **kwargs)
        if head is None:
            token_sums = self._plain(outputs.logits)
            loss, self.logits = token_sums.loss, outputs.logits
        else:
            try:
                loss = head.result
                if self.check_head:
                    head.check_logits(outputs.logits)
            except UnknownLogitsError as error:
                # Told behind the wrappers, whose hooks an error would leave half done.
                self.unknown_logits = error
                return {"loss": outputs.logits.sum()}
            token_sums = self._token_sums
        self.sums = sums_by_name(token_sums)
        if not self.model.training:
            self.sample_sums = self.batch.by_sample({**token_sums.rows, WEIGHT: self.batch.weights_N})
        if self.features is not None:
            loss = loss + self._feature_terms(outputs, attention)
        self._loss = self.normalise(loss, token_sums.weight, getattr(outputs, "aux_loss", None))
        return {"loss": self._loss}

    def exact_loss(self, outputs: Mapping[str, torch.Tensor], times: int) -> torch.Tensor:
        """Return the loss in fp32, with the gradient that leads through the wrappers' hooks.

        The value, not the gradient, is multiplied: logs average over ranks where gradients are added.
        """
        returned = outputs["loss"].float()
        return returned + (self._loss.detach() * times - returned.detach())

    def _keep(self, sums: TokenSums) -> torch.Tensor:
        self._token_sums = sums
        return sums.loss

    def _plain(self, logits: torch.Tensor) -> TokenSums:
        sums = self._plain_sums(logits)
        if self.cross_tokenizer is None:
            return sums
        divergence = self.cross_tokenizer(
            logits,
            self.lesson.logits,
            self.batch.other_inputs,
            self.batch.model_inputs["input_ids"],
            self.batch.labels,
            self.objective.temperature,
        )
        loss = sums.loss + self.objective.alpha * self.objective.temperature**2 * divergence
        return replace(sums, loss=loss, divergence=divergence.detach())

    def _plain_sums(self, logits: torch.Tensor) -> TokenSums:
        assert not isinstance(self.targets, HiddenTargets)
        return plain_token_loss(
            self.batch.rows_of(logits),
            self.batch.labels_N,
            self.targets,
            self.objective,
            weights_N=self.batch.weights_N,
            telemetry=self.telemetry,
        )

    def _head_work(self, hidden: torch.Tensor) -> torch.Tensor:
        head = output_head(self.model)
        hidden_NH = self.batch.rows_of(hidden)
        if self.early_exit is not None:
            return self._keep(self._with_early_exit(hidden_NH, head))
        return self._keep(self._fused(hidden_NH, head, self.targets, self.objective))

    def _fused(
        self, hidden_NH: torch.Tensor, head: OutputHead, targets: TeacherTargets | None, objective: TokenObjective
    ) -> TokenSums:
        return fused_token_loss(
            hidden_NH,
            head,
            self.batch.labels_N,
            targets,
            objective,
            weights_N=self.batch.weights_N,
            telemetry=self.telemetry,
        )

    def _with_early_exit(self, hidden_NH: torch.Tensor, head: OutputHead) -> TokenSums:
        """The output learns from the labels alone, and teaches the exit: CE(output) + (1 - α) CE(exit) + α τ² D."""
        assert self.early_exit is not None
        output = self._fused(hidden_NH, head, None, replace(self.objective, alpha=0.0))
        frozen = replace(head, weight_VH=head.weight_VH.detach())
        if head.bias_V is not None:
            frozen = replace(frozen, bias_V=head.bias_V.detach())
        targets = HiddenTargets(hidden_NH=hidden_NH.detach(), head=frozen)
        exit_sums = self._fused(self.batch.rows_of(self.early_exit.hidden), head, targets, self.objective)
        return replace(exit_sums, loss=output.loss + exit_sums.loss)

    def _feature_terms(self, outputs: Any, attention: Any) -> torch.Tensor:
        assert self.features is not None
        loss: Any = 0.0
        if self.features.hidden_term is not None:
            student, taught = hidden_states_of(outputs), self.lesson.hidden_states
            assert taught is not None, "the teacher was asked for its hidden states"
            weights_BS = self.batch.position_weights()
            distance = self.features.hidden_sum(student, taught, weights_BS)
            self.sums["hidden_states"] = distance.detach()
            loss = loss + self.features.hidden_term.weight * distance
        if self.features.attention_term is not None:
            weights_BS = self.batch.position_weights()
            distance = self.features.attention_sum(
                attention, self.lesson.attention, weights_BS, self.batch.model_inputs
            )
            self.sums["attention"] = distance.detach()
            loss = loss + self.features.attention_term.weight * distance
        return loss
