"""`CLIPDistillationTrainer`: dual encoders of images and texts learn from larger ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import Trainer

from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from ...plugins.launching.notes import note_on_first_rank
from ..losses.contrastive import feature_loss, gather_rows, interactive_loss, similarity_loss, task_loss
from ..losses.head_forward import accepted_inputs, replaced_forward
from ..losses.hidden_states import projectors
from .projector_files import load_projectors, save_projectors

ALIGNMENT = "distillation_alignment"
INITIAL_LOG_SCALE = math.log(1 / 0.07)
"""CLIP's own start (arXiv 2103.00020)."""


@dataclass(frozen=True, kw_only=True)
class ClipDistillationConfig:
    """``task · L_task + similarity · L_KL + interactive · L_ICL + features · L_FD``; see `contrastive`."""

    task: float = 1.0
    """Weight of the student's own contrastive loss."""
    similarity: float = 1.0
    """Weight of the KL between both models' similarities."""
    interactive: float = 1.0
    """Weight of the contrastive loss against the teacher's embeddings."""
    features: float = 8.0
    """Weight of the squared distance to the teacher's embeddings; CLIP-KD's 2000, there of means over 512 elements."""
    temperature: float = 1.0
    """τ of the similarities' KL."""

    def __post_init__(self) -> None:
        """Check all values together.

        Raises:
            UsageError: all faults.
        """
        faults = [
            Fault(where=field.name, value=getattr(self, field.name), rule="0 or more")
            for field in fields(self)
            if not 0 <= getattr(self, field.name) < math.inf
        ]
        if self.temperature == 0:
            faults.append(Fault(where="temperature", value=0, rule="above 0"))
        if not any((self.task, self.similarity, self.interactive, self.features)):
            faults.append(Fault(where="weights", rule="at least one must be above 0"))
        if faults:
            raise UsageError(faults)


class Alignment(torch.nn.Module):
    """Parts that join the student to the teacher's space: projectors where widths differ, and the interactive scale."""

    def __init__(self, student_width: int, teacher_width: int) -> None:
        super().__init__()
        self.log_scale = torch.nn.Parameter(torch.tensor(INITIAL_LOG_SCALE))
        joins = student_width != teacher_width
        self.image, self.text = (
            projectors(student_width, teacher_width, 2) if joins else (torch.nn.Identity(), torch.nn.Identity())
        )

    def forward(self, images_bD: torch.Tensor, texts_bD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both embeddings in the teacher's space, normalised, in fp32."""
        normalise = torch.nn.functional.normalize
        return normalise(self.image(images_bD).float(), dim=-1), normalise(self.text(texts_bD).float(), dim=-1)


class CLIPDistillationTrainer(Trainer):
    """Trains a model with `image_embeds`, `text_embeds` and a `logit_scale`, as CLIP's, against a larger one.

    Negatives are those of all ranks, and gradients are those of one process with the whole batch. Contrastive losses
    are no sums over samples: with accumulation each micro-batch has its own negatives, as in any CLIP training, and
    the mean of their losses is not the loss of the whole batch.

    Raises:
        UsageError: a model is no dual encoder, or an argument would go unread; all faults at once.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        teacher: Any = None,
        distillation: ClipDistillationConfig | None = None,
        **kwargs: Any,
    ) -> None:
        self.distillation = distillation or ClipDistillationConfig()
        _check(model, teacher, args, kwargs)
        alignment = Alignment(model.config.projection_dim, teacher.config.projection_dim)
        model.add_module(ALIGNMENT, alignment)
        super().__init__(model=model, args=args, **kwargs)
        # An evaluation without labels computes a loss all the same.
        self.can_return_loss, self.model_accepts_loss_kwargs = True, False
        self.teacher = teacher.requires_grad_(False).eval().to(self.args.device)
        self._sums: dict[str, torch.Tensor] = {}
        self._batches, self._checked = 0, False
        if self.args.gradient_accumulation_steps > 1:
            note_on_first_rank("gradient accumulation: negatives come from one micro-batch at a time, on all ranks")

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the weighted sum of all terms over the batch of all ranks."""
        inputs = {name: value for name, value in inputs.items() if name != "return_loss"}
        with torch.no_grad():
            taught = self.teacher(**accepted_inputs(self.teacher, inputs))
        inner = self.accelerator.unwrap_model(model)
        kept: dict[str, torch.Tensor] = {}

        def forward(original: Any, *args: Any, **named: Any) -> dict[str, torch.Tensor]:
            outputs = original(*args, **named)
            kept.update(self._terms(inner, outputs, taught))
            weights = {name: getattr(self.distillation, name) for name in kept}
            loss = torch.stack([weights[name] * value for name, value in kept.items()]).sum()
            return {"loss": loss, "logits_per_image": outputs.logits_per_image.detach()}

        with replaced_forward(inner, forward):
            outputs = model(**accepted_inputs(inner, inputs))
        self._record(kept, training=inner.training)
        loss = outputs["loss"]
        return (loss, outputs) if return_outputs else loss

    def _terms(self, student: Any, outputs: Any, taught: Any) -> dict[str, torch.Tensor]:
        """Return each term with a weight above 0."""
        alignment = getattr(student, ALIGNMENT)
        images, texts = (gather_rows(value.float()) for value in (outputs.image_embeds, outputs.text_embeds))
        with torch.no_grad():
            taught_images, taught_texts = (
                gather_rows(value.float()) for value in (taught.image_embeds, taught.text_embeds)
            )
        joined = alignment(outputs.image_embeds, outputs.text_embeds)
        joined_images, joined_texts = (gather_rows(value) for value in joined)
        terms: dict[str, Callable[[], torch.Tensor]] = {
            "task": lambda: task_loss(images, texts, student.logit_scale),
            "similarity": lambda: similarity_loss(
                (images, texts, student.logit_scale),
                (taught_images, taught_texts, self.teacher.logit_scale),
                self.distillation.temperature,
            ),
            "interactive": lambda: interactive_loss(
                joined_images, joined_texts, taught_images, taught_texts, alignment.log_scale
            ),
            "features": lambda: (
                0.5 * (feature_loss(joined_images, taught_images) + feature_loss(joined_texts, taught_texts))
            ),
        }
        found = {name: term() for name, term in terms.items() if getattr(self.distillation, name) > 0}
        # DDP waits for the gradient of every parameter, those of terms without a weight too.
        unused: Any = 0.0
        for parameter in (student.logit_scale, *alignment.parameters()):
            unused = unused + 0.0 * parameter.float().sum()
        return {name: value + unused for name, value in found.items()}

    def _record(self, terms: Mapping[str, torch.Tensor], *, training: bool) -> None:
        if not self._checked:
            self._checked = True
            bad = [name for name, value in terms.items() if not bool(torch.isfinite(value))]
            if bad:
                raise ShardwrightError(
                    f"loss: {', '.join(bad)} is not a number; check the teacher's weights and inputs"
                )
        if training:
            self._batches += 1
            for name, value in terms.items():
                self._sums[name] = self._sums.get(name, 0.0) + value.detach()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the mean of each term since the last log."""
        if "loss" in logs and self._batches:
            logs = logs | {f"{name}_loss": float(value) / self._batches for name, value in self._sums.items()}
            self._sums, self._batches = {}, 0
        super().log(logs, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        whole = self.model.state_dict() if state_dict is None else state_dict
        super()._save(output_dir, {name: value for name, value in whole.items() if ALIGNMENT not in name})
        save_projectors(whole, ALIGNMENT, output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_projectors(getattr(self.model, ALIGNMENT), resume_from_checkpoint)


def _check(student: Any, teacher: Any, arguments: Any, given: Mapping[str, Any]) -> None:
    faults = []
    if given.get("compute_loss_func") is not None:
        rule = "would not be called: the terms of `distillation` are the loss"
        faults.append(Fault(where="compute_loss_func", rule=rule, fix="use the Trainer"))
    if arguments is not None and arguments.n_gpu > 1:
        rule = "one process drives several accelerators (DataParallel), and gathers no negatives"
        faults.append(Fault(where="n_gpu", value=arguments.n_gpu, rule=rule, fix="start with accelerate launch"))
    for side, model in (("model", student), ("teacher", teacher)):
        if model is None:
            faults.append(Fault(where=side, rule="is needed"))
        elif not hasattr(model, "logit_scale") or not hasattr(model.config, "projection_dim"):
            rule = "is no dual encoder: it needs `logit_scale` and `config.projection_dim`"
            faults.append(Fault(where=side, value=type(model).__name__, rule=rule, fix="use DistillationTrainer"))
    if faults:
        raise UsageError(faults)
