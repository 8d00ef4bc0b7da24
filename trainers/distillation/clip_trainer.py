"""`CLIPDistillationTrainer`: train a dual encoder of images and texts against a larger one.

The losses compare L2-normalised embeddings [B, D] of the batch of all ranks, where row i of images belongs to row i of
texts. Formulas after CLIP-KD (arXiv 2307.12732), in fp32 for any dtype, under autocast too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from transformers import PreTrainedModel, Trainer, TrainingArguments

from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ...plugins.launching.messages import note_on_first_rank
from ..losses.fused_loss import accepted_inputs, replaced_forward
from .feature_matching import load_projectors, projectors, save_projectors


def task_loss(images_BD: torch.Tensor, texts_BD: torch.Tensor, log_scale: torch.Tensor) -> torch.Tensor:
    """Return ``½ (CE(image → text) + CE(text → image))`` of similarities scaled by ``exp(log_scale)``."""
    similarities_BB = _similarities(images_BD, texts_BD, log_scale)
    pairs = torch.arange(len(similarities_BB), device=similarities_BB.device)
    return 0.5 * (functional.cross_entropy(similarities_BB, pairs) + functional.cross_entropy(similarities_BB.T, pairs))


def interactive_loss(
    student_images_BD: torch.Tensor,
    student_texts_BD: torch.Tensor,
    teacher_images_BD: torch.Tensor,
    teacher_texts_BD: torch.Tensor,
    log_scale: torch.Tensor,
) -> torch.Tensor:
    """Return ``½ (CE(student image → teacher text) + CE(student text → teacher image))``, with a separate scale.

    The scale is learned as a logarithm, because a plain factor could reach 0.
    """
    pairs = torch.arange(len(student_images_BD), device=student_images_BD.device)
    to_text = functional.cross_entropy(_similarities(student_images_BD, teacher_texts_BD.detach(), log_scale), pairs)
    to_image = functional.cross_entropy(_similarities(student_texts_BD, teacher_images_BD.detach(), log_scale), pairs)
    return 0.5 * (to_text + to_image)


def feature_loss(student_BD: torch.Tensor, teacher_BD: torch.Tensor) -> torch.Tensor:
    """Return ``|student - teacher|²``, the mean over rows; 0 to 4 for normalised embeddings."""
    return (student_BD.float() - teacher_BD.detach().float()).square().sum(dim=-1).mean()


def gather_rows(local_bD: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, [B, D], in the order of ranks; every rank must have the same number.

    The backward pass adds the gradients of all ranks' losses for this rank's rows. Every rank computes the loss of the
    full batch, so an engine that then averages the ranks' gradients gives exactly the gradient of one process.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return local_bD
    from torch.distributed.nn.functional import all_gather

    return torch.cat(all_gather(local_bD))


def _similarities(rows_BD: torch.Tensor, columns_BD: torch.Tensor, log_scale: torch.Tensor) -> torch.Tensor:
    with torch.autocast(rows_BD.device.type, enabled=False):
        return log_scale.float().exp() * rows_BD.float() @ columns_BD.float().T


ALIGNMENT = "distillation_alignment"
INITIAL_LOG_SCALE = math.log(1 / 0.07)
"""Initial scale of CLIP (arXiv 2103.00020)."""


@dataclass(frozen=True, kw_only=True)
class ClipDistillationConfig:
    """``task · L_task + interactive · L_ICL + features · L_FD``."""

    task: float = 1.0
    """Weight of `task_loss`, the student's contrastive loss."""
    interactive: float = 1.0
    """Weight of `interactive_loss`, the contrastive loss against the teacher's embeddings."""
    features: float = 8.0
    """Weight of `feature_loss`; corresponds to 2000 in CLIP-KD, which takes the mean over 512 elements."""

    def __post_init__(self) -> None:
        """Raise a `UsageError` with all errors."""
        errors = [
            ConfigError(where=field.name, value=getattr(self, field.name), rule="must be at least 0")
            for field in fields(self)
            if not 0 <= getattr(self, field.name) < math.inf
        ]
        if not any((self.task, self.interactive, self.features)):
            errors.append(ConfigError(where="weights", rule="at least one must be above 0"))
        if errors:
            raise UsageError(errors)


class Alignment(torch.nn.Module):
    """Projectors to the teacher's width, if widths differ, and the scale of `interactive_loss`."""

    def __init__(self, student_width: int, teacher_width: int) -> None:
        super().__init__()
        self.log_scale = torch.nn.Parameter(torch.tensor(INITIAL_LOG_SCALE))
        joins = student_width != teacher_width
        self.image, self.text = (
            projectors(student_width, teacher_width, 2) if joins else (torch.nn.Identity(), torch.nn.Identity())
        )

    def forward(self, images_bD: torch.Tensor, texts_bD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both embeddings with the teacher's width, normalised, in fp32."""
        images, texts = self.image(images_bD).float(), self.text(texts_bD).float()
        return functional.normalize(images, dim=-1), functional.normalize(texts, dim=-1)


class CLIPDistillationTrainer(Trainer):
    """Train a model with `image_embeds`, `text_embeds` and a `logit_scale`, like CLIP, against a larger one.

    Negatives come from all ranks, and gradients equal those of one process with the full batch. Contrastive losses are
    not sums over samples: with gradient accumulation each micro-batch has its own negatives, as in any CLIP training,
    and the mean of their losses is not the loss of the full batch.

    Raises:
        UsageError: a model is not a dual encoder, or an argument would have no effect; all errors together.
    """

    def __init__(
        self,
        model: PreTrainedModel | None = None,
        args: TrainingArguments | None = None,
        *,
        teacher: PreTrainedModel | None = None,
        distillation: ClipDistillationConfig | None = None,
        **kwargs: Any,
    ) -> None:
        self.distillation = distillation or ClipDistillationConfig()
        errors = []
        if kwargs.get("compute_loss_func") is not None:
            rule = "would not be called: the terms of `distillation` are the loss"
            errors.append(ConfigError(where="compute_loss_func", rule=rule, fix="use the Trainer"))
        if args is not None and args.n_gpu > 1:
            rule = "one process drives several accelerators (DataParallel), which does not gather negatives"
            errors.append(ConfigError(where="n_gpu", value=args.n_gpu, rule=rule, fix="start with accelerate launch"))
        for side, encoder in (("model", model), ("teacher", teacher)):
            if encoder is None:
                errors.append(ConfigError(where=side, rule="is required"))
            elif not hasattr(encoder, "logit_scale") or not hasattr(encoder.config, "projection_dim"):
                rule = "must be a dual encoder with `logit_scale` and `config.projection_dim`"
                value, fix = type(encoder).__name__, "use DistillationTrainer"
                errors.append(ConfigError(where=side, value=value, rule=rule, fix=fix))
        if errors:
            raise UsageError(errors)
        assert model is not None and teacher is not None, "checked above"
        alignment = Alignment(model.config.projection_dim, teacher.config.projection_dim)
        model.add_module(ALIGNMENT, alignment)
        super().__init__(model=model, args=args, **kwargs)
        # An evaluation without labels computes a loss too.
        self.can_return_loss, self.model_accepts_loss_kwargs = True, False
        self.teacher = teacher.requires_grad_(False).eval().to(self.args.device)
        self._sums: dict[str, torch.Tensor] = {}
        self._batches, self._checked = 0, False
        if self.args.gradient_accumulation_steps > 1:
            note_on_first_rank("with gradient accumulation, negatives come from one micro-batch of all ranks at a time")

    def compute_loss(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the weighted sum of all terms over the batch of all ranks."""
        inputs = {name: value for name, value in inputs.items() if name != "return_loss"}
        with torch.no_grad():
            taught = self.teacher(**accepted_inputs(self.teacher, inputs))
        inner = self.accelerator.unwrap_model(model)
        terms: dict[str, torch.Tensor] = {}

        def forward(original: Callable[..., Any], *args: Any, **named: Any) -> dict[str, torch.Tensor]:
            outputs, alignment = original(*args, **named), getattr(inner, ALIGNMENT)
            images, texts = (gather_rows(value.float()) for value in (outputs.image_embeds, outputs.text_embeds))
            with torch.no_grad():
                taught_images, taught_texts = (
                    gather_rows(value.float()) for value in (taught.image_embeds, taught.text_embeds)
                )
            joined = alignment(outputs.image_embeds, outputs.text_embeds)
            joined_images, joined_texts = (gather_rows(value) for value in joined)
            every: dict[str, Callable[[], torch.Tensor]] = {
                "task": lambda: task_loss(images, texts, inner.logit_scale),
                "interactive": lambda: interactive_loss(
                    joined_images, joined_texts, taught_images, taught_texts, alignment.log_scale
                ),
                "features": lambda: (
                    0.5 * (feature_loss(joined_images, taught_images) + feature_loss(joined_texts, taught_texts))
                ),
            }
            # DDP waits for the gradient of every parameter, including those of terms without a weight.
            unused: Any = 0.0
            for parameter in (inner.logit_scale, *alignment.parameters()):
                unused = unused + 0.0 * parameter.float().sum()
            terms.update(
                {name: term() + unused for name, term in every.items() if getattr(self.distillation, name) > 0}
            )
            loss = torch.stack([getattr(self.distillation, name) * value for name, value in terms.items()]).sum()
            return {"loss": loss, "logits_per_image": outputs.logits_per_image.detach()}

        with replaced_forward(inner, forward):
            outputs = model(**accepted_inputs(inner, inputs))
        if not self._checked:
            self._checked = True
            bad = [name for name, value in terms.items() if not bool(torch.isfinite(value))]
            if bad:
                raise ShardwrightError(
                    f"loss: {', '.join(bad)} is NaN or infinite; check the teacher's weights and inputs"
                )
        if inner.training:
            self._batches += 1
            for name, value in terms.items():
                self._sums[name] = self._sums.get(name, 0.0) + value.detach()
        loss = outputs["loss"]
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the mean of each term since the last log."""
        if "loss" in logs and self._batches:
            logs = logs | {f"{name}_loss": float(value) / self._batches for name, value in self._sums.items()}
            self._sums, self._batches = {}, 0
        super().log(logs, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        tensors = self.model.state_dict() if state_dict is None else state_dict
        super()._save(output_dir, {name: value for name, value in tensors.items() if ALIGNMENT not in name})
        # Transformers 5.23 calls this method on every rank.
        if self.args.should_save:
            save_projectors(tensors, ALIGNMENT, output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_projectors(getattr(self.model, ALIGNMENT), resume_from_checkpoint)
