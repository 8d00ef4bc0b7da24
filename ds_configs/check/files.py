"""Checks files where they lie: each alone, and an Accelerate YAML together with the DeepSpeed JSON that it names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..plan.deepspeed_copy import DEEPSPEED_FILE, copied_configuration, copy_fault, differing_keys
from ..specs.errors import Fault, UsageError
from .pair import check_pair, check_text, parse_report
from .parsing import MAXIMUM_BYTES, detect_kind
from .plan_directory import CONFIGURATION, PLAN_FILE, check_plan_directory, is_own_file, moved_finding, own_file_names
from .report import Finding, Report
from .tree import Node

SCHEMA_VERSION = 1
"""Version of `check --format json`."""
_NAMED_FILE = "deepspeed_config.deepspeed_config_file"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedFiles:
    """Findings about configuration files."""

    findings: tuple[Finding, ...]
    """Errors and warnings, by file."""
    files: tuple[str, ...] = ()
    """Paths that were looked at: those that were named, and those that a directory or a YAML brought."""

    @property
    def errors(self) -> int:
        """Findings that stop a run, or that it disobeys."""
        return sum(finding.kind == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return what `shardwright check --format json` prints."""
        found = [finding.to_dict() for finding in self.findings]
        return {"schema_version": SCHEMA_VERSION, "errors": self.errors, "findings": found, "files": list(self.files)}


def check(*files: str | Path, num_processes: int | None = None, transformers: bool = True) -> CheckedFiles:
    """Find every fault in DeepSpeed JSON and Accelerate YAML files, whoever wrote them.

    Example: ``shardwright.check("ds_config.json", num_processes=8).errors``

    Args:
        files: Paths; an Accelerate YAML also brings the DeepSpeed JSON that it names, and a plan's directory all of
            its files.
        num_processes: Ranks of the job, to check the batch equation.
        transformers: Whether the files are for the Trainer, which fills in `auto`.

    Raises:
        UsageError: no file is named, or a number of processes that cannot be. What is wrong with a file is a finding.
    """
    faults = []
    if not files:
        faults.append(Fault(where="files", rule="none is named"))
    if num_processes is not None and num_processes < 1:
        faults.append(Fault(where="num_processes", value=num_processes, rule="must be at least 1"))
    if faults:
        raise UsageError(faults)
    return run_check([Path(file) for file in files], world_size=num_processes, uses_transformers=transformers)


def run_check(paths: Sequence[Path], *, world_size: int | None, uses_transformers: bool) -> CheckedFiles:
    """Check each file, and each Accelerate YAML together with the DeepSpeed JSON that it names.

    A directory with a `plan.json` stands for the files of that plan.

    Files are read, never written; a path that cannot be read is a finding, not an exception. A DeepSpeed
    JSON that a checked YAML names is checked once, for the number of processes that the YAML starts.
    """
    findings: list[Finding] = []
    contents: dict[Path, bytes] = {}
    checked: list[Path] = []
    directories = [path if path.is_dir() else path.parent for path in paths if _is_of_a_plan(path)]
    for directory in dict.fromkeys(directories):
        found, plan = check_plan_directory(directory)
        findings += found
        checked += [directory / name for name in own_file_names(directory)]
        world_size = world_size or (None if plan is None else plan.hardware.world_size)
    configurations = [path / CONFIGURATION if _is_of_a_plan(path) and path.is_dir() else path for path in paths]
    for path in dict.fromkeys(path for path in configurations if not is_own_file(path)):
        content = read_config(path)
        checked.append(path)
        if isinstance(content, Finding):
            findings.append(content)
        else:
            contents[path] = content
    in_pairs: set[str] = set()
    for path, content in contents.items():
        found, named = _check_named(path, content, world_size, uses_transformers)
        findings += found
        if named is not None:
            in_pairs.add(os.path.realpath(named))
            checked.append(named)
    for path, content in contents.items():
        if os.path.realpath(path) not in in_pairs:
            findings += check_text(
                content, filename=str(path), world_size=world_size, uses_transformers=uses_transformers
            )
    # As somebody named a file, not as a YAML does.
    by_place = {str(path.absolute()): str(path) for path in [*checked, *paths] if path in checked}
    return CheckedFiles(findings=tuple(findings), files=tuple(by_place.values()))


def _is_of_a_plan(path: Path) -> bool:
    try:
        return is_own_file(path / PLAN_FILE if path.is_dir() else path)
    except (OSError, ValueError):
        return False


def read_config(path: Path) -> bytes | Finding:
    """Return the bytes of a regular file of at most 1 MiB, or the reason why there are none."""
    try:
        if path.is_dir():
            return _refused(path, "is a directory without plan.json", "name the file in it")
        if not path.exists():
            return _refused(path, "does not exist", "check the spelling and the directory")
        if not path.is_file():
            return _refused(path, "is not a regular file")
        with path.open("rb") as stream:
            content = stream.read(MAXIMUM_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return _refused(path, f"cannot be read: {reason}")
    if len(content) > MAXIMUM_BYTES:
        return _refused(path, f"is larger than {MAXIMUM_BYTES} bytes, which no configuration is")
    return content


def _check_named(
    path: Path, content: bytes, world_size: int | None, uses_transformers: bool
) -> tuple[list[Finding], Path | None]:
    """Check the DeepSpeed JSON that an Accelerate YAML names; return its path when it was checked."""
    launch, _ = parse_report(content, str(path))
    if launch is None or detect_kind(launch, str(path)) != "accelerate":
        return [], None
    report = Report(launch, str(path))
    name = report.text(_NAMED_FILE)
    if not name:
        return [], None
    of_plan = path.name == CONFIGURATION and (path.parent / PLAN_FILE).is_file()
    copy = copied_configuration(name)
    if copy is not None and not of_plan:
        return _check_both((launch, str(path)), copy, f"{path} {_NAMED_FILE}", world_size, uses_transformers), None
    if copy is not None:
        name = str(path.parent / DEEPSPEED_FILE)
        report.findings += _copy_findings(path, copy)
    elif of_plan:
        moved = moved_finding(path.parent, Path(name))
        report.findings += [] if moved is None else [moved]
        name = name if moved is None else str(path.parent / Path(name).name)
    named = _locate(path, name, report)
    config = read_config(named)
    if isinstance(config, Finding):
        rule = "names a file that " + config.fault.rule
        report.error(_NAMED_FILE, rule, "the path is taken from the directory of the launch")
        return report.findings, None
    found = _check_both((launch, str(path)), config, str(named), world_size, uses_transformers)
    return [*report.findings, *found], named


def _check_both(
    launch: tuple[Node, str], config: str | bytes, filename: str, world_size: int | None, uses_transformers: bool
) -> list[Finding]:
    """Check a DeepSpeed JSON and the Accelerate YAML that brings it together."""
    tree, findings = parse_report(config, filename)
    if tree is None:
        return findings
    checked = check_pair(launch, (tree, filename), world_size=world_size, uses_transformers=uses_transformers)
    return [*findings, *checked]


def _copy_findings(path: Path, copy: str) -> list[Finding]:
    """Return what is wrong with the copy in a plan's YAML, beside the file that it copies."""
    if not (path.parent / DEEPSPEED_FILE).is_file():
        where = f"{path}: {_NAMED_FILE}"
        return [
            _error(Fault(where=where, rule=f"copies {DEEPSPEED_FILE}, which is missing", fix="write the plan again"))
        ]
    keys = differing_keys(copy, path.parent)
    return [_error(copy_fault(path.parent, keys))] if keys else []


def _locate(path: Path, name: str, report: Report) -> Path:
    """Return the named file; Accelerate looks in the working directory, never beside the YAML."""
    try:
        beside = path.parent / name
        if not Path(name).exists() and beside.exists():
            rule = "is read from the directory of the launch, and the file lies beside this YAML"
            report.warning(_NAMED_FILE, rule, f"launch from {path.parent}, or write an absolute path")
            return beside
    except (OSError, ValueError):
        pass
    return Path(name)


def _refused(path: Path, rule: str, fix: str = "") -> Finding:
    return _error(Fault(where=str(path), rule=rule, fix=fix))


def _error(fault: Fault) -> Finding:
    return Finding(kind="error", fault=fault)
