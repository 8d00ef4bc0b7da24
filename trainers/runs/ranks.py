"""Work of every rank of a launched training: arguments, model, records of the steps, and how it ends."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.write import write_files
from ...ds_configs.specs.errors import ShardwrightError
from ...plugins.accelerate.cpu_ranks import Engine, configure_cpu_ranks
from ...plugins.deepspeed.engine import prepare_nvme_offload
from ...plugins.launching.elastic import recorded
from ...plugins.peft.lora import add_lora
from ...plugins.transformers.training_arguments import (
    refuse_replaced_optimizer,
    training_arguments,
    warn_of_zero0_in_16_bit,
    weights_dtype,
)
from ..checkpoints.agreement import on_first_rank
from ..checkpoints.selection import Selection
from ..data.models import StartingModel, load_config, load_model
from ..data.samples import collate
from ..guards.hang import watched
from ..replicas.share import Share
from .checkpoints import whole_checkpoint
from .guarded import train_guarded
from .progress import PROGRESS
from .settings import (
    EVALUATION_SAMPLES,
    METRICS_FILE,
    PLAN_DIRECTORY,
    RESULT_FILE,
    TRAIN_SAMPLES,
    LaunchedJob,
    LaunchedSettings,
    RankJob,
)
from .steps import chosen_engine

Job = TypeVar("Job", bound=RankJob)


def rank_arguments(job: LaunchedJob) -> tuple[Any, Engine, Selection | None]:
    """Return the training arguments of this rank, its engine, and the whole checkpoint that it goes on from.

    ZeRO-3 needs the arguments before any weight is made; their `resume_from_checkpoint` is the checkpoint's directory.

    Raises:
        ShardwrightError: other ranks came up than were planned.
        UsageError: arguments that contradict the host or one another, or machines with other data or settings.
    """
    settings = job.training_arguments
    engine = chosen_engine(settings)
    arguments = training_arguments(settings, configure_cpu_ranks(engine))
    if arguments.world_size != job.world_size:
        raise ShardwrightError(f"{arguments.world_size} ranks came up, the plan has {job.world_size}")
    if job.digests:
        Share(rank=arguments.process_index, ranks=arguments.world_size).check_same(job.digests)
    refuse_replaced_optimizer(arguments)
    warn_of_zero0_in_16_bit(arguments)
    prepare_nvme_offload(arguments)
    resumed = on_first_rank(lambda: whole_checkpoint(Path(job.output_dir))) if job.resume else None
    arguments.resume_from_checkpoint = None if resumed is None else str(resumed.path)
    return arguments, engine, resumed


def trained_model(
    name: str, settings: LaunchedSettings, arguments: Any, engine: Engine, *, for_stages: bool = False
) -> Any:
    """Return the model that is trained, with adapters in it where the method has them.

    `for_stages` is for a pipeline, whose ranks read their own stage alone.
    """
    source = StartingModel(model=name, revision=settings.revision, method=settings.method)
    dtype = weights_dtype(arguments, method=settings.method)
    model = load_model(source, load_config(source), dtype, arguments.seed, engine=engine, for_stages=for_stages)
    if settings.method != "full":
        fp32 = engine != "deepspeed"
        model = add_lora(model, rank=settings.lora_rank, targets=settings.lora_targets, fp32_adapters=fp32)
    return model


def placed_teacher(name: str, revision: str | None, job: LaunchedJob, arguments: Any, engine: Any) -> Any:
    """Return a frozen teacher where the plan wants it, in the type that is computed with."""
    import torch

    from ...plugins.transformers.teacher_placement import load_teacher

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(arguments.mixed_precision, torch.float32)
    return load_teacher(
        name,
        revision=revision,
        placement=job.placement,
        dtype=dtype,
        engine=engine if job.world_size > 1 else "single",
    )


def read_samples(work: Path) -> list[Any]:
    """Return the samples to train on and those that are held out."""
    from datasets import load_from_disk

    return [load_from_disk(str(work / name)) for name in (TRAIN_SAMPLES, EVALUATION_SAMPLES)]


def collator(tokenizer: Any) -> Callable[..., Any]:
    """Return what makes batches of samples."""
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return partial(collate, pad_token_id=pad or 0)


def progress_callback(
    tokens_of: Callable[[int], int] | None = None, figures_of: Callable[[], Mapping[str, float]] = dict
) -> Any:
    """Return a callback that tells the process which launched the ranks of every optimizer step.

    Args:
        tokens_of: Returns the tokens of so many steps of the training; without it no speed is told.
        figures_of: Returns further figures by name, those of the last logged step.
    """
    from transformers import TrainerCallback

    class ProgressTeller(TrainerCallback):
        began: tuple[int, float] | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # The first step compiles and allocates: its time is not the pace of the others.
            if self.began is None and state.global_step > 0:
                self.began = state.global_step, time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                line = {"step": state.global_step, "steps": state.max_steps, **self._figures(state)}
                print(f"\n{PROGRESS}{json.dumps(line)}", flush=True)

        def _figures(self, state: Any) -> dict[str, float]:
            logged = [float(entry["loss"]) for entry in state.log_history[-4:] if "loss" in entry]
            found = {**figures_of(), **({"loss": logged[-1]} if logged else {})}
            # That of the last logged steps alone jumps about, and is told by the log.
            found.pop("tokens_per_second", None)
            if self.began is not None and tokens_of is not None:
                step, since = self.began
                seconds = time.monotonic() - since
                found["tokens_per_second"] = (tokens_of(state.global_step) - tokens_of(step)) / seconds
            return found

    return ProgressTeller()


def step_recorder(output_dir: Path, *, evaluates_last: bool) -> Any:
    """Return a callback that writes `metrics.jsonl`, takes the time of steps, and may evaluate after the last."""
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
            if state.global_step >= state.max_steps:
                control.should_log = True
                control.should_evaluate = control.should_evaluate or evaluates_last

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._write(state)

        def _write(self, state: Any) -> None:
            """Write all steps anew: a resumed run drops what was logged after its checkpoint."""
            if state.is_world_process_zero:
                steps = [entry for entry in state.log_history if "loss" in entry]
                text = "".join(f"{json.dumps(entry)}\n" for entry in steps)
                write_files({METRICS_FILE: text}, output_dir, force=True)

    return Recorder()


def train_recorded(trainer: Any, job: LaunchedJob, resumed: Selection | None, *, evaluates_last: bool) -> Any:
    """Train from the checkpoint of `rank_arguments`, or from step 0, and return the recorder of the steps."""
    from .figures_callback import StepFiguresCallback

    recorder = step_recorder(Path(job.output_dir), evaluates_last=evaluates_last)
    trainer.add_callback(recorder)
    tokens_of = _tokens_of(trainer, job)
    figures = StepFiguresCallback(Plan.load(Path(job.output_dir) / PLAN_DIRECTORY), tokens_of)
    # Behind the recorder, which has the last step logged.
    figures.attach(trainer)
    trainer.add_callback(progress_callback(tokens_of, lambda: figures.figures))
    train_guarded(trainer, resume=resumed, **job.settings.guards())
    return recorder


def end_rank(trainer: Any, result: Callable[[int | None], Mapping[str, Any]], work: Path) -> None:
    """Leave the result, and wait: a rank that exits while others still communicate makes gloo abort them."""
    arguments = trainer.args
    peak = _peak_bytes(trainer)
    if arguments.process_index == 0:
        write_json(result(peak), work / RESULT_FILE)
        with contextlib.suppress(OSError):
            Path(arguments.output_dir).rmdir()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def _peak_bytes(trainer: Any) -> int | None:
    """Return the largest allocation on any accelerator; `None` on CPU ranks. Every rank must call it."""
    import torch

    if trainer.args.device.type != "cuda":
        return None
    own = torch.tensor([torch.cuda.max_memory_allocated()], device=trainer.args.device)
    return int(trainer.accelerator.gather(own).max())


def step_facts(trainer: Any, recorder: Any, job: LaunchedJob) -> dict[str, Any]:
    """Return steps, their seconds and their tokens as a result states them."""
    steps, tokens = trainer.state.global_step, _tokens_of(trainer, job)
    return {
        "steps": steps,
        "step_seconds": recorder.seconds,
        "tokens": tokens(steps),
        "timed_tokens": tokens(steps) - tokens(recorder.first_step),
    }


def _tokens_of(trainer: Any, job: LaunchedJob) -> Callable[[int], int]:
    return lambda steps: trained_tokens(trainer.args, steps, job.train_samples, job.train_tokens)


def trained_tokens(arguments: Any, steps: int, samples: int, tokens: int) -> int:
    """Return the tokens of some optimizer steps; an epoch ends with a step of the samples that are left."""
    at_once: int = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    epochs, further = divmod(steps, -(-samples // at_once))
    return epochs * tokens + round(tokens * further * at_once / samples)


def write_json(record: Mapping[str, Any], path: Path) -> None:
    """Write a file that is whole or not there."""
    write_files({path.name: json.dumps(record)}, path.parent, force=True)


def run_rank(kind: type[Job], work: Callable[[Job, Path], None]) -> None:
    """Run one rank, whose command line names the file of its job; the launch hears why it fails.

    Args:
        kind: What the file holds.
        work: Does what the job says; receives the job and the directory of its file.
    """
    file = Path(sys.argv[1])

    def watched_work() -> None:
        job = kind.model_validate_json(file.read_text(encoding="utf-8"))
        with watched(job.hang_seconds):
            work(job, file.parent)

    recorded(watched_work)()
