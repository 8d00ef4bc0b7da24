"""`CheckpointCallback`: a checkpoint counts when all ranks have written theirs and a record names every file.

In transformers 5.17.0 `Trainer._save_checkpoint` writes into `checkpoint-N` file by file, deletes older checkpoints
before the new one is on the disk, and `get_last_checkpoint` takes the newest directory whatever it holds. `on_save`
comes right after, on every rank: once all ranks have written theirs, a thread flushes the files, takes their checksums
and writes the record, while the training goes on. Until then the checkpoint is not whole, and older ones stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ...ds_configs.specs.errors import Fault, RefusedInputError, ShardwrightError, UsageError
from ...plugins.deepspeed.other_ranks import load_from_other_ranks
from ...plugins.launching.beside import Beside
from ...plugins.launching.notes import Notify, note_on_first_rank
from ...plugins.transformers.finite_weights import gathered
from .agreement import on_first_rank, together
from .record import FileRecord, flush_tree, flushed_records, write_record
from .resume_rules import compared, finished_faults
from .run_facts import run_facts, trained_tensors
from .selection import Selection, checkpoints, named_checkpoint, newest_whole, rotate, set_aside

OR_ANEW = "or-anew"
"""What `asked` takes in place of true from a run that was started again without anybody's decision."""


class CheckpointCallback(TrainerCallback):
    """Whole checkpoints with any Trainer: marked complete when they are, found again, and never deleted half.

    Attach it last, so that what other callbacks add to a checkpoint is in its record. Checkpoints that are not whole,
    and those past the step that a run goes on from, are renamed when training begins; `save_total_limit` keeps its
    meaning, but for at least two that stay. All ranks must see one output directory. The record of a checkpoint is
    written while the next steps run, and before the next save and the end of training, however it ends.

    Args:
        facts: What else a checkpoint remembers of its run and a resumed one is compared with, such as the plan.
        notify: Receives what is skipped, renamed and remarked, on the first rank.

    >>> checkpoints = CheckpointCallback()  # doctest: +SKIP
    >>> checkpoints.attach(trainer)  # doctest: +SKIP
    >>> trainer.train(resume_from_checkpoint=checkpoints.newest())  # doctest: +SKIP
    """

    def __init__(self, facts: Mapping[str, Any] | None = None, *, notify: Notify | None = None) -> None:
        self._own_facts = dict(facts or {})
        self._notify = notify or note_on_first_rank
        self._trainer: Any = None
        self._facts: dict[str, Any] | None = None
        self._limit: int | None = None
        self._finish: Beside[Callable[[], None] | None] | None = None
        self._nodes = 1

    def attach(self, trainer: Any) -> None:
        """Add this callback to a Trainer, behind all others."""
        self._trainer = trainer
        # An engine with expert parallelism names its tensors otherwise, and a run that resumes has none yet.
        if (model := getattr(trainer, "model", None)) is not None:
            self._own_facts = {"trained": trained_tensors(model)} | self._own_facts
        train = trainer.train

        def train_and_finish(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            finally:
                self._end()

        trainer.train = train_and_finish
        trainer.add_callback(self)

    def asked(self, resume: str | bool | Selection | None) -> str | None:
        """Return what a run is to go on from: a named checkpoint, with true the newest, or one that was read already.

        `OR_ANEW` is true for a run that nobody looks after: it begins anew, and says so, where no checkpoint is whole.
        Every rank must call it; `newest` and `named` say what it raises.
        """
        if resume == OR_ANEW:
            try:
                return self.newest()
            except RefusedInputError as error:
                if self._trainer.args.process_index == 0:
                    self._notify(
                        f"no checkpoint is whole, training begins anew at step 0: {'; '.join(str(error).splitlines())}"
                    )
                return None
        if isinstance(resume, Selection):
            return self._resumed(lambda: resume)
        if isinstance(resume, str) and resume.lower() not in ("true", "false", ""):
            return self.named(resume)
        return self.newest() if str(resume).lower() == "true" else None

    def newest(self) -> str | None:
        """Return the newest whole checkpoint of the output directory; `None`, said aloud, where it holds none at all.

        Every rank must call it.

        Raises:
            RefusedInputError: there are checkpoints, but none is whole.
            UsageError: the run differs from the one that saved it in what cannot be carried over.
        """
        output_dir = Path(self._trainer.args.output_dir)
        if not on_first_rank(lambda: bool(checkpoints(output_dir))):
            if self._trainer.args.process_index == 0:
                self._notify(f"{output_dir} holds no checkpoint: training begins at step 0")
            return None
        return self._resumed(lambda: newest_whole(output_dir))

    def named(self, path: str) -> str:
        """Return a checkpoint that the user named, after the same checks. Every rank must call it.

        Raises:
            RefusedInputError: it is not whole.
            UsageError: it is no directory, or the run differs in what cannot be carried over.
        """
        return self._resumed(lambda: named_checkpoint(Path(path)))

    def _resumed(self, choose: Callable[[], Selection]) -> str:
        """Choose on the first rank alone, which reads every byte, and tell the others."""
        facts = self._run_facts()

        def chosen() -> tuple[str, bool]:
            selection = choose()
            faults, remarks = compared(selection.record.facts, facts)
            faults += finished_faults(selection, facts, self._trainer.args.max_steps)
            if faults:
                raise UsageError(faults)
            for line in (*(f"skipped: {one}" for one in selection.skipped), *remarks):
                self._notify(line)
            self._notify(f"resuming from {selection.path.name}")
            return str(selection.path), selection.record.facts.get("world_size") != facts["world_size"]

        path, has_other_ranks = on_first_rank(chosen)
        if has_other_ranks and facts["engine"] == "deepspeed":
            load_from_other_ranks()
        return path

    def _run_facts(self) -> dict[str, Any]:
        if self._facts is None:
            self._facts = run_facts(self._trainer) | self._own_facts
        return self._facts

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clear the way for the checkpoints of this run, and take over their rotation.

        Raises:
            UsageError: it was not attached.
        """
        if self._trainer is None:
            fix = "write CheckpointCallback().attach(trainer) instead of callbacks=[CheckpointCallback()]"
            raise UsageError(Fault(where="CheckpointCallback", rule="knows no trainer", fix=fix))
        self._facts = None
        self._run_facts()
        self._limit, args.save_total_limit = args.save_total_limit, None
        if args.should_save and Path(args.output_dir).is_dir():
            set_aside(Path(args.output_dir), after_step=state.global_step, notify=self._notify)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to finish the checkpoint: flush it, take checksums, mark it complete; wait where training stops.

        Raises:
            ShardwrightError: a rank could not finish an earlier one; it stays incomplete, older ones stay whole.
        """
        self._settle(args, wait=True)
        # The state goes on counting while the thread works.
        output_dir, step = Path(args.output_dir), state.global_step
        directory = output_dir / f"checkpoint-{step}"
        # No rank is past this before all of them have written their files.
        self._nodes = nodes = sum(gathered(args.local_process_index == 0))
        facts = self._run_facts()

        def mark(files: Mapping[str, FileRecord]) -> None:
            write_record(directory, step=step, files=files, facts=facts)
            rotate(output_dir, limit=self._limit, best=state.best_model_checkpoint, notify=self._notify)

        def finish() -> Callable[[], None] | None:
            if not args.should_save:
                flush_tree(directory)
                return None
            files = flushed_records(directory)
            if nodes > 1:
                return lambda: mark(files)
            mark(files)
            return None

        has_part = args.should_save or args.local_process_index == 0
        self._finish = Beside(finish if has_part else None, directory.name)
        if control.should_training_stop:
            self._settle(args, wait=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look whether the last checkpoint is finished; wait for it before the next one, and where training stops.

        Raises:
            ShardwrightError: a rank could not finish it; it stays incomplete, older ones stay whole.
        """
        self._settle(args, wait=control.should_save or control.should_training_stop)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the last checkpoint before the one of this epoch.

        Raises:
            ShardwrightError: as `on_step_end`.
        """
        self._settle(args, wait=control.should_save)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the last checkpoint, and give the Trainer its own rotation back.

        Raises:
            ShardwrightError: as `on_step_end`.
        """
        self._settle(args, wait=True)
        args.save_total_limit = self._limit

    def _end(self) -> None:
        """Wait for what an exception left unfinished, without the other ranks, which may be gone."""
        finish, self._finish = self._finish, None
        if finish is not None and finish.ended():
            try:
                finish.result()
            except (OSError, ShardwrightError) as error:
                self._notify(f"{finish.name} could not be finished: {error}")

    def _settle(self, args: Any, *, wait: bool) -> None:
        """Agree that the last checkpoint is finished, or failed; every rank must call it."""
        finish = self._finish
        if finish is None or not finish.ended_everywhere(args.device, wait=wait):
            return
        self._finish = None
        mark = together(finish.result, f"{finish.name} could not be finished")
        if self._nodes > 1:
            together(mark, f"{finish.name} could not be marked complete")
