"""Checks of files: one configuration, an Accelerate YAML with its DeepSpeed JSON, or the directory of a plan."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ..models.model_config import parse_config_json
from ..models.stored_shapes import model_spec_from_config
from ..plan.plan import Plan
from ..plan.rendering import (
    DEEPSPEED_FILE,
    copied_configuration,
    copy_error,
    differing_keys,
    planned_training_arguments,
)
from ..specs.errors import ConfigError, InputError, UsageError, collecting
from ..specs.hardware import HardwareSpec, parse_hardware
from ..specs.model import ModelSpec
from ..specs.tasks import TrlTask
from ..specs.texts import strict_json
from .accelerate import check_accelerate
from .deepspeed import check_deepspeed
from .parsing import MAXIMUM_BYTES, detect_kind, parse
from .report import (
    Finding,
    Report,
    check_combinations,
    columns_of_accelerate,
    columns_of_deepspeed,
    load_keys,
    settings_of_accelerate,
    settings_of_deepspeed,
)
from .trl import check_trl


def check_text(
    text: str | bytes,
    *,
    filename: str,
    world_size: int | None = None,
    uses_transformers: bool = True,
    task: TrlTask | None = None,
) -> tuple[Finding, ...]:
    """Return the findings about one configuration file; does not raise errors for any content.

    `task` is that of a TRL file whose keys fit several.
    """
    report = parse(text, filename)
    if report.is_readable and detect_kind(report) == "trl" and report.root.entries:
        check_trl(report, world_size=world_size, task=task)
    else:
        _check_engine_file(report, world_size, uses_transformers)
    return report.in_order()


def _check_engine_file(report: Report, world_size: int | None, uses_transformers: bool) -> None:
    """Check a DeepSpeed JSON or an Accelerate YAML."""
    if report.is_readable and not report.root.entries:
        report.error("", "the file has no keys")
    elif report.is_readable and detect_kind(report) == "accelerate":
        check_accelerate(report, world_size=world_size)
    elif report.is_readable:
        check_deepspeed(report, world_size=world_size, uses_transformers=uses_transformers)


def _check_pair(launch: Report, config: Report, world_size: int | None, uses_transformers: bool) -> None:
    """Check a DeepSpeed JSON, and an Accelerate YAML only against it."""
    processes = launch.integer("num_processes") or world_size
    # The data-parallel processes: sequence-parallel ranks share one batch.
    sequence = launch.integer("parallelism_config.parallelism_config_sp_size") or 1
    check_deepspeed(
        config,
        world_size=(processes // sequence if processes and sequence >= 1 and processes % sequence == 0 else None),
        uses_transformers=uses_transformers,
    )
    wanted = launch.text("mixed_precision")
    opposite = {"bf16": "fp16", "fp8": "fp16", "fp16": "bf16"}.get(wanted or "")
    if opposite is not None and config.true(f"{opposite}.enabled"):
        rule = f"conflicts with {opposite}.enabled in {config.filename}"
        launch.error("mixed_precision", rule, "remove mixed_precision here: the DeepSpeed JSON sets the precision")
    if launch.has("fp8_config") and config.true("fp16.enabled"):
        launch.error("fp8_config", f"requires bf16, but {config.filename} enables fp16", "enable bf16 instead")
    if uses_transformers:
        check_combinations(config, settings_of_deepspeed(config), columns_of_accelerate(launch))
        check_combinations(launch, settings_of_accelerate(launch), columns_of_deepspeed(config))
    if not config.has("zero_optimization") and not uses_transformers:
        config.error("zero_optimization", "is missing, but Accelerate requires it", "add the section")
    init = str(launch.value("deepspeed_config.zero3_init_flag")).lower()
    stage = config.integer("zero_optimization.stage")
    if init == "true" and stage is not None and stage != 3:
        rule = f"has no effect: {config.filename} sets stage {stage}"
        launch.warning("deepspeed_config.zero3_init_flag", rule, "remove the key")


PLAN_FILE, ARGUMENTS_FILE, MEASUREMENT_FILE = "plan.json", "training_arguments.json", "plan_measurement.json"
SCRIPTS = ("launch.sh", "launch.sbatch", "hostfile")
CONFIGURATION = "accelerate.yaml"
"""Accelerate file in the directory of a plan, which uses the DeepSpeed JSON."""


def is_own_file(path: Path) -> bool:
    """Return whether a file belongs to a plan but is not a configuration of DeepSpeed or Accelerate."""
    own = path.name in (PLAN_FILE, ARGUMENTS_FILE, MEASUREMENT_FILE, *SCRIPTS)
    return own and (path.parent / PLAN_FILE).is_file()


def check_plan_directory(directory: Path) -> tuple[list[Finding], Plan | None]:
    """Return findings about the files of a plan, and the plan if it can be read."""
    try:
        plan = Plan.load(directory)
    except InputError as error:
        return [_error(config_error) for config_error in error.errors], None
    missing = [name for name in plan.file_names if not (directory / name).is_file()]
    fix = "write the plan again"
    findings = [_error(ConfigError(where=str(directory / name), rule="is missing", fix=fix)) for name in missing]
    if ARGUMENTS_FILE in missing:
        return findings, plan
    file = directory / ARGUMENTS_FILE
    try:
        arguments = strict_json(file.read_bytes())
    except (OSError, ValueError) as error:
        arguments, rule = None, f"is not valid JSON ({error})"
    else:
        rule = "must be a JSON object of TrainingArguments"
    if not isinstance(arguments, dict):
        return [*findings, _error(ConfigError(where=str(file), rule=rule, fix=fix))], plan
    for name, value in planned_training_arguments(plan).items():
        if arguments.get(name) != value:
            # The prediction of a plan holds for its own batch only.
            rule = f"differs from the plan's {value!r}, so the prediction does not apply"
            where, fix = f"{file}: {name}", "plan again with this value"
            difference = ConfigError(where=where, value=arguments.get(name), rule=rule, fix=fix)
            findings.append(Finding(kind="warning", error=difference))
    # Training arguments with which tiled MLPs or checkpoints in host memory cannot run.
    layout, errors = plan.chosen.layout, []
    checkpointing = arguments.get("gradient_checkpointing")
    if layout.offloaded_checkpoints and checkpointing is not True:
        rule, fix = "must be true: the plan keeps the inputs of recomputed layers in host memory", "write true"
        errors.append(ConfigError(where=f"{file}: gradient_checkpointing", value=checkpointing, rule=rule, fix=fix))
    kernels = arguments.get("liger_kernel_config") or {}
    replaced = [name for name in ("swiglu", "geglu") if kernels.get(name, True)]
    if layout.tiled_mlp and arguments.get("use_liger_kernel") and replaced:
        rule = f"must set {' and '.join(replaced)} to false: Liger and the plan's tiles both replace MLPs"
        fix = "set them to false, or plan with --tiled-mlp off"
        errors.append(ConfigError(where=f"{file}: liger_kernel_config", value=kernels or None, rule=rule, fix=fix))
    return findings + [_error(error) for error in errors], plan


def moved_finding(directory: Path, named: Path) -> Finding | None:
    """Return a warning if `accelerate.yaml` uses a DeepSpeed file outside its directory although it has one."""
    own = directory / named.name
    if not own.is_file() or (named.exists() and named.samefile(own)):
        return None
    rule = f"is {named}, but the plan is now in {directory}"
    fix = f"start with launch.sh or `shardwright launch`, or pass --deepspeed_config_file {own}"
    where = f"{directory / CONFIGURATION}: deepspeed_config.deepspeed_config_file"
    return Finding(kind="warning", error=ConfigError(where=where, rule=rule, fix=fix))


def _error(config_error: ConfigError) -> Finding:
    return Finding(kind="error", error=config_error)


SCHEMA_VERSION = 1
_NAMED_FILE = "deepspeed_config.deepspeed_config_file"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedFiles:
    """Findings about configuration files."""

    findings: tuple[Finding, ...]
    files: tuple[str, ...] = ()
    """Checked paths: the given files, and those that a directory or an Accelerate YAML refers to."""

    @property
    def errors(self) -> int:
        """Number of errors; warnings do not count."""
        return sum(finding.kind == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return what `shardwright check --format json` prints."""
        findings = [finding.to_dict() for finding in self.findings]
        return {
            "schema_version": SCHEMA_VERSION,
            "errors": self.errors,
            "findings": findings,
            "files": list(self.files),
        }


def check(
    *files: str | Path,
    num_processes: int | None = None,
    transformers: bool = True,
    task: TrlTask | None = None,
    hardware: str | HardwareSpec | None = None,
) -> CheckedFiles:
    """Find every error in DeepSpeed JSON, Accelerate YAML and TRL configuration files, whoever wrote them.

    Example: ``shardwright.check("ds_config.json", num_processes=8).errors``

    A path that cannot be read is a finding, not an exception. A DeepSpeed JSON that a YAML uses is checked once, for
    the number of processes that the YAML starts.

    Args:
        files: Paths. With an Accelerate YAML or a TRL file, the files that it names are checked too; with the directory
            of a plan, all of its files. A TRL file is also checked against the other files.
        num_processes: Ranks of the job, to check the batch equation.
        transformers: Whether the files are for the Trainer, which fills `auto` values.
        task: Task of TRL files, if their keys fit several.
        hardware: GPUs, such as `8xH100-80GB`, to check vLLM's share of a GPU; their number is the default of
            `num_processes`.

    Raises:
        UsageError: There are no files, or an argument is not valid. Errors in files are findings.
    """
    errors = []
    if not files:
        rule, fix = "at least one file is required", "pass a file or the directory of a plan"
        errors.append(ConfigError(where="files", rule=rule, fix=fix))
    if num_processes is not None and num_processes < 1:
        rule, fix = "must be at least 1", "omit it if unknown"
        errors.append(ConfigError(where="num_processes", value=num_processes, rule=rule, fix=fix))
    if task is not None and task not in get_args(TrlTask):
        rule, fix = f"must be one of {', '.join(get_args(TrlTask))}", "omit it for other files"
        errors.append(ConfigError(where="task", value=task, rule=rule, fix=fix))
    with collecting(errors):
        hardware = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    if errors:
        raise UsageError(errors)
    gpus = hardware if isinstance(hardware, HardwareSpec) else None
    world_size = num_processes or (gpus.world_size if gpus else None)
    paths = [Path(file) for file in files]
    findings: list[Finding] = []
    reports: dict[Path, Report] = {}
    checked: list[Path] = []
    directories = [path if path.is_dir() else path.parent for path in paths if _is_of_a_plan(path)]
    for directory in dict.fromkeys(directories):
        plan_findings, plan = check_plan_directory(directory)
        findings += plan_findings
        checked += [directory / name for name in (PLAN_FILE, ARGUMENTS_FILE) if (directory / name).is_file()]
        world_size = world_size or (None if plan is None else plan.hardware.world_size)
    configurations = [path / CONFIGURATION if _is_of_a_plan(path) and path.is_dir() else path for path in paths]
    for path in dict.fromkeys(path for path in configurations if not is_own_file(path)):
        content = read_config(path)
        checked.append(path)
        if isinstance(content, Finding):
            findings.append(content)
        else:
            reports[path] = parse(content, str(path))
    kinds = {path: detect_kind(report) for path, report in reports.items() if report.root.entries}
    launch: list[Report] = []
    for path in [path for path, kind in kinds.items() if kind == "trl"]:
        for file, report in _files_of_trl(reports[path]):
            if file is None:
                launch.append(report)
            elif file not in reports:
                reports[file] = report
                kinds[file] = "deepspeed" if report.root is reports[path].node("deepspeed") else detect_kind(report)
                checked += [file] if file.is_file() else []
    launch += [reports[path] for path, kind in kinds.items() if kind == "accelerate"]
    engines = [reports[path] for path, kind in kinds.items() if kind == "deepspeed"]
    in_pairs: set[str] = set()
    for path, report in reports.items():
        pair = Report(filename=report.filename, root=report.root)
        config = _deepspeed_file_of(path, pair)
        if config is not None and config.is_readable:
            _check_pair(pair, config, world_size, transformers)
            engines.append(config)
        findings += pair.findings
        if config is not None:
            findings += config.in_order()
            file = Path(config.filename)
            if file.is_file():
                in_pairs.add(os.path.realpath(file))
                checked.append(file)
    for path, report in reports.items():
        if os.path.realpath(path) in in_pairs:
            continue
        if kinds.get(path) == "trl":
            model, context_tokens = _local_model(report.text("model_name_or_path"))
            check_trl(
                report,
                task=task,
                launch=launch,
                engines=engines,
                world_size=world_size,
                model=model,
                context_tokens=context_tokens,
                gpu_bytes=gpus.gpu_bytes if gpus else None,
            )
        else:
            _check_engine_file(report, world_size, transformers)
        findings += report.in_order()
    # The user's spelling of a path wins over that of a YAML.
    by_path = {str(path.absolute()): str(path) for path in [*checked, *paths] if path in checked}
    return CheckedFiles(findings=tuple(findings), files=tuple(by_path.values()))


def _is_of_a_plan(path: Path) -> bool:
    try:
        return is_own_file(path / PLAN_FILE if path.is_dir() else path)
    except (OSError, ValueError):
        return False


def read_config(path: Path) -> bytes | Finding:
    """Return the bytes of a regular file of at most 1 MiB, or the finding why it cannot be read."""
    try:
        if path.is_dir():
            return _unreadable(path, "is a directory without plan.json", "pass the files in it")
        if not path.exists():
            return _unreadable(path, "does not exist", "check the spelling and the working directory")
        if not path.is_file():
            return _unreadable(path, "is not a regular file", "pass a JSON or YAML file")
        with path.open("rb") as stream:
            content = stream.read(MAXIMUM_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return _unreadable(path, f"cannot be read: {reason}")
    if len(content) > MAXIMUM_BYTES:
        return _unreadable(path, f"must be at most {MAXIMUM_BYTES} bytes", "pass a configuration file")
    return content


def _deepspeed_file_of(path: Path, launch: Report) -> Report | None:
    """Return the DeepSpeed configuration that an Accelerate YAML uses; `None` without one, or if it cannot be read.

    Adds findings about its path to the report of the YAML.
    """
    name = launch.text(_NAMED_FILE)
    if not name or detect_kind(launch) != "accelerate":
        return None
    of_plan = path.name == CONFIGURATION and (path.parent / PLAN_FILE).is_file()
    copy = copied_configuration(name)
    if copy is not None and not of_plan:
        return parse(copy, f"{path} {_NAMED_FILE}")
    if copy is not None:
        name = str(path.parent / DEEPSPEED_FILE)
        if not Path(name).is_file():
            rule, fix = f"is a copy of {DEEPSPEED_FILE}, which is missing", "write the plan again"
            launch.findings.append(_error(ConfigError(where=f"{path}: {_NAMED_FILE}", rule=rule, fix=fix)))
        elif keys := differing_keys(copy, path.parent):
            launch.findings.append(_error(copy_error(path.parent, keys)))
    elif of_plan and (moved := moved_finding(path.parent, Path(name))) is not None:
        launch.findings.append(moved)
        name = str(path.parent / Path(name).name)
    file = Path(name)
    try:
        if not file.exists() and (path.parent / name).exists():
            # Accelerate looks in the working directory, not in the directory of the YAML.
            rule = "is relative to the working directory, but the file is in the directory of this YAML"
            launch.warning(_NAMED_FILE, rule, f"launch from {path.parent}, or write an absolute path")
            file = path.parent / name
    except (OSError, ValueError):
        pass
    content = read_config(file)
    if isinstance(content, Finding):
        rule = "the file " + content.error.rule
        launch.error(_NAMED_FILE, rule, "write a path that is absolute or relative to the working directory")
        return None
    return parse(content, str(file))


def _unreadable(path: Path, rule: str, fix: str = "") -> Finding:
    return _error(ConfigError(where=str(path), rule=rule, fix=fix))


def _files_of_trl(report: Report) -> Iterator[tuple[Path | None, Report]]:
    """Yield the launch files that a TRL file names, without a path for those that TRL ships.

    Adds findings about their paths to the report.
    """
    presets = load_keys("trl")["accelerate_configs"]
    for key in ("accelerate_config", "config_file", "deepspeed"):
        name, node = report.text(key), report.node(key)
        if node is not None and node.kind == "mapping" and key == "deepspeed":
            filename = f"{report.filename} deepspeed"
            yield Path(filename), Report(filename=filename, root=node)
        elif name and key == "accelerate_config" and name in presets:
            yield None, parse(json.dumps(presets[name]), f"{name}.yaml of TRL")
        elif name:
            content = read_config(Path(name))
            if not isinstance(content, Finding):
                yield Path(name), parse(content, name)
                continue
            fix = "write a path that is absolute or relative to the working directory"
            if key == "accelerate_config":
                fix += f", or one of {', '.join(presets)}"
            report.error(key, f"the file {content.error.rule}", fix)


def _local_model(name: str | None) -> tuple[ModelSpec | None, int | None]:
    """Return a model whose `config.json` is on disk, and its longest context; `None` for what is not known."""
    path = Path(name) if name else None
    try:
        if path is None or not path.exists():
            return None, None
        content = read_config(path / "config.json" if path.is_dir() else path)
        config = parse_config_json(content, source=str(path)) if isinstance(content, bytes) else None
    except (OSError, ValueError):
        return None, None
    if config is None:
        return None, None
    spec = model_spec_from_config(config, name=str(path))
    context = (config.get("text_config") or config).get("max_position_embeddings")
    return spec, context if isinstance(context, int) else None
