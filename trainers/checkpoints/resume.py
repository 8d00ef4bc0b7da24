"""Select the checkpoint to resume from, and compare the resuming run with the run that saved it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ...plugins.deepspeed.engine import load_from_other_ranks
from ...plugins.launching.messages import note_on_first_rank
from .record import (
    RECORD,
    CheckpointRecord,
    NotWholeError,
    Reader,
    layout_facts,
    on_first_rank,
    read_record,
    read_whole,
)

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


def newest_whole(output_dir: Path, read: Reader = read_whole) -> Selection | None:
    """Return the newest checkpoint of a run that `read` accepts as complete; `None` if there are no checkpoints.

    Raises:
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
    return None


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
_NEW_RUN = "start a new run with its path as the model"
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
    Rule(fact="states", action="rejected", why="it has only weights, without the states of the optimizer"),
    Rule(fact="engine", action="rejected", why="each engine saves its optimizer in a different format"),
    Rule(
        fact="zero_stage", action="rejected", why="each stage shards its states differently, except ZeRO-1 and ZeRO-2"
    ),
    Rule(fact="axes", action="rejected", why="tensors and optimizer states are sharded by these axes"),
    Rule(fact="sharded", action="rejected", why="each part of the model has its own states"),
    Rule(fact="world_size", action="converted", why="the random states of the ranks, which dropout uses, start again"),
    Rule(fact="global_batch_size", action="rejected", why="the completed steps would correspond to other samples"),
    Rule(fact="seed", action="rejected", why="the samples would come in another order, and some twice"),
    Rule(fact="data", action="rejected", why="the completed steps would correspond to other samples"),
    Rule(fact="model", action="rejected", why="the optimizer states belong to other parameters"),
    Rule(fact="weights", action="rejected", why="the optimizer states belong to other parameters"),
    Rule(fact="trained", action="rejected", why="the optimizer states belong to other parameters"),
    Rule(fact="precision", action="rejected", why="the states are saved in other formats"),
    Rule(fact="optimizer", action="rejected", why="the states of one optimizer do not fit another"),
    Rule(fact="learning_rate", action="rejected", why="the schedule of the checkpoint would keep the old rate"),
    Rule(fact="schedule", action="rejected", why="the learning rate would jump"),
    Rule(fact="weight_decay", action="rejected", why="the value of the checkpoint would override the new one"),
    Rule(fact="max_grad_norm", action="warning", why="later steps use the new value"),
    Rule(fact="max_steps", action="warning", why="the rest of the schedule follows the new length"),
    Rule(fact="micro_batch_size", action="warning", why="the global batch is the same"),
    Rule(fact="versions", action="warning", why="other versions may compute other losses"),
)
_LAYOUT = ("engine", "zero_stage", "sharded")
"""Facts that an error shows together, as `layout_name`."""
_SAME_STATES = {1, 2, "1 or 2"}
"""ZeRO stages with the same checkpoints."""


def compared(
    saved: Mapping[str, object], now: Mapping[str, object], *, new_run: str = _NEW_RUN
) -> tuple[list[ConfigError], list[str]]:
    """Return the errors that prevent resuming, and the warnings.

    Facts that only one of the two runs has are not compared.

    Args:
        saved: Facts of the run that saved the checkpoint.
        now: Facts of the run that resumes.
        new_run: How to use the checkpoint if the run cannot resume from it.
    """
    errors: list[ConfigError] = []
    warnings: list[str] = []
    for rule in RULES:
        before, after = saved.get(rule.fact, _MISSING), now.get(rule.fact, _MISSING)
        if before is _MISSING or after is _MISSING or before == after:
            continue
        if rule.fact == "zero_stage" and {before, after} <= _SAME_STATES:
            continue
        action, why, fix = rule.action, rule.why, f"resume with the settings of the checkpoint, or {new_run}"
        if rule.fact == "world_size" and (saved.get("axes") or saved.get("sharded")):
            action, why = "rejected", "stages and axes must keep their ranks"
            fix = f"launch {saved[rule.fact]} ranks, or {new_run}"
        if rule.fact in _LAYOUT:
            if any(error.where.removeprefix("resume: ") in _LAYOUT for error in errors):
                continue
            before, after = layout_name(saved), layout_name(now)
            alike = before if saved.get("sharded") else layout_name({**saved, "world_size": None})
            fix = f"resume under {alike}, or {new_run}"
        if rule.fact == "states":
            after, fix = layout_name(now), f"save without save_only_model, or {new_run}"
        if action == "rejected":
            shown = f"the checkpoint was saved with {before}: {why}"
            errors.append(ConfigError(where=f"resume: {rule.fact}", value=after, rule=shown, fix=fix))
        else:
            warnings.append(f"resume: {rule.fact} was {before} and is now {after}: {why}")
    return errors, warnings


def layout_name(facts: Mapping[str, object]) -> str:
    """Return how a run is called that has these facts.

    >>> layout_name({"engine": "deepspeed", "zero_stage": 3, "world_size": 2})
    'ZeRO-3 on 2 ranks'
    """
    engine, stage = facts.get("engine"), facts.get("zero_stage")
    names = {"ddp": "DDP or one process", "fsdp2": "FSDP2", "deepspeed": f"ZeRO-{stage}"}
    name = names.get(str(engine), str(engine))
    if facts.get("sharded"):
        name += f" with {facts['sharded']}"
    count = facts.get("world_size")
    return name if not count else f"{name} on 1 rank" if count == 1 else f"{name} on {count} ranks"


_TAG = re.compile(r"global_step\d+/")
_WEIGHTS = re.compile(r"(pytorch_)?model([.-].*)?\.(safetensors|bin)")
_FSDP2_STATES = {"optimizer.bin", "optimizer_0", "pytorch_model_fsdp.bin", "pytorch_model_fsdp_0"}


def saved_layout(names: Collection[str]) -> dict[str, object]:
    """Return the facts of the run that saved a checkpoint, as far as the names of its files and directories show them.

    Any Trainer saves these files, also one without `CheckpointCallback`.

    >>> saved_layout(["optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"])
    {'engine': 'ddp', 'sharded': '', 'world_size': 2}
    """
    parts = [name for name in names if _TAG.match(name)]
    is_fsdp2 = not _FSDP2_STATES.isdisjoint(names)
    ranks = sum(re.fullmatch(r"rng_state_\d+\.pth", name) is not None for name in names) or int(
        "rng_state.pth" in names
    )
    # With save_only_model, ZeRO-3 saves its states, but neither the schedule nor random states.
    if not (is_fsdp2 or "optimizer.pt" in names or (parts and (ranks or "scheduler.pt" in names))):
        return {"states": "save_only_model"}
    facts: dict[str, object] = {"engine": "deepspeed" if parts else "fsdp2" if is_fsdp2 else "ddp", "sharded": ""}
    if parts:
        has_shards = any(name.endswith("_optim_states.pt") for name in parts)
        shards_weights = any(re.search(r"/zero_pp_rank_.*_model_states\.pt", name) for name in parts)
        facts["zero_stage"] = 3 if shards_weights else "1 or 2" if has_shards else 0
        facts["sharded"] = sharded(
            is_pipeline=any(re.search(r"/layer_\d+-", name) for name in parts),
            has_experts=any("_expert_" in name or "/expp_rank_" in name for name in parts),
            tensor_ranks=len({match[1] for name in parts if (match := re.search(r"mp_rank_(\d+)_", name))}),
        )
    if ranks:
        facts["world_size"] = ranks
    if not facts["sharded"] and any(name.endswith("adapter_config.json") for name in names):
        facts["weights"] = "adapters"
    elif not facts["sharded"] and any(map(_WEIGHTS.fullmatch, names)):
        facts["weights"] = "all weights"
    return facts


def sharded(*, is_pipeline: bool, has_experts: bool, tensor_ranks: int) -> str:
    """Return the axis that divides the files of a DeepSpeed checkpoint; empty for data parallelism alone."""
    if is_pipeline:
        return "pipeline stages"
    if has_experts:
        return "expert parallelism"
    return f"tensors over {tensor_ranks} ranks" if tensor_ranks > 1 else ""


def checked_checkpoint(trainer: Any, resume: Any) -> str:
    """Return the checkpoint to resume from, after comparing the layout that saved it; every rank must call it.

    Raises:
        UsageError: it is not a checkpoint of a Trainer, or this run cannot load its states.
    """
    now = layout_facts(trainer)
    axes = now.get("axes", {})
    now["states"] = "complete"
    now["weights"] = "adapters" if hasattr(trainer.model, "peft_config") else "all weights"
    now["sharded"] = sharded(
        is_pipeline="pipeline_stages" in axes,
        has_experts="autoep_size" in axes,
        tensor_ranks=axes.get("autotp_size", axes.get("tensor_parallel_size", 1)),
    )

    def check() -> tuple[str, bool]:
        output_dir = Path(trainer.args.output_dir)
        path = next(reversed(checkpoints(output_dir).values()), output_dir) if resume is True else Path(resume)
        if not (path / "trainer_state.json").is_file():
            rule = "is not a complete checkpoint of a Trainer: it has no trainer_state.json"
            others = [f"{path.name}/{name.name}" for name in checkpoints(path).values()] or [
                name.name for name in checkpoints(path.parent).values() if name != path
            ]
            fix = f"pass one of {', '.join(others)}" if others else "start a new run with its path as the model"
            raise UsageError(ConfigError(where="resume_from_checkpoint", value=str(path), rule=rule, fix=fix))
        names = {file.relative_to(path).as_posix() for file in path.rglob("*")}
        saved = saved_layout(names)
        if trainer.args.save_on_each_node:
            saved.pop("world_size", None)
        if saved.get("zero_stage") == 3 and now["sharded"] == "expert parallelism" and not saved["sharded"]:
            # ZeRO-3 names its files alike with and without experts.
            del saved["sharded"]
        errors, warnings = compared(saved, now, new_run=_as_model(path, names))
        if errors:
            raise UsageError(errors)
        if RECORD not in names:
            for line in warnings:
                note_on_first_rank(line)
        return str(path), saved.get("world_size", now["world_size"]) != now["world_size"]

    path, has_other_ranks = on_first_rank(check)
    if has_other_ranks and now["engine"] == "deepspeed":
        load_from_other_ranks()
    return path


def _as_model(path: Path, names: Collection[str]) -> str:
    """Return how a new run starts from the weights of a checkpoint."""
    if any(_WEIGHTS.fullmatch(name) for name in names):
        return "start a new run with its path as the model"
    if any(name.endswith("adapter_config.json") for name in names):
        return "start a new run with its path as the adapter"
    extracts = (
        "python zero_to_fp32.py . ."
        if "zero_to_fp32.py" in names
        else "accelerate merge-weights pytorch_model_fsdp_0 ."
    )
    return f"run `{extracts}` in {path} and start a new run from these weights"


def finished(selection: Selection, facts: Mapping[str, object], max_steps: int) -> tuple[bool, list[ConfigError]]:
    """Return whether the run that resumes has no further step, and the errors of one with fewer steps.

    The checkpoint of a longer run used its schedule.

    Args:
        selection: The checkpoint.
        facts: The facts of the run that resumes.
        max_steps: Its optimizer steps; 0 or less if only its epochs are known.
    """
    state = json.loads((selection.path / "trainer_state.json").read_text(encoding="utf-8"))
    saved, step = state["max_steps"], selection.record.step
    steps = saved if selection.record.facts.get("max_steps") == facts.get("max_steps") else max_steps
    if saved == steps == step or not 0 < steps <= step:
        return saved == steps == step, []
    fix = "raise the steps or epochs, or start a new run from the weights of the checkpoint"
    rule = f"all {steps} steps are done, in a run of {saved} steps"
    return False, [ConfigError(where="resume", value=selection.path.name, rule=rule, fix=fix)]
