"""Select the checkpoint to resume from, and compare the resuming run with the run that saved it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ...plugins.launching.messages import note_on_first_rank
from .record import RECORD, CheckpointRecord, NotWholeError, Reader, read_record, read_whole

_NAME = re.compile(r"checkpoint-(\d+)")
FEWEST_KEPT = 2
"""Complete checkpoints that are always kept, whatever `save_total_limit` says: the newest could be damaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The checkpoint to resume from."""

    path: Path
    """Its directory."""
    record: CheckpointRecord
    """Its files, and the run that saved it."""
    skipped: tuple[str, ...]
    """Newer incomplete checkpoints, each with the reason."""


def checkpoints(output_dir: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step, in order, complete or not."""
    by_step = {}
    for path in output_dir.glob("checkpoint-*"):
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            by_step[int(match[1])] = path
    return dict(sorted(by_step.items()))


def newest_whole(output_dir: Path, read: Reader = read_whole) -> Selection:
    """Return the newest checkpoint of a run that `read` accepts as complete.

    Raises:
        UsageError: there is no checkpoint.
        RefusedInputError: none is complete; lists every checkpoint with its error.
    """
    skipped: list[tuple[Path, str]] = []
    for path in reversed(checkpoints(output_dir).values()):
        try:
            record = read(path)
        except NotWholeError as error:
            skipped.append((path, str(error)))
            continue
        return Selection(path=path, record=record, skipped=tuple(f"{path.name} {why}" for path, why in skipped))
    if skipped:
        raise RefusedInputError([_not_whole(path, why) for path, why in skipped])
    fix = "train with save_steps first, or do not resume"
    raise UsageError(
        ConfigError(where="resume", value=str(output_dir), rule="has no checkpoint to resume from", fix=fix)
    )


def named_checkpoint(path: Path) -> Selection:
    """Return the checkpoint at a path.

    Raises:
        UsageError: it is not a directory.
        RefusedInputError: it is incomplete.
    """
    if not path.is_dir():
        raise UsageError(ConfigError(where="resume_from_checkpoint", value=str(path), rule="is not a directory"))
    try:
        return Selection(path=path, record=read_whole(path), skipped=())
    except NotWholeError as error:
        raise RefusedInputError(_not_whole(path, str(error))) from None


def _not_whole(path: Path, why: str) -> ConfigError:
    fix = "resume from another checkpoint, or start a new run with its path as the model"
    return ConfigError(where=str(path), rule=f"is not a complete checkpoint: {why}", fix=fix)


def set_aside(output_dir: Path, *, after_step: int) -> None:
    """Rename incomplete checkpoints, and those after the step where the run begins, so that it writes into neither."""
    for step, path in checkpoints(output_dir).items():
        try:
            read_record(path)
            word, reason = "superseded", f"{path.name} is from an earlier run, after step {after_step}"
            if step <= after_step:
                continue
        except NotWholeError as error:
            word, reason = "incomplete", f"{path.name} {error}"
        target = path.with_name(f"{word}-{path.name}")
        number = 1
        while target.exists():
            number += 1
            target = path.with_name(f"{word}-{path.name}-{number}")
        path.rename(target)
        note_on_first_rank(f"{reason}: renamed to {target.name}")


def rotate(output_dir: Path, *, limit: int | None, best: str | None) -> None:
    """Delete the oldest complete checkpoints until `limit` are left, but never the best one or the newest two."""
    if limit is None or limit <= 0:
        return
    complete = [path for path in checkpoints(output_dir).values() if (path / RECORD).is_file()]
    protected = {path.name for path in complete[-FEWEST_KEPT:]} | ({Path(best).name} if best else set())
    excess = len(complete) - max(limit, FEWEST_KEPT)
    for path in complete:
        if excess <= 0:
            return
        if path.name in protected:
            continue
        # Without a record it is incomplete, also if the deletion is interrupted.
        (path / RECORD).unlink()
        try:
            shutil.rmtree(path)
        except OSError as error:
            note_on_first_rank(f"{path.name} could not be deleted ({error.strerror})")
        excess -= 1


Action = Literal["rejected", "converted", "warning"]
_ANEW = "resume with the settings of the checkpoint, or start a new run with its path as the model"
_MISSING = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Consequence of a fact that differs between the checkpoint and the run that resumes."""

    fact: str
    """Key of `run_facts`."""
    action: Action
    """Whether the run is rejected, continues with converted states, or continues with a warning."""
    why: str
    """What would go wrong, or what changes."""


RULES = (
    Rule(fact="engine", action="rejected", why="each engine saves its optimizer in a different format"),
    Rule(fact="zero_stage", action="rejected", why="each stage shards the optimizer states differently"),
    Rule(fact="axes", action="rejected", why="tensors and optimizer states are sharded by these axes"),
    Rule(fact="world_size", action="converted", why="the random states of the ranks, which dropout uses, start again"),
    Rule(fact="global_batch_size", action="rejected", why="the completed steps would correspond to other samples"),
    Rule(fact="seed", action="rejected", why="the samples would come in another order, and some twice"),
    Rule(fact="data", action="rejected", why="the completed steps would correspond to other samples"),
    Rule(fact="model", action="rejected", why="the optimizer states belong to other parameters"),
    Rule(fact="trained", action="rejected", why="the optimizer states belong to other parameters"),
    Rule(fact="precision", action="rejected", why="the states are saved in other formats"),
    Rule(fact="optimizer", action="rejected", why="the states of one optimizer do not fit another"),
    Rule(fact="learning_rate", action="rejected", why="the schedule of the checkpoint would keep the old rate"),
    Rule(fact="schedule", action="rejected", why="the learning rate would jump"),
    Rule(fact="weight_decay", action="rejected", why="the value of the checkpoint would override the new one"),
    Rule(fact="max_grad_norm", action="warning", why="later steps use the new value"),
    Rule(fact="max_steps", action="warning", why="the rest of the schedule follows the new length"),
    Rule(fact="micro_batch_size", action="warning", why="the global batch is the same"),
    Rule(fact="plan", action="warning", why="the run is compared with the new plan"),
    Rule(fact="versions", action="warning", why="other versions may compute other losses"),
)


def compared(saved: Mapping[str, object], now: Mapping[str, object]) -> tuple[list[ConfigError], list[str]]:
    """Return the errors that prevent resuming, and the warnings.

    Facts that only one of the two runs has are not compared.
    """
    errors, warnings = [], []
    for rule in RULES:
        before, after = saved.get(rule.fact, _MISSING), now.get(rule.fact, _MISSING)
        if before is _MISSING or after is _MISSING or before == after:
            continue
        action, why, fix = rule.action, rule.why, _ANEW
        if rule.fact == "world_size" and saved.get("axes"):
            action, why = "rejected", "stages and axes must keep their ranks"
            fix = f"launch {saved[rule.fact]} ranks, or start a new run with its path as the model"
        if action == "rejected":
            shown = f"the checkpoint was saved with {before}: {why}"
            errors.append(ConfigError(where=f"resume: {rule.fact}", value=after, rule=shown, fix=fix))
        else:
            warnings.append(f"resume: {rule.fact} was {before} and is now {after}: {why}")
    return errors, warnings


def is_finished(selection: Selection, facts: Mapping[str, object], max_steps: int) -> bool:
    """Return whether a checkpoint was saved after the last step of its run, and the run that resumes has as many steps.

    The arguments are those of `finished_errors`.
    """
    saved, steps = _saved_and_wanted_steps(selection, facts, max_steps)
    return saved == steps == selection.record.step


def finished_errors(selection: Selection, facts: Mapping[str, object], max_steps: int) -> list[ConfigError]:
    """Return the error of a run that has fewer steps than the checkpoint, which used the schedule of a longer run.

    Args:
        selection: The checkpoint.
        facts: The facts of the run that resumes.
        max_steps: Its optimizer steps; 0 or less if only its epochs are known.
    """
    saved, steps = _saved_and_wanted_steps(selection, facts, max_steps)
    if not 0 < steps <= selection.record.step or saved == steps == selection.record.step:
        return []
    fix = "raise the steps or epochs, or start a new run from the weights of the checkpoint"
    rule = f"all {steps} steps are done, in a run of {saved} steps"
    return [ConfigError(where="resume", value=selection.path.name, rule=rule, fix=fix)]


def _saved_and_wanted_steps(selection: Selection, facts: Mapping[str, object], max_steps: int) -> tuple[int, int]:
    saved = json.loads((selection.path / "trainer_state.json").read_text(encoding="utf-8"))["max_steps"]
    return saved, saved if selection.record.facts.get("max_steps") == facts.get("max_steps") else max_steps
