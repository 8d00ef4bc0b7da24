"""Runs on every rank of `shardwright distill`: teaches the student, evaluates it before and after, and saves it.

    accelerate launch --config_file plan/accelerate.yaml -m shardwright.trainers.distillation.worker --settings job.json

Seen with transformers 5.17.0: before training, `Trainer.evaluate` under DeepSpeed starts an inference engine, which
needs ZeRO-3; the student is therefore evaluated inside `train`, once everything is wrapped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...ds_configs.errors import ShardwrightError
from ...plugins.accelerate import configure_cpu_ranks
from ...plugins.deepspeed import prepare_nvme_offload
from ...plugins.peft import add_lora
from ...plugins.transformers import (
    prepare_model_directory_save,
    refuse_replaced_optimizer,
    save_model_directory,
    training_arguments,
    warn_of_zero0_in_16_bit,
    weights_dtype,
)
from ..datasets.samples import collate
from ..train_causal_lm import chosen_engine, load_config, load_model
from .run_files import (
    EVALUATION_SAMPLES,
    METRICS_FILE,
    RESULT_FILE,
    TEACHER_TOKENIZER,
    TOKENIZER,
    TRAIN_SAMPLES,
    WorkerJob,
    distillation_config,
    model_flags,
)

PROGRESS = "shardwright-distill: "
"""Begins a line of rank 0 that tells how far it is, as JSON."""
FAILURE = "failure-rank"


def teach(job: WorkerJob, work: Path) -> None:
    """Build everything in the order that ZeRO-3 needs (arguments before weights), train, evaluate and save."""
    from transformers import AutoTokenizer

    settings = job.training_arguments
    engine = chosen_engine(settings)
    arguments = training_arguments(settings, configure_cpu_ranks(engine))
    if arguments.world_size != job.world_size:
        raise ShardwrightError(f"{arguments.world_size} ranks came up, the plan has {job.world_size}")
    refuse_replaced_optimizer(arguments)
    warn_of_zero0_in_16_bit(arguments)
    prepare_nvme_offload(arguments)
    prepare_model_directory_save(arguments)
    tokenizer = AutoTokenizer.from_pretrained(str(work / TOKENIZER), trust_remote_code=False)
    student = _student(job, arguments, engine)
    trainer = _trainer(job, work, arguments, student, _teacher(job, arguments, engine), tokenizer)
    recorder = _recorder(trainer, Path(job.output_dir))
    trainer.add_callback(recorder)
    trainer.train(resume_from_checkpoint=_last_checkpoint(arguments) if job.resume else None)
    save_model_directory(trainer, job.output_dir)
    peak = _peak_bytes(trainer)
    if arguments.process_index == 0:
        _write_json(_result(trainer, recorder, peak, job), work / RESULT_FILE)
        _remove_if_empty(Path(arguments.output_dir))
    # A rank that exits while others still communicate makes gloo abort them.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def _student(job: WorkerJob, arguments: Any, engine: str) -> Any:
    settings = job.settings
    flags = model_flags(job.student, settings.revision, settings.method)
    dtype = weights_dtype(arguments, method=settings.method)
    model = load_model(flags, load_config(flags), dtype, arguments.seed)
    if settings.method == "lora":
        fp32 = engine != "deepspeed"
        model = add_lora(model, rank=settings.lora_rank, targets=settings.lora_targets, fp32_adapters=fp32)
    return model


def _teacher(job: WorkerJob, arguments: Any, engine: Any) -> Any:
    import torch

    if job.settings.teacher_cache is not None:
        from .teacher_cache import TeacherCache

        return TeacherCache.open(job.settings.teacher_cache)
    from ...plugins.teacher_placement import load_teacher

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(arguments.mixed_precision, torch.float32)
    return load_teacher(
        job.teacher,
        revision=job.settings.teacher_revision,
        placement=job.placement,
        dtype=dtype,
        engine=engine if job.world_size > 1 else "single",
    )


def _trainer(job: WorkerJob, work: Path, arguments: Any, student: Any, teacher: Any, tokenizer: Any) -> Any:
    from datasets import load_from_disk

    from .trainer import DistillationTrainer

    samples = [load_from_disk(str(work / name)) for name in (TRAIN_SAMPLES, EVALUATION_SAMPLES)]
    if job.settings.teacher_cache is not None:
        from .teacher_cache import CachedTeacherDataset

        samples = [CachedTeacherDataset(side, teacher) for side in samples]
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return DistillationTrainer(
        model=student,
        teacher=teacher,
        teacher_placement=job.placement,
        distillation=distillation_config(job.settings, job.vocab_size),
        args=arguments,
        train_dataset=samples[0],
        eval_dataset=samples[1],
        data_collator=partial(collate, pad_token_id=pad or 0),
        processing_class=tokenizer,
        teacher_tokenizer=_teacher_tokenizer(job, work),
    )


def _teacher_tokenizer(job: WorkerJob, work: Path) -> Any:
    if not job.settings.cross_tokenizer:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(work / TEACHER_TOKENIZER), trust_remote_code=False)


def _last_checkpoint(arguments: Any) -> str | None:
    from transformers.trainer_utils import get_last_checkpoint

    found: str | None = get_last_checkpoint(arguments.output_dir)
    return found


def _recorder(trainer: Any, output_dir: Path) -> Any:
    """Return a callback that writes `metrics.jsonl`, tells how far training is, and evaluates at its end."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        seconds = 0.0
        first_step = 0
        _step_began = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.first_step = state.global_step
            self._write(state)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._step_began = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seconds += time.monotonic() - self._step_began
            if state.is_world_process_zero:
                line = {"step": state.global_step, "steps": state.max_steps}
                print(f"\n{PROGRESS}{json.dumps(line)}", flush=True)
            if state.global_step >= state.max_steps:
                control.should_evaluate = control.should_log = True

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._write(state)

        def _write(self, state: Any) -> None:
            """Write all steps anew: a resumed run drops what was logged after its checkpoint."""
            if state.is_world_process_zero:
                steps = [entry for entry in state.log_history if "loss" in entry]
                text = "".join(f"{json.dumps(entry)}\n" for entry in steps)
                (output_dir / METRICS_FILE).write_text(text, encoding="utf-8")

    return Recorder()


def _peak_bytes(trainer: Any) -> int | None:
    """Return the largest allocation on any accelerator; `None` on CPU ranks. Every rank must call it."""
    import torch

    if trainer.args.device.type != "cuda":
        return None
    own = torch.tensor([torch.cuda.max_memory_allocated()], device=trainer.args.device)
    return int(trainer.accelerator.gather(own).max())


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _result(trainer: Any, recorder: Any, peak: int | None, job: WorkerJob) -> dict[str, Any]:
    state = trainer.state

    def tokens(steps: int) -> int:
        return trained_tokens(trainer.args, steps, job.train_samples, job.train_tokens)

    evaluations = [
        {name.removeprefix("eval_"): value for name, value in entry.items() if name.startswith("eval_")}
        for entry in state.log_history
        if any(name.startswith("eval_") for name in entry)
    ]
    return {
        "before": evaluations[0],
        "after": evaluations[-1],
        "steps": state.global_step,
        "step_seconds": recorder.seconds,
        "tokens": tokens(state.global_step),
        "timed_tokens": tokens(state.global_step) - tokens(recorder.first_step),
        "peak_bytes": peak,
    }


def trained_tokens(arguments: Any, steps: int, samples: int, tokens: int) -> int:
    """Return the tokens of some optimizer steps; an epoch ends with a step of the samples that are left."""
    at_once: int = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    epochs, further = divmod(steps, -(-samples // at_once))
    return epochs * tokens + round(tokens * further * at_once / samples)


def _write_json(record: Mapping[str, Any], path: Path) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(record), encoding="utf-8")
    temporary.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; a failure is written beside the settings, where the process that launched it looks."""
    parser = argparse.ArgumentParser(prog="python -m shardwright.trainers.distillation.worker", allow_abbrev=False)
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE.json")
    file = parser.parse_args(argv).settings
    rank = os.environ.get("RANK", "0")
    try:
        teach(WorkerJob.model_validate_json(file.read_text(encoding="utf-8")), file.parent)
    except Exception as error:
        known = isinstance(error, ShardwrightError)
        failure = {
            "rank": int(rank),
            "time": time.time(),
            "known": known,
            "message": str(error) if known else f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
            "exit_code": error.exit_code if isinstance(error, ShardwrightError) else 1,
        }
        _write_json(failure, file.parent / f"{FAILURE}{rank}.json")
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
