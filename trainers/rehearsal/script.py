"""Rehearsal of a user's script with a shrunken plan, whose model and arguments replace the script's."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ...plugins.transformers.training_arguments import byte_tokenizer
from ..training.script import with_plan_flags
from .checks import Check, failed, passed
from .files import (
    SCRIPT_STAGE,
    LaunchSettings,
    PlanFiles,
    Rehearsed,
    RehearsedScriptJob,
    launch_rehearsal,
    make_model,
    rank_records,
)

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
    work = settings.work
    _write_small(files, rehearsed, work)
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


def copy_directory(source: Path, copy: Path, exchanged: Mapping[Path, Path], *, apart: Path) -> None:
    """Copy a directory with its links' targets, without hidden directories, environments, caches and large weights.

    Args:
        source: Directory to copy.
        copy: New directory.
        exchanged: What to copy in place of some files and directories, by absolute path.
        apart: Directory of the rehearsal, which is never copied.

    Raises:
        UsageError: it has too many files or bytes.
        ShardwrightError: it cannot be copied, such as to a full disk.
    """
    sizes: list[int] = []

    def omitted(directory: str, names: list[str]) -> list[str]:
        paths = [Path(directory) / name for name in names]
        skipped = [path.name for path in paths if path in exchanged or not _is_copied(path, source, apart)]
        sizes.extend(path.stat().st_size for path in paths if path.name not in skipped and path.is_file())
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


def _is_copied(path: Path, source: Path, apart: Path) -> bool:
    if path.is_dir():
        is_loop = path.is_symlink() and source.resolve().is_relative_to(path.resolve())
        is_hidden = path.name.startswith(".") or path.name in _OMITTED
        return not (is_hidden or is_loop or path == apart or (path / "pyvenv.cfg").is_file())
    is_readable = path.is_file() and os.access(path, os.R_OK)
    return is_readable and not (path.suffix in _WEIGHTS and path.stat().st_size > _LARGEST_WEIGHTS_BYTES)


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


def _write_small(files: PlanFiles, rehearsed: Rehearsed, work: Path) -> None:
    """Write the shrunken weights, a tokenizer of bytes, and the arguments that ranks scale."""
    import torch
    from transformers import AutoConfig

    # As the model's own checkpoint, whose type a script loads by default. DeepSpeed in fp32 trains no other type.
    dtype = AutoConfig.from_pretrained(work / "model", trust_remote_code=False).dtype
    dtype = dtype if dtype in (torch.bfloat16, torch.float32) else torch.float32
    if rehearsed.plan.chosen.layout.engine == "deepspeed":
        dtype = torch.bfloat16 if rehearsed.plan.job.precision == "bf16" else torch.float32
    make_model(work, saved=True, dtype=dtype)
    tokenizer = byte_tokenizer(rehearsed.plan.model.dimensions.vocab_size)
    tokenizer.chat_template = _CHAT_TEMPLATE
    # Collators of scripts pad.
    tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.save_pretrained(work / "model")
    (work / "training_arguments.json").write_text(json.dumps(files.arguments), encoding="utf-8")
