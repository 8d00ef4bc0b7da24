"""Reports of directories: `report_html` makes the page of a run, `write_html` saves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...ds_configs.plan.output import write_files
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ...ds_configs.specs.texts import strict_json
from .report import Report, html
from .runs import evaluation_report, plan_report, quantization_report, training_report

REPORT_FILE = "report.html"
TRAINING_FILE, METRICS_FILE, PLAN_DIRECTORY = "report.json", "metrics.jsonl", "plan"
SCHEMA_VERSION = 1
"""Of every file that is read here."""


def read_report(path: Path) -> Report:
    """Return the report of a command's output directory, or of the one file with its results.

    Raises:
        UsageError: there is nothing to report, or it cannot be read.
        RefusedInputError: a file is damaged or of another version.
    """
    directory, names = (path, list(_READERS)) if path.is_dir() else (path.parent, [path.name])
    for name in names:
        if name in _READERS and (directory / name).is_file():
            try:
                return _READERS[name](directory)
            except (KeyError, TypeError, AttributeError, IndexError, ValueError, ZeroDivisionError) as error:
                if isinstance(error, UsageError | RefusedInputError):
                    raise
                rule = f"is not a file of this version ({type(error).__name__}: {str(error).splitlines()[0]})"
                fix = "run the command again"
                raise RefusedInputError(ConfigError(where=str(directory / name), rule=rule, fix=fix)) from None
    rule = f"contains none of {', '.join(_READERS)}" if path.exists() else "no such file or directory"
    fix = "pass the output directory of plan, train, distill, qat, quantize or evaluate"
    raise UsageError(ConfigError(where="run", value=str(path), rule=rule, fix=fix))


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(ConfigError(where=str(file), rule=f"cannot be read ({error.strerror})")) from None


def _json(file: Path) -> Mapping[str, Any]:
    data: Any = strict_json(_content(file))
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        rule = f"must be {SCHEMA_VERSION} for this version of Shardwright"
        where = f"{file}: schema_version"
        raise RefusedInputError(ConfigError(where=where, value=version, rule=rule, fix="run the command again"))
    return dict(data)


def _training(directory: Path) -> Report:
    lines = _content(directory / METRICS_FILE).splitlines()
    plan = Plan.load(directory / PLAN_DIRECTORY)
    return training_report(_json(directory / TRAINING_FILE), [strict_json(line) for line in lines], plan)


_READERS: Mapping[str, Callable[[Path], Report]] = {
    TRAINING_FILE: _training,
    "quantization.json": lambda directory: quantization_report(_json(directory / "quantization.json")),
    "evaluation.json": lambda directory: evaluation_report(_json(directory / "evaluation.json")),
    "plan.json": lambda directory: plan_report(Plan.load(directory)),
}
"""Reader by file, in the order in which files are looked up."""


def report_html(run: str | Path) -> str:
    """Return the report of a command's output directory as one HTML file without external resources.

    Raises:
        UsageError: the directory has nothing to report.
        RefusedInputError: a file is damaged or of another version.
    """
    return html(read_report(Path(run)))


def write_html(directory: Path) -> Path:
    """Write `report.html` into the directory of a run, and return its path.

    Raises:
        ShardwrightError: the file cannot be written.
    """
    (path,) = write_files({REPORT_FILE: report_html(directory)}, directory, force=True)
    return path
