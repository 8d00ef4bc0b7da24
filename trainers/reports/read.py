"""Reading of a run's directory, with care: it may be somebody else's, damaged, or of another version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...ds_configs.plan.measurement import FILE_NAME as MEASUREMENT_FILE
from ...ds_configs.plan.measurement import measurement_from_text
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import Fault, RefusedInputError, UsageError
from ...ds_configs.specs.json_text import strict_json
from .evaluated import evaluation_page, quantization_page
from .measured import measurement_page
from .page import Page
from .planned import plan_page
from .rehearsed import rehearsal_page
from .trained import training_page

TRAINING_FILE, METRICS_FILE, PLAN_DIRECTORY = "report.json", "metrics.jsonl", "plan"
SCHEMA_VERSION = 1
"""Of every file that is read here."""
_LARGEST_BYTES = 64 * 2**20
"""A training that logs a million steps leaves less."""


def read_page(place: Path) -> Page:
    """Return the report of what a command left in a directory, or of the one file that holds its figures.

    Raises:
        UsageError: there is nothing to report, or it cannot be read.
        RefusedInputError: a file is damaged or of another version.
    """
    directory, names = (place, list(_READERS)) if place.is_dir() else (place.parent, [place.name])
    for name in names:
        if name in _READERS and (directory / name).is_file():
            try:
                return _READERS[name](directory)
            except (KeyError, TypeError, AttributeError, IndexError, ValueError, ZeroDivisionError) as error:
                if isinstance(error, UsageError | RefusedInputError):
                    raise
                rule = f"is not one that this version wrote ({type(error).__name__}: {str(error).splitlines()[0]})"
                raise RefusedInputError(Fault(where=str(directory / name), rule=rule, fix="run it again")) from None
    rule = f"holds none of {', '.join(_READERS)}" if place.exists() else "no such file or directory"
    fix = "name the output directory of plan, rehearse, train, distill, qat, quantize or evaluate"
    raise UsageError(Fault(where="run", value=str(place), rule=rule, fix=fix))


def _content(file: Path) -> bytes:
    try:
        if file.stat().st_size > _LARGEST_BYTES:
            raise RefusedInputError(Fault(where=str(file), rule=f"is over {_LARGEST_BYTES} bytes"))
        return file.read_bytes()
    except OSError as error:
        raise UsageError(Fault(where=str(file), rule=f"cannot be read ({error.strerror})")) from None


def _json(file: Path) -> Mapping[str, Any]:
    data = strict_json(_content(file))
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        found = data.get("schema_version") if isinstance(data, dict) else None
        rule = f"this version reads {SCHEMA_VERSION}"
        raise RefusedInputError(Fault(where=f"{file}: schema_version", value=found, rule=rule, fix="run it again"))
    return data


def _training(directory: Path) -> Page:
    lines = _content(directory / METRICS_FILE).splitlines()
    plan = Plan.load(directory / PLAN_DIRECTORY)
    return training_page(_json(directory / TRAINING_FILE), [strict_json(line) for line in lines], plan)


_READERS: Mapping[str, Callable[[Path], Page]] = {
    TRAINING_FILE: _training,
    "quantization.json": lambda directory: quantization_page(_json(directory / "quantization.json")),
    "evaluation.json": lambda directory: evaluation_page(_json(directory / "evaluation.json")),
    "rehearsal.json": lambda directory: rehearsal_page(_json(directory / "rehearsal.json")),
    MEASUREMENT_FILE: lambda directory: measurement_page(
        measurement_from_text(_content(directory / MEASUREMENT_FILE), source=str(directory / MEASUREMENT_FILE))
    ),
    "plan.json": lambda directory: plan_page(Plan.load(directory)),
}
"""Reader of each file that a report is made from, in the order in which they are looked for."""
