"""`qat` on every rank: the Trainer that rounds the model, its evaluations, and its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ....plugins.transformers.sound_model import refuse_nonfinite_weights
from ...parallel.trainer_for import planned_parallelism
from ...runs.ranks import (
    RankContext,
    TrainingTask,
    held_out_cross_entropy,
    loaded_second_model,
    logged,
    read_logged,
    result_fields,
    trained_model,
)
from ...verify import PROBE_ROWS, PROBE_TOKENS
from ..rounding.config import QATOptions
from .settings import QATJob, teacher_distance_config

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    from ..rounding.attach import Attachment

DENSE, ROUNDED = "dense_cross_entropy", "rounded_cross_entropy"
"""Entries of the Trainer's log, which checkpoints contain, so that a resumed run reads those of its first part."""


class QATTask(QATJob, TrainingTask):
    """Quantization-aware training of a model."""

    def build(self, context: RankContext) -> Any:
        """Create a Trainer that rounds the model, and evaluates it before the first step."""
        from ..callback import QATCallback

        model = trained_model(self.model, self.settings, context, reads_weights=True)
        options = {name: getattr(self.settings, name) for name in QATOptions.model_fields}
        callback = QATCallback(stored_dtype=self.stored_dtype, **options)
        common = context.trainer_arguments() | {"callbacks": [callback]}
        if self.teacher is not None:
            from ...distillation.trainer import DistillationTrainer

            common |= {
                "trainer_class": DistillationTrainer,
                "teacher": loaded_second_model("teacher", self.teacher, self.teacher_revision, self, context),
                "teacher_placement": self.placements["teacher"],
                "distillation": teacher_distance_config(self.settings, self.vocab_size),
            }
        trainer = planned_parallelism(context.plan).make_trainer(model=model, **common)
        trainer.add_callback(_starting_point_callback(trainer))
        return trainer

    def metrics(self, trainer: Any, context: RankContext) -> dict[str, Any]:
        """Evaluate, write the checkpoint, and return cross-entropies and differences of the checkpoint."""
        from ..callback import QATCallback

        refuse_nonfinite_weights(trainer.model, what="the trained model", allowed=self.settings.allow_nonfinite)
        trained, held_out = held_out_cross_entropy(trainer), context.samples[1]
        probe = [
            list(sample["input_ids"][:PROBE_TOKENS])
            for sample in held_out.select(range(min(PROBE_ROWS, len(held_out))))
        ]
        callbacks = trainer.callback_handler.callbacks
        callback = next(callback for callback in callbacks if isinstance(callback, QATCallback))
        exported = callback.export(
            trainer,
            self.output_dir,
            tokenizer=context.tokenizer,
            source=self.source_directory,
            probe=probe,
            force=True,
        )
        dense, rounded = read_logged(trainer.state, DENSE), read_logged(trainer.state, ROUNDED)
        return {
            **result_fields({"dense": dense, "rounded": rounded, "trained": trained}),
            "weight_difference": exported.largest_weight_difference,
            "logit_difference": exported.largest_logit_difference,
        }


def _starting_point_callback(trainer: Trainer) -> TrainerCallback:
    """Return a callback that evaluates the model before its first step, in full precision and rounded.

    It must come after `QATCallback`. With ranges that are observed during training there is no rounded evaluation.
    """
    from transformers import TrainerCallback

    from ..rounding.attach import attachment_of

    class StartingPoint(TrainerCallback):
        def on_train_begin(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
        ) -> None:
            if state.global_step:
                return
            attachment = attachment_of(trainer.model)
            assert attachment is not None, "QATCallback came first"
            with _evaluated(attachment, rounded=False):
                entries = logged(DENSE, held_out_cross_entropy(trainer))
            if not attachment.ranges:
                with _evaluated(attachment, rounded=True):
                    entries |= logged(ROUNDED, held_out_cross_entropy(trainer))
            trainer.log(entries)

    return StartingPoint()


@contextmanager
def _evaluated(attachment: Attachment, *, rounded: bool) -> Iterator[None]:
    """Compute in full precision, or as if the model were quantized now, by rounding to nearest."""
    state = attachment.state
    enabled, rule = state.enabled, state.rule
    state.enabled, state.rule = rounded, "minmax" if rule == "learned" else rule
    try:
        yield
    finally:
        state.enabled, state.rule = enabled, rule
