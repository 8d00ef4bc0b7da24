"""`rehearse`: launches a plan's own files on CPU ranks with a shrunken model, and says whether every part works."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...ds_configs.plan.output import reserved
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from ...plugins.launching.notes import Notify, OnProgress
from ...plugins.planning.from_names import installed_versions
from ..reports.make import REPORT_FILE as HTML_FILE
from ..training.script import script_faults
from .checks import (
    Check,
    check_checkpoint,
    check_export,
    check_files,
    check_layer_classes,
    check_optimizer,
    check_resumed,
    check_training,
    failed,
    passed,
    with_unreached,
)
from .files import PlanFiles, Rehearsed, choose_ranks, scale_plan, write_rehearsal
from .launch import LaunchSettings, launch_stage, prepare_launch, rank_records
from .report import (
    OWN_FILES,
    PHASES,
    ROLES,
    PredictedPhase,
    Rehearsal,
    check_output_directory,
    rehearsal_files,
    write_report,
)
from .script import rehearse_script

DEFAULT_STEPS = 8
FEWEST_STEPS = 4
"""The first two steps warm up, and the checkpoint lies in the middle."""
TIME_LIMIT_SECONDS = 600.0


def rehearse(
    plan: str | Path | Plan,
    *,
    ranks: int | None = None,
    steps: int = DEFAULT_STEPS,
    nodes_as_ranks: bool = False,
    text: Sequence[str | Path] = (),
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
    output_dir: str | Path | None = None,
    force: bool = False,
    script: str | Path | None = None,
    script_arguments: Sequence[str] = (),
    notify: Notify = lambda _: None,
    on_progress: OnProgress = lambda _what, _done, _total: None,
    command: str = "",
) -> Rehearsal:
    """Launch a plan's files on CPU ranks with a shrunken model, check what happens, and write the report.

    With a `script` of the user's own, the ranks run that: where it loads the plan's model it gets the shrunken one,
    its `TrainingArguments` are scaled as the plan's, and `steps` limits its trainers.

    `plan` is a directory that `plan` wrote, whose files are taken as they are, or a `Plan`, for which nothing is
    written unless `output_dir` is given. A check that fails is in the result, not an exception. `notify` receives
    remarks, `on_progress` what is done and the optimizer steps of both launches, done and in all. `command` is the
    command line that asked for it, for the report.

    Raises:
        UsageError: a value cannot be used, or the layout does not divide the ranks.
        RefusedInputError: `plan.json` is not one that this version wrote.
        ShardwrightError: the model's configuration cannot be read, or the report cannot be written.

    >>> rehearse("plan").passed  # doctest: +SKIP
    True
    """
    started = time.monotonic()
    _check_values(steps=steps, time_limit_seconds=time_limit_seconds, ranks=ranks, script=script)
    with (
        tempfile.TemporaryDirectory(prefix="shardwright-rehearsal-", ignore_cleanup_errors=True) as temporary,
        contextlib.ExitStack() as held,
    ):
        loaded, directory = _plan_directory(plan, Path(temporary))
        target = Path(output_dir) if output_dir is not None else directory / "rehearsal"
        kept = output_dir is not None or not isinstance(plan, Plan)
        if kept:
            check_output_directory(target, force=force, model=loaded.model.name if output_dir is not None else None)
        nodes = _launchers(loaded, nodes_as_ranks)
        settings = LaunchSettings(
            directory=directory,
            work=Path(temporary) / "work",
            ranks=choose_ranks(loaded.chosen.strategy, nodes=nodes, ranks=ranks),
            nodes=nodes,
            steps=steps,
            text=_read_text(text),
            time_limit_seconds=time_limit_seconds,
            notify=notify,
            on_progress=on_progress,
        )
        settings.work.mkdir()
        if kept:
            held.enter_context(reserved(target, force=force, own=OWN_FILES))
        own = None if script is None else (Path(script), tuple(script_arguments))
        found = _rehearse(loaded, settings, own)
        source = None if isinstance(plan, Plan) else str(directory)
        facts: dict[str, Any] = {"versions": dict(installed_versions()), "command": command}
        found = replace(found, source=source, seconds=time.monotonic() - started, **facts)
        if kept:
            names = (*rehearsal_files(found), HTML_FILE)
            found = replace(found, files=tuple(str(target / name) for name in names))
            write_report(found, target)
    return found


def _check_values(*, steps: int, time_limit_seconds: float, ranks: int | None, script: str | Path | None) -> None:
    faults = [] if script is None else script_faults(Path(script))
    if steps < FEWEST_STEPS:
        rule = f"must be at least {FEWEST_STEPS}: two to warm up, and a checkpoint in the middle"
        faults.append(Fault(where="steps", value=steps, rule=rule))
    if not time_limit_seconds > 0:
        faults.append(Fault(where="time_limit", value=time_limit_seconds, rule="must be more than 0 seconds"))
    if ranks is not None and ranks < 1:
        faults.append(Fault(where="ranks", value=ranks, rule="must be at least 1"))
    if faults:
        raise UsageError(faults)


def _plan_directory(plan: str | Path | Plan, temporary: Path) -> tuple[Plan, Path]:
    if not isinstance(plan, Plan):
        loaded, directory = Plan.load(plan), Path(plan)
        return loaded, directory if directory.is_dir() else directory.parent
    plan.write(temporary / "plan")
    return plan, temporary / "plan"


def _launchers(plan: Plan, nodes_as_ranks: bool) -> int:
    if plan.model.task != "causal_lm":
        rule = f"is a {plan.model.task} model; only causal language models are rehearsed"
        raise UsageError(Fault(where="model", value=plan.model.architecture, rule=rule))
    if not nodes_as_ranks:
        return 1
    if plan.hardware.nodes == 1:
        raise UsageError(Fault(where="nodes_as_ranks", value=True, rule="the plan has one node", fix="leave it out"))
    return plan.hardware.nodes


def _read_text(files: Sequence[str | Path]) -> bytes | None:
    if not files:
        return None
    faults = [Fault(where="text", value=str(path), rule="no such file") for path in files if not Path(path).is_file()]
    if faults:
        raise UsageError(faults)
    text = b"".join(Path(path).read_bytes() for path in files)
    if not text:
        raise UsageError(Fault(where="text", value=str(files[0]), rule="holds no byte to train on"))
    return text


def _rehearse(plan: Plan, settings: LaunchSettings, script: tuple[Path, Sequence[str]] | None) -> Rehearsal:
    """Check the files, then launch; the first check that fails ends the rehearsal."""
    found = Rehearsal(
        plan=plan, source=None, ranks=settings.ranks, nodes=settings.nodes, steps=settings.steps, checks=()
    )
    checks = check_files(settings.directory, plan)
    if any(check.name == "files" and not check.passed for check in checks):
        return replace(found, checks=with_unreached(checks))
    files = PlanFiles.read(settings.directory)
    settings.tell("reading the model's configuration")
    config = _model_config(plan)
    rehearsed = scale_plan(
        plan, files, config, ranks=settings.ranks, nodes=settings.nodes, steps=settings.steps, work=settings.work
    )
    write_rehearsal(rehearsed, settings.work, settings.text)
    if script is not None:
        more, losses = rehearse_script(plan, files, rehearsed, settings, *script)
        return replace(found, checks=(*checks, *more), losses=losses, changes=rehearsed.changes)
    checks.append(check_optimizer(files.deepspeed, files.arguments))
    checks.append(check_layer_classes(files.accelerate, plan, _make_model(rehearsed, settings.work)))
    if all(check.passed for check in checks):
        found, more = _launch_all(found, rehearsed, settings)
        checks += more
    return replace(found, checks=with_unreached(checks), changes=rehearsed.changes)


def _model_config(plan: Plan) -> Mapping[str, Any]:
    from ...plugins.planning.models import load_model_spec
    from ...plugins.transformers.sound_model import refuse_code

    try:
        config = load_model_spec(plan.model.name, revision=plan.model.revision).config
    except UsageError as error:
        fix = f"the plan's model {plan.model.name!r} must still be there; plan again from where it is now"
        raise UsageError([*error.faults, Fault(where="plan.json: model", rule=fix)]) from None
    refuse_code(config, plan.model.name)
    return config


def _make_model(rehearsed: Rehearsed, work: Path) -> set[str]:
    """Return the names of the model's module classes; adapters also get base weights to be loaded on every rank."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    config = AutoConfig.from_pretrained(work / "model", trust_remote_code=False)
    full = rehearsed.job.method == "full"
    set_seed(0)
    with torch.device("meta" if full else "cpu"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if not full:
        # Transformers draws a progress bar and DeepSpeed, which it imports here, logs to stdout.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            model.save_pretrained(work / "model")
    return {type(module).__name__ for module in model.modules()}


def _launch_all(found: Rehearsal, rehearsed: Rehearsed, settings: LaunchSettings) -> tuple[Rehearsal, list[Check]]:
    work, worker = settings.work, rehearsed.worker
    try:
        prepare_launch(rehearsed, settings)
        launch_stage("train", rehearsed, settings)
    except ShardwrightError as error:
        return found, [failed("launch", str(error))]
    records = rank_records(work, "train", settings.ranks)
    losses = list(records[0]["losses"])
    found = replace(
        found, losses=tuple(losses), measured=_measured(records), predicted=_predicted(rehearsed, settings.work)
    )
    vocab_size = rehearsed.model.dimensions.vocab_size
    checks = check_training(records, ranks=settings.ranks, steps=settings.steps, vocab_size=vocab_size)
    checks.append(check_checkpoint(work / "checkpoints" / f"checkpoint-{worker.save_step}"))
    if not all(check.passed for check in checks):
        return found, [passed("launch", f"{settings.ranks} ranks trained and ended"), *checks]
    try:
        launch_stage("resume", rehearsed, settings)
    except ShardwrightError as error:
        return found, [
            passed("launch", f"{settings.ranks} ranks trained and ended"),
            *checks,
            failed("resume", str(error)),
        ]
    launch = passed("launch", f"{settings.ranks} ranks came up, trained, ended, and did so again to resume")
    resumed = rank_records(work, "resume", settings.ranks)
    checks.append(
        check_resumed(
            losses,
            resumed[0]["losses"],
            save_step=worker.save_step,
            cpu_optimizer=rehearsed.offload_device("optimizer") != "none",
        )
    )
    files = work / "trained_logits.safetensors", work / "export_logits.safetensors"
    error_text = resumed[0].get("export_error")
    checks.append(check_export(work / "export", *files, error_text, precision=worker.precision))
    return found, [launch, *checks]


def _measured(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return bytes by phase and role of the rank that is fullest in that phase."""
    found = {}
    for phase in PHASES:
        # The plan's loss phase begins with the last layer's forward pass.
        metered = ("forward", "loss") if phase == "loss" else (phase,)
        roles = [record["roles"].get(name, {}) for record in records for name in metered]
        fullest = max(roles, key=lambda counts: sum(counts.values()))
        if fullest:
            found[phase] = {role: fullest.get(role, 0) for role in ROLES}
    return found


def _predicted(rehearsed: Rehearsed, work: Path) -> dict[str, PredictedPhase]:
    from ...ds_configs.memory.activation_source import activations_are_stored
    from ...ds_configs.memory.cpu_memory import cpu_rank_terms
    from ...ds_configs.memory.terms import TERM_ROLES

    source = None
    if not activations_are_stored(rehearsed.model, rehearsed.job, rehearsed.strategy):
        from ...plugins.planning.from_names import TracedActivations
        from ...plugins.planning.models import load_model_spec

        source = TracedActivations(load_model_spec(str(work / "model")), rehearsed.job)
    phases = cpu_rank_terms(rehearsed.strategy, rehearsed.model, rehearsed.job, activations=source)
    found = {}
    for phase, terms in phases.items():
        if phase not in PHASES:
            continue
        roles = dict.fromkeys(ROLES, 0)
        for term, count in terms.items():
            roles[TERM_ROLES.get(term, "other")] += count
        found[str(phase)] = PredictedPhase(terms=terms, roles=roles)
    return found
