"""Trainer callback for complete checkpoints: all ranks have saved, and a record lists every file.

In transformers 5.17.0 `Trainer._save_checkpoint` writes into `checkpoint-N` file by file, deletes older checkpoints
before the new one is on the disk, and `get_last_checkpoint` returns the newest directory, complete or not. `on_save`
follows immediately, on every rank. Once all ranks have written, a thread flushes the files, computes their checksums
and writes the record, while training continues. Until then the checkpoint is incomplete, and older ones are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ..ds_configs.specs.errors import ShardwrightError, UsageError
from ..plugins.deepspeed.engine import load_from_other_ranks
from ..plugins.launching.background import BackgroundTask, FirstRank
from ..plugins.launching.messages import note_on_first_rank
from ..plugins.transformers.loading import gathered
from ..plugins.transformers.training_arguments import check_first_of_its_kind
from .checkpoints import (
    Selection,
    compared,
    finished,
    flush_tree,
    flushed_records,
    named_checkpoint,
    newest_whole,
    rotate,
    run_facts,
    set_aside,
    together,
    trained_tensors,
    write_record,
)
from .exact import StepEvents, check_attached, make_exact

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


class CheckpointCallback(StepEvents, TrainerCallback):
    """Mark checkpoints of any Trainer complete, find them again, and never leave a partly deleted one.

    Attach it last, so that the record includes the files of other callbacks. When training begins, incomplete
    checkpoints are renamed, and so are those after the step that the run resumes from. `save_total_limit` keeps its
    meaning, except that at least two complete checkpoints are kept. A run that resumes after its last step trains
    nothing; `train` returns once the checkpoint is loaded. All ranks must see one output directory. The record is
    written while the next steps run, and before the next save and the end of training, however training ends. The
    first rank logs which checkpoints it skips and renames.

    >>> checkpoints = CheckpointCallback()  # doctest: +SKIP
    >>> checkpoints.attach(trainer)  # doctest: +SKIP
    >>> trainer.train(resume_from_checkpoint=checkpoints.newest())  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._trained: dict[str, object] = {}
        self._trainer: Any = None
        self._facts: dict[str, Any] | None = None
        self._limit: int | None = None
        self._finish: BackgroundTask[Callable[[], None] | None] | None = None
        self._nodes = 1
        self._is_done = False

    def attach(self, trainer: Trainer) -> None:
        """Add this callback to a Trainer, after all others.

        Raises:
            UsageError: the Trainer has such a callback already.
        """
        check_first_of_its_kind(self, trainer)
        self._trainer = trainer
        # The engine of expert parallelism renames tensors, and a run that resumes has no engine yet.
        if (model := getattr(trainer, "model", None)) is not None:
            self._trained = {"trained": trained_tensors(model)}
        make_exact(trainer).add_callback(self)

    @contextmanager
    def around_training(self) -> Iterator[None]:
        """Finish the last checkpoint when the training run ends, also by an exception."""
        try:
            yield
        finally:
            # The other ranks may have ended: finish without them.
            finish, self._finish = self._finish, None
            if finish is not None and finish.ended():
                try:
                    finish.result()
                except (OSError, ShardwrightError) as error:
                    note_on_first_rank(f"{finish.name} could not be finished: {error}")

    def around_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return no batches after the last step: the Trainer takes one more if it resumes after it in an epoch."""
        return iter(()) if self._is_done else batches

    def resolve(self, resume: str | bool | Selection | None) -> str | None:
        """Return the checkpoint to resume from; every rank must call it.

        Args:
            resume: A checkpoint; true for the newest; a selection that was made before; otherwise start at step 0.

        Raises:
            RefusedInputError: the checkpoint, or each one of the run, is incomplete.
            UsageError: it is not a directory, or the run differs in a fact that may not change.
        """
        if isinstance(resume, Selection):
            return self._resumed(lambda: resume)
        if isinstance(resume, str) and resume.lower() not in ("true", "false", ""):
            return self._resumed(lambda: named_checkpoint(Path(resume)))
        return self.newest() if str(resume).lower() == "true" else None

    def newest(self) -> str | None:
        """Return the newest complete checkpoint of the output directory; `None`, with a log line, if it has none.

        Every rank must call it.

        Raises:
            RefusedInputError: there are checkpoints, but none is complete.
            UsageError: the run differs from the one that saved the checkpoint in a fact that may not change.
        """
        output_dir = Path(self._trainer.args.output_dir)
        path = self._resumed(lambda: newest_whole(output_dir))
        if path is None:
            note_on_first_rank(f"{output_dir} has no checkpoint: training begins at step 0")
        return path

    def _resumed(self, choose: Callable[[], Selection | None]) -> str | None:
        """Select on the first rank, which reads every byte, and broadcast the path."""
        facts = self._run_facts()

        def selected() -> tuple[str | None, bool]:
            selection = choose()
            if selection is None:
                return None, False
            errors, warnings = compared(selection.record.facts, facts)
            is_done, further = finished(selection, facts, self._trainer.args.max_steps)
            if errors := errors + further:
                raise UsageError(errors)
            for line in (*(f"skipped: {skipped}" for skipped in selection.skipped), *warnings):
                note_on_first_rank(line)
            note_on_first_rank(f"resuming from {selection.path.name}")
            if is_done:
                note_on_first_rank(f"all {selection.record.step} steps are done: only the rest of the command runs")
            return str(selection.path), selection.record.facts.get("world_size") != facts["world_size"]

        with FirstRank() as ranks:
            chosen: tuple[str | None, bool] = ranks.does(selected)
        path, has_other_ranks = chosen
        if has_other_ranks and facts["engine"] == "deepspeed":
            load_from_other_ranks()
        return path

    def _run_facts(self) -> dict[str, Any]:
        if self._facts is None:
            self._facts = run_facts(self._trainer) | self._trained
        return self._facts

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Rename checkpoints that this run would overwrite, and replace the Trainer's rotation.

        Raises:
            UsageError: the callback was not attached.
        """
        check_attached(self, self._trainer)
        self._facts = None
        self._run_facts()
        self._is_done = 0 < state.max_steps <= state.global_step
        self._limit, args.save_total_limit = args.save_total_limit, None
        if args.should_save and Path(args.output_dir).is_dir():
            set_aside(Path(args.output_dir), after_step=state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Start a thread that flushes the checkpoint and marks it complete; wait for it if training stops.

        Raises:
            ShardwrightError: a rank could not finish an earlier checkpoint, which stays incomplete.
        """
        self._settle(args, wait=True)
        # The state changes while the thread works.
        output_dir, step = Path(args.output_dir), state.global_step
        directory = output_dir / f"checkpoint-{step}"
        # This returns after all ranks have written their files.
        self._nodes = nodes = sum(gathered(args.local_process_index == 0))
        facts = self._run_facts()

        def finish() -> Callable[[], None] | None:
            if not args.should_save:
                flush_tree(directory)
                return None
            files = flushed_records(directory)

            def mark() -> None:
                write_record(directory, step=step, files=files, facts=facts)
                rotate(output_dir, limit=self._limit, best=state.best_model_checkpoint)

            if nodes > 1:
                return mark
            mark()
            return None

        has_part = args.should_save or args.local_process_index == 0
        self._finish = BackgroundTask(finish if has_part else None, directory.name)
        if control.should_training_stop:
            self._settle(args, wait=True)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Check whether the last checkpoint is finished; wait for it before the next one and at the end of training.

        Raises:
            ShardwrightError: a rank could not finish it; it stays incomplete.
        """
        self._settle(args, wait=control.should_save or control.should_training_stop)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """End a run that resumed after its last step."""
        control.should_training_stop = control.should_training_stop or self._is_done

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Wait for the last checkpoint before the one of this epoch; raises as `on_step_end`."""
        if self._is_done:
            # The run that took the last step has done all three.
            control.should_log = control.should_evaluate = control.should_save = False
        self._settle(args, wait=control.should_save)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Wait for the last checkpoint, and restore the Trainer's rotation; raises as `on_step_end`."""
        self._settle(args, wait=True)
        args.save_total_limit = self._limit

    def _settle(self, args: TrainingArguments, *, wait: bool) -> None:
        """Agree over all ranks that the last checkpoint is finished or has failed; every rank must call it."""
        finish = self._finish
        if finish is None or not finish.ended_everywhere(args.device, wait=wait):
            return
        self._finish = None
        mark = together(finish.result, f"{finish.name} could not be finished")
        if self._nodes > 1:
            together(mark, f"{finish.name} could not be marked complete")
