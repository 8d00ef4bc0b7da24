"""Jobs of the ranks of `shardwright train` whose `TrainingArguments` a test chooses, and the losses of their steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PLAIN = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}


def train_job(
    words: Sequence[object], work: Path, arguments: Mapping[str, Any] | None = None, *, ranks: int | None = None
) -> Path:
    """Write what the ranks of `shardwright train WORDS` read into a directory, and return the file of their job.

    `arguments` replace all keys of `TrainingArguments`, such as those of another engine than the plan's; checkpoints
    then go to the output directory. `ranks` is for other ranks than those of the plan.
    """
    from shardwright.cli.main import build_app
    from shardwright.cli.settings import resolve
    from shardwright.trainers.runs.run import rank_inputs, rank_words
    from shardwright.trainers.runs.settings import JOB_FILE, RunRequest
    from shardwright.trainers.training.task import prepare_train

    _, bound = resolve(build_app(), ["train", *map(str, words)])
    options = bound.arguments["options"]
    # The command would look for checkpoints in their own directory.
    request = RunRequest(output_dir=options.output_dir, force=True)
    prepared = prepare_train(bound.arguments["settings"], bound.arguments["model"], request)
    work.mkdir(parents=True)
    job = rank_inputs(prepared, work)
    changes: dict[str, Any] = {"world_size": ranks or job.world_size, "or_anew": options.resume_or_anew}
    changes["resume"] = options.resume or options.resume_or_anew
    if arguments is not None:
        changes["training_arguments"] = PLAIN | {"output_dir": str(options.output_dir)} | dict(arguments)
    rank_words(job.model_copy(update=changes), work)
    return work / JOB_FILE


def step_losses(trainer: Any) -> Any:
    """Return a recorder of the loss of every optimizer step, which the log averages over ``logging_steps``."""
    import torch
    from shardwright.trainers.exact import StepEvents, make_exact
    from transformers import TrainerCallback

    class StepLosses(StepEvents, TrainerCallback):
        def __init__(self, trainer: Any) -> None:
            self._trainer = make_exact(trainer)
            self._losses: list[Any] = []
            self._accumulated: Any = 0.0
            trainer.add_callback(self)

        def on_loss(self, loss: Any) -> None:
            self._accumulated = self._accumulated + loss.detach().float()
            if self._trainer.accelerator.sync_gradients:
                self._losses.append(self._accumulated)
                self._accumulated = 0.0

        def mean_over_ranks(self) -> list[float]:
            """Return one loss per optimizer step, in order; every rank must call it."""
            if not self._losses:
                return []
            losses: list[float] = self._trainer.accelerator.reduce(torch.stack(self._losses), "mean").tolist()
            return losses

    return StepLosses(trainer)


@contextmanager
def recorded_losses(file: Path) -> Iterator[None]:
    """Write engine, number of ranks and the loss of every step that a training inside the block takes."""
    from shardwright.trainers.runs import ranks

    train_guarded = ranks.train_guarded

    def recording(trainer: Any, **settings: Any) -> None:
        recorder = step_losses(trainer)
        train_guarded(trainer, **settings)
        losses, args = recorder.mean_over_ranks(), trainer.args
        if args.process_index == 0:
            engine = ranks.chosen_engine({"deepspeed": args.deepspeed, "fsdp": args.fsdp})
            file.write_text(json.dumps({"engine": engine, "world_size": args.world_size, "losses": losses}))

    ranks.train_guarded = recording
    try:
        yield
    finally:
        ranks.train_guarded = train_guarded
