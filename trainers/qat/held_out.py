"""The model that quantization-aware training starts from, on the held-out samples: in full precision, and rounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..evaluation.estimates import Estimate
from ..runs.held_out import held_out_cross_entropy, logged, read_logged
from .rounding.attachment import Attachment, attachment_of, fake_quantization_disabled

DENSE, ROUNDED = "dense_cross_entropy", "rounded_cross_entropy"
"""Names in the Trainer's log, which checkpoints keep: a resumed run has them from its first part."""


@contextmanager
def rounded_as_it_is(attachment: Attachment) -> Iterator[None]:
    """Let a model compute as its checkpoint would if it were quantized now, by rounding to the nearest."""
    state, quantizers = attachment.state, list(attachment.quantizers())
    before = state.enabled, state.bits, [quantizer.rule for quantizer in quantizers]
    state.enabled, state.bits = True, None
    for quantizer in quantizers:
        quantizer.rule = "minmax" if quantizer.rule == "learned" else quantizer.rule
    try:
        yield
    finally:
        state.enabled, state.bits = before[:2]
        for quantizer, rule in zip(quantizers, before[2], strict=True):
            quantizer.rule = rule


def starting_point_callback(trainer: Any) -> Any:
    """Return a callback that logs how good the model is before its first step, in full precision and rounded.

    It must come after `QATCallback`. Ranges that are found while training runs are not there yet, and then the model
    is not rounded either.
    """
    from transformers import TrainerCallback

    class StartingPoint(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step:
                return
            attachment = attachment_of(trainer.model)
            assert attachment is not None, "QATCallback came first"
            with fake_quantization_disabled(trainer.model):
                found = logged(DENSE, held_out_cross_entropy(trainer))
            if not attachment.config.observes:
                with rounded_as_it_is(attachment):
                    found |= logged(ROUNDED, held_out_cross_entropy(trainer))
            trainer.log(found)

    return StartingPoint()


def starting_point(state: Any) -> tuple[Estimate | None, Estimate | None]:
    """Return what was logged before the first step, in full precision and rounded, also where a run was resumed."""
    return read_logged(state, DENSE), read_logged(state, ROUNDED)
