"""`rehearse`: launch a plan's own files, or a user's script, on CPU ranks with a small model, and check all parts."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ...ds_configs.memory.estimate import cpu_rank_terms
from ...ds_configs.plan.output import output_errors, reserved, write_files
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ConfigError, InputError, ShardwrightError, UsageError, not_a_count
from ...ds_configs.specs.job import GROUPED_TASKS
from ...ds_configs.specs.tasks import TASKS
from ...ds_configs.specs.terms import ROLES
from ...ds_configs.step_time.estimate import TERMS
from ...plugins.planning import installed_release_difference, installed_versions
from ...plugins.transformers.training_arguments import byte_tokenizer
from ..data.models import StartingModel, load_config, load_processor, load_tokenizer
from ..training.script import script_errors, with_plan_flags
from .checks import (
    OFFLOADED,
    PHASES,
    REPORT_FILE,
    Check,
    Rehearsal,
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
from .files import (
    SCRIPT_STAGE,
    STAGES,
    LaunchSettings,
    PlanFiles,
    Rehearsed,
    RehearsedScriptJob,
    choose_ranks,
    launch_rehearsal,
    make_model,
    rank_records,
    scale_plan,
)

logger = logging.getLogger(__name__)

_OF_TEXTS = ("bos", "eos", "pad")
"""Tokens that texts of every model have."""
MOST_FILES, MOST_BYTES = 20_000, 4 * 2**30
"""Maximum of a copied directory."""
_LARGEST_WEIGHTS_BYTES = 64 * 2**20
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".onnx", ".gguf"})
_OMITTED = frozenset({"__pycache__", "node_modules"})
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
)
_NOT_COPIED = (
    "\nA rehearsed script runs in a copy of its directory, without hidden directories and weights over 64 MiB: pass "
    "these as arguments or absolute paths"
)


def rehearse_script(
    plan: Plan, files: PlanFiles, rehearsed: Rehearsed, settings: LaunchSettings, script: Path, arguments: Sequence[str]
) -> tuple[list[Check], tuple[float, ...]]:
    """Run a script on every rank of a rehearsal, and return the checks and the loss of each step."""
    import torch
    from transformers import AutoConfig

    work = settings.work
    # As the model's own checkpoint, whose type a script loads by default. DeepSpeed in fp32 trains no other type.
    dtype = AutoConfig.from_pretrained(work / "model", trust_remote_code=False).dtype
    dtype = dtype if dtype in (torch.bfloat16, torch.float32) else torch.float32
    if rehearsed.plan.chosen.layout.engine == "deepspeed":
        dtype = torch.bfloat16 if rehearsed.plan.job.precision == "bf16" else torch.float32
    tokenizer = byte_tokenizer(rehearsed.plan.model.dimensions.vocab_size)
    tokenizer.chat_template = _CHAT_TEMPLATE
    # Collators of scripts pad.
    tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.save_pretrained(work / "model")
    _write_processor(plan, work / "model", tokenizer)
    make_model(work, saved=True, dtype=dtype)
    (work / "training_arguments.json").write_text(json.dumps(files.arguments), encoding="utf-8")
    # The script reads the rehearsal's files and model in place of the plan's.
    exchanged = {file: work / file.name for file in settings.directory.absolute().iterdir()}
    exchanged = {file: small for file, small in exchanged.items() if small.is_file()}
    if (model := Path(plan.model.name)).is_dir():
        exchanged[model.absolute()] = work / "model"
    here, script = Path.cwd(), script.resolve()
    roots = {root for root in (here, script.parent) if not {here, script.parent} & set(root.parents)}
    copies = {root: work / f"copy-{index}" for index, root in enumerate(sorted(roots))}
    for root, copy in copies.items():
        copy_directory(root, copy, exchanged, apart=work.parent)
    scaled = rehearsed.worker.training_arguments
    job = RehearsedScriptJob(
        training_arguments={name: scaled[name] for name in files.arguments if name in scaled},
        planned=files.arguments,
        script=str(_in_copy(script, copies)),
        arguments=exchanged_arguments(with_plan_flags(arguments, plan), plan, settings.directory, work, copies),
        model_name=plan.model.name,
        steps=settings.steps,
        working_directory=str(_in_copy(here, copies)),
    )
    try:
        launch_rehearsal(job, rehearsed, settings, f"running {script.name}")
    except ShardwrightError as error:
        hint = _NOT_COPIED if "FileNotFoundError" in str(error) else ""
        return [failed("launch", f"{error}{hint}")], ()
    record = rank_records(work, SCRIPT_STAGE, settings.ranks)[0]
    losses, checks = record["losses"], [passed("launch", f"{settings.ranks} ranks ran {script.name} to its end")]
    if not record["trainers"]:
        return [*checks, passed("script", "creates no Trainer, so its batch and losses are not checked")], tuple(losses)
    errors = record["errors"]
    if record["differences"]:
        lines = "; ".join(record["differences"])
        errors = [f"{lines}: pass the plan's training_arguments.json to TrainingArguments", *errors]
    if errors:
        checks.append(failed("script", "; ".join(errors)))
    else:
        checks.append(passed("script", "its TrainingArguments are the plan's"))
    if losses and all(math.isfinite(loss) for loss in losses):
        checks.append(passed("loss_finite", f"{losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"))
    else:
        checks.append(failed("loss_finite", f"losses: {', '.join(f'{loss:.3f}' for loss in losses) or 'none'}"))
    return checks, tuple(losses)


def _write_processor(plan: Plan, directory: Path, tokenizer: Any) -> None:
    """Write the processor of the plan's model, if it reads images, with a small tokenizer.

    The small tokenizer gets the tokens of images, and the small model's configuration their ids.
    """
    if not plan.model.reads_images:
        return
    source = StartingModel(model=plan.model.name, revision=plan.model.revision)
    config = load_config(source)
    try:
        original = load_tokenizer(source, config.get_text_config().vocab_size)
        processor = load_processor(source, config, original)
    except InputError as error:
        logger.info(f"the script gets no processor: {error}")
        return
    if processor is None:
        return
    file = directory / "config.json"
    small = json.loads(file.read_bytes())
    names = [name for name in small if name.endswith(("_token_id", "_token_index")) and name[:3] not in _OF_TEXTS]
    ids = {name: getattr(config, name, None) for name in names}
    tokens = {name: original.convert_ids_to_tokens(value) for name, value in ids.items() if isinstance(value, int)}
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(tokens.values()))})
    small |= {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    file.write_text(json.dumps(small, indent=1), encoding="utf-8")
    processor.tokenizer = tokenizer
    processor.save_pretrained(directory)


def copy_directory(source: Path, copy: Path, exchanged: Mapping[Path, Path], *, apart: Path) -> None:
    """Copy a directory with its links' targets, without hidden directories, environments, caches and large weights.

    Args:
        exchanged: What to copy in place of some files and directories, by absolute path.
        apart: Directory of the rehearsal, which is never copied.

    Raises:
        UsageError: it has too many files or bytes.
        ShardwrightError: it cannot be copied, such as to a full disk.
    """
    sizes: list[int] = []

    def omitted(directory: str, names: list[str]) -> list[str]:
        skipped = []
        for path in (Path(directory) / name for name in names):
            if path.is_dir():
                is_loop = path.is_symlink() and source.resolve().is_relative_to(path.resolve())
                is_hidden = path.name.startswith(".") or path.name in _OMITTED
                is_copied = not (is_hidden or is_loop or path == apart or (path / "pyvenv.cfg").is_file())
            else:
                is_copied = path.is_file() and os.access(path, os.R_OK)
                is_copied = is_copied and (path.suffix not in _WEIGHTS or path.stat().st_size <= _LARGEST_WEIGHTS_BYTES)
            if path in exchanged or not is_copied:
                skipped.append(path.name)
            elif path.is_file():
                sizes.append(path.stat().st_size)
        if len(sizes) > MOST_FILES or sum(sizes) > MOST_BYTES:
            rule = f"has over {MOST_FILES:,} files or {MOST_BYTES >> 30} GiB; a rehearsed script runs in a copy of it"
            fix = "start in a directory with the script's files, and pass data outside it by absolute paths"
            raise UsageError(ConfigError(where="script", value=str(source), rule=rule, fix=fix))
        return skipped

    try:
        shutil.copytree(source, copy, ignore=omitted, copy_function=shutil.copy)
        for path, small in exchanged.items():
            target = copy / path.relative_to(source) if path.is_relative_to(source) else copy
            if path.exists() and target != copy and target.parent.is_dir():
                (shutil.copytree if small.is_dir() else shutil.copy)(small, target)
    except OSError as error:
        # `copytree` collects the errors of all files.
        reason = error.strerror or str(error.args[0][0][-1])
        raise ShardwrightError(
            f"{source} cannot be copied for a rehearsed script ({reason}); free space, or set TMPDIR to another "
            "directory"
        ) from None


def _in_copy(path: Path, copies: Mapping[Path, Path]) -> Path:
    """Return where a path is in the copies of directories; paths outside them stay."""
    return next((copy / path.relative_to(root) for root, copy in copies.items() if path.is_relative_to(root)), path)


def exchanged_arguments(
    arguments: Sequence[str], plan: Plan, plan_directory: Path, work: Path, copies: Mapping[Path, Path]
) -> list[str]:
    """Return the arguments of a script, with the rehearsal's model and directory in place of the plan's.

    Other paths that exist, and absolute paths, become those in the copies of the user's directories. What is not copied
    is read from its original path, unless the flag names an output.
    """
    directory = plan_directory.absolute()

    def exchanged(value: str, flag: str) -> str:
        path = Path(os.path.abspath(value))  # noqa: PTH100, a link must not be resolved
        if plan.model.name in (value, str(path)):
            return str(work / "model")
        if path.is_relative_to(directory):
            return str(work / path.relative_to(directory))
        copied = _in_copy(path, copies)
        # `os.path.exists` is false for text that is longer than a path can be.
        if os.path.exists(path) and not os.path.exists(copied) and "output" not in flag:  # noqa: PTH110
            return str(path)
        # A relative path outside the copies would name another file there, or none.
        is_path = Path(value).is_absolute() or os.path.exists(path)  # noqa: PTH110
        return str(copied) if is_path and (copied != path or "output" not in flag) else value

    words = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        flag, sign, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        words.append(f"{flag}{sign}{exchanged(value, flag or before)}" if value else argument)
    return words


DEFAULT_STEPS = 8
FEWEST_STEPS = 4
"""The first two steps warm up, and the checkpoint is in the middle."""
TIME_LIMIT_SECONDS = 600.0


def rehearse(
    plan: str | Path | Plan,
    *,
    ranks: int | None = None,
    steps: int = DEFAULT_STEPS,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
    output_dir: str | Path | None = None,
    force: bool = False,
    script: str | Path | None = None,
    script_arguments: Sequence[str] = (),
    command: str = "",
) -> Rehearsal:
    """Launch a plan's files on CPU ranks with a shrunken model, check what happens, and write the report.

    With a `script`, the ranks run the user's script: it gets the shrunken model instead of the plan's, its
    `TrainingArguments` are scaled like the plan's, and `steps` limits its trainers.

    `plan` is a directory that `plan` wrote, with its files as they are now, or a `Plan`, whose report is written only
    if `output_dir` is set. A failed check is in the result and raises no exception. Notes and progress are logged.
    `command` is the command line for the report.

    Raises:
        UsageError: a value is invalid, or the ranks do not fit the layout.
        RefusedInputError: `plan.json` was not written by this version.
        ShardwrightError: the model's configuration cannot be read, or the report cannot be written.

    >>> rehearse("plan").passed  # doctest: +SKIP
    True
    """
    started = time.monotonic()
    errors = [] if script is None else script_errors(Path(script))
    stated = {"steps": steps, "ranks": FEWEST_STEPS if ranks is None else ranks}
    if wrong := [error for name, value in stated.items() if (error := not_a_count(name, value))]:
        raise UsageError([*errors, *wrong])
    if steps < FEWEST_STEPS:
        rule = f"must be at least {FEWEST_STEPS}: two steps warm up, and a checkpoint is saved in the middle"
        errors.append(ConfigError(where="steps", value=steps, rule=rule))
    if not time_limit_seconds > 0:
        errors.append(ConfigError(where="time_limit", value=time_limit_seconds, rule="must be more than 0 seconds"))
    if ranks is not None and ranks < 1:
        errors.append(ConfigError(where="ranks", value=ranks, rule="must be at least 1"))
    if errors:
        raise UsageError(errors)
    with (
        tempfile.TemporaryDirectory(prefix="shardwright-rehearsal-", ignore_cleanup_errors=True) as temporary,
        contextlib.ExitStack() as held,
    ):
        if isinstance(plan, Plan):
            loaded, directory = plan, Path(temporary) / "plan"
            plan.write(directory)
        else:
            loaded, directory = Plan.load(plan), Path(plan)
            directory = directory if directory.is_dir() else directory.parent
        if (difference := installed_release_difference(loaded)) is not None:
            logger.info(difference)
        target = Path(output_dir) if output_dir is not None else directory / "rehearsal"
        kept = output_dir is not None or not isinstance(plan, Plan)
        if kept:
            # The plan, whose directory is the default, may be in its model's directory.
            sources = {"the model": loaded.model.name if output_dir is not None else None}
            fix = "use --force to write into it"
            if errors := output_errors(target, force=force, own=(REPORT_FILE,), sources=sources, fix=fix):
                raise UsageError(errors)
        if loaded.model.task != "causal_lm":
            rule = f"is a {loaded.model.task} model; rehearse supports only causal language models"
            raise UsageError(ConfigError(where="model", value=loaded.model.architecture, rule=rule))
        settings = LaunchSettings(
            directory=directory,
            work=Path(temporary) / "work",
            ranks=choose_ranks(loaded.chosen.layout, ranks),
            steps=steps,
            time_limit_seconds=time_limit_seconds,
        )
        settings.work.mkdir()
        if kept:
            held.enter_context(reserved(target, force=force, own=(REPORT_FILE,)))
        own = None if script is None else (Path(script), tuple(script_arguments))
        rehearsal = _rehearse(loaded, settings, own)
        source = None if isinstance(plan, Plan) else str(directory)
        facts: dict[str, Any] = {"versions": dict(installed_versions()), "command": command}
        rehearsal = replace(rehearsal, source=source, seconds=time.monotonic() - started, **facts)
        if kept:
            rehearsal = replace(rehearsal, files=(str(target / REPORT_FILE),))
            write_files({REPORT_FILE: json.dumps(rehearsal.to_dict(), indent=2) + "\n"}, target, force=True)
    return rehearsal


def _rehearse(plan: Plan, settings: LaunchSettings, script: tuple[Path, Sequence[str]] | None) -> Rehearsal:
    """Check the files, then launch; the first failed check ends the rehearsal."""
    from ...plugins.planning import load_model_spec
    from ...plugins.transformers.loading import refuse_code

    rehearsal = Rehearsal(plan=plan, source=None, ranks=settings.ranks, steps=settings.steps, checks=())
    checks = check_files(settings.directory, plan)
    if any(check.name == "files" and not check.passed for check in checks):
        return replace(rehearsal, checks=with_unreached(checks))
    files = PlanFiles.read(settings.directory)
    settings.log_progress("reading the model's configuration")
    try:
        config = load_model_spec(plan.model.name, revision=plan.model.revision, packaged=True).config
    except UsageError as error:
        rule, fix = f"the plan's model {plan.model.name!r} must still exist", "plan again with its current location"
        raise UsageError([*error.errors, ConfigError(where="plan.json: model", rule=rule, fix=fix)]) from None
    refuse_code(config, plan.model.name)
    rehearsed = scale_plan(plan, files, config, ranks=settings.ranks, steps=settings.steps, work=settings.work)
    if script is not None:
        more, losses = rehearse_script(plan, files, rehearsed, settings, *script)
        return replace(rehearsal, checks=(*checks, *more), losses=losses, changes=rehearsed.changes)
    checks.append(check_optimizer(files.deepspeed, files.arguments))
    # The ranks load the base weights of adapters.
    model = make_model(settings.work, saved=plan.job.method != "full" or rehearsed.plan.job.task != "sft")
    class_names = {type(module).__name__ for module in model.modules()}
    checks.append(check_layer_classes(files.accelerate, plan, class_names))
    if all(check.passed for check in checks):
        rehearsal, more = _launch_all(rehearsal, rehearsed, settings)
        checks += more
    return replace(rehearsal, checks=with_unreached(checks), changes=rehearsed.changes)


def _launch_all(rehearsal: Rehearsal, rehearsed: Rehearsed, settings: LaunchSettings) -> tuple[Rehearsal, list[Check]]:
    work, worker, layout = settings.work, rehearsed.worker, rehearsed.plan.chosen.layout

    def launch(stage: Literal["train", "resume"], steps_before: int = 0) -> None:
        job = worker.model_copy(update={"stage": stage})
        try:
            launch_rehearsal(job, rehearsed, settings, STAGES[stage], steps_before=steps_before)
        except ShardwrightError as error:
            raise ShardwrightError(f"{stage}: {error}") from None

    try:
        launch("train")
    except ShardwrightError as error:
        return rehearsal, [failed("launch", str(error))]
    records = rank_records(work, "train", settings.ranks)
    losses = list(records[0]["losses"])
    bytes_by_phase: dict[str, dict[str, int]] = {}
    for phase in PHASES:
        # The plan's loss phase begins with the last layer's forward pass.
        metered = ("forward", "loss") if phase == "loss" else (phase,)
        roles = [record["roles"].get(name, {}) for record in records for name in metered]
        fullest = max(roles, key=lambda counts: sum(counts.values()))
        if fullest:
            bytes_by_phase[phase] = {role: fullest.get(role, 0) for role in ROLES}
    phases = cpu_rank_terms(layout, rehearsed.plan.model, rehearsed.plan.job)
    planned_host = max(terms.get(OFFLOADED, 0) for terms in phases.values())
    if TASKS[rehearsed.plan.job.task].head in ("fused", "score"):
        # Without logits the meter does not see where the backward pass begins.
        parts = phases["loss"], phases.pop("backward")
        phases["loss"] = max(parts, key=lambda terms: sum(terms.values()))
    predictions: dict[str, dict[str, Any]] = {}
    for name, terms in phases.items():
        if name in PHASES:
            # CPU ranks have both in the same memory, but the meter counts the host's apart.
            terms = {term: count for term, count in terms.items() if term != OFFLOADED}
            by_role: dict[str, int] = dict.fromkeys(ROLES, 0)
            for term, count in terms.items():
                by_role[TERMS[term].role] += count
            predictions[str(name)] = {**by_role, "terms": terms}
    rehearsal = replace(rehearsal, losses=tuple(losses), measured=bytes_by_phase, predicted=predictions)
    if layout.offloaded_checkpoints:
        measured_host = max(record["host_bytes"] for record in records)
        rehearsal = replace(rehearsal, host={"measured": measured_host, "predicted": planned_host})
    vocab_size = rehearsed.plan.model.dimensions.vocab_size
    learns = rehearsed.plan.job.task not in GROUPED_TASKS
    checks = check_training(records, ranks=settings.ranks, steps=settings.steps, vocab_size=vocab_size, learns=learns)
    checks.append(check_checkpoint(work / "checkpoints" / f"checkpoint-{worker.save_step}"))
    launched = passed("launch", f"{settings.ranks} ranks trained and ended")
    if not all(check.passed for check in checks):
        return rehearsal, [launched, *checks]
    try:
        launch("resume", settings.steps)
    except ShardwrightError as error:
        return rehearsal, [launched, *checks, failed("resume", str(error))]
    launched = passed("launch", f"{settings.ranks} ranks trained, ended, and resumed in a second launch")
    resumed = rank_records(work, "resume", settings.ranks)
    on_host = rehearsed.offloads_optimizer
    resumed_losses = resumed[0]["losses"]
    checks.append(check_resumed(losses, resumed_losses, save_step=worker.save_step, cpu_optimizer=on_host))
    files = work / "trained_logits.safetensors", work / "export_logits.safetensors"
    error_text = resumed[0].get("export_error")
    checks.append(check_export(work / "export", *files, error_text, precision=rehearsed.plan.job.precision))
    return rehearsal, [launched, *checks]
