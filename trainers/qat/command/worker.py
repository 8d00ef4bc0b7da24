"""Runs on every rank of `shardwright qat`: trains with the numbers of the checkpoint, and exports it.

accelerate launch --config_file plan/accelerate.yaml -m shardwright.trainers.qat.command.worker job.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....plugins.transformers.finite_weights import refuse_nonfinite_weights
from ...evaluation.estimates import Estimate
from ...parallel.trainer_for import PlannedParallelism
from ...runs.held_out import held_out_cross_entropy, result_fields
from ...runs.ranks import (
    collator,
    end_rank,
    placed_teacher,
    rank_arguments,
    read_samples,
    run_rank,
    step_facts,
    train_recorded,
    trained_model,
)
from ...runs.settings import TOKENIZER
from ..held_out import starting_point, starting_point_callback
from .request import RANGES_FILE, QATJob, callback_options, qat_config, teacher_distance_config

_PROBE_TOKENS, _PROBE_SAMPLES = 128, 4


def train_quantized(job: QATJob, work: Path) -> None:
    """Build everything in the order that ZeRO-3 needs (arguments before weights), train, evaluate and export."""
    from transformers import AutoTokenizer

    from ..callback import QATCallback

    arguments, engine, resumed = rank_arguments(job)
    tokenizer = AutoTokenizer.from_pretrained(str(work / TOKENIZER), trust_remote_code=False)
    model = trained_model(job.model, job.settings, arguments, engine)
    config = qat_config(job.settings, stored_dtype=job.stored_dtype)
    calibration = str(work / RANGES_FILE) if job.calibrated else None
    callback = QATCallback(calibration=calibration, **callback_options(config))
    samples = read_samples(work)
    trainer = _trainer(job, arguments, engine, tokenizer, model=model, callback=callback, samples=samples)
    trainer.add_callback(starting_point_callback(trainer))
    recorder = train_recorded(trainer, job, resumed, evaluates_last=False)
    refuse_nonfinite_weights(trainer.model, what="the trained model", allowed=job.settings.allow_nonfinite)
    trained = held_out_cross_entropy(trainer)
    probe = [
        list(sample["input_ids"][:_PROBE_TOKENS])
        for sample in samples[1].select(range(min(_PROBE_SAMPLES, len(samples[1]))))
    ]
    exported = callback.export(
        trainer, job.output_dir, tokenizer=tokenizer, source=job.source_directory, probe=probe, force=True
    )
    end_rank(trainer, lambda peak: _result(trainer, recorder, job, peak, trained, exported), work)


def _trainer(
    job: QATJob, arguments: Any, engine: Any, tokenizer: Any, *, model: Any, callback: Any, samples: list[Any]
) -> Any:
    common: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "train_dataset": samples[0],
        "eval_dataset": samples[1],
        "data_collator": collator(tokenizer),
        "processing_class": tokenizer,
        "callbacks": [callback],
    }
    if job.teacher is None:
        return PlannedParallelism().make_trainer(**common)
    from ...distillation.trainer import DistillationTrainer

    return PlannedParallelism().make_trainer(
        trainer_class=DistillationTrainer,
        teacher=placed_teacher(job.teacher, job.teacher_revision, job, arguments, engine),
        teacher_placement=job.placement,
        distillation=teacher_distance_config(job.settings, job.vocab_size),
        **common,
    )


def _result(
    trainer: Any, recorder: Any, job: QATJob, peak: int | None, trained: Estimate, exported: Any
) -> dict[str, Any]:
    dense, rounded = starting_point(trainer.state)
    return {
        **result_fields({"dense": dense, "rounded": rounded, "trained": trained}),
        "weight_difference": exported.largest_weight_difference,
        "logit_difference": exported.largest_logit_difference,
        "peak_bytes": peak,
    } | step_facts(trainer, recorder, job)


if __name__ == "__main__":
    run_rank(QATJob, train_quantized)
