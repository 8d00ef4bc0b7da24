"""`shardwright check`, `schema` and `configs ls|cp`: configuration files, their JSON schemas, and ready-made ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from pydantic import Field, TypeAdapter

from ...ds_configs.check.files import check
from ...ds_configs.check.report import Finding
from ...ds_configs.plan.answers import ANSWERS
from ...ds_configs.plan.gallery import GALLERY, gallery_entry, gallery_plan
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.hardware import HardwareSpec
from ...ds_configs.specs.synonyms import removals
from ..main import shown_examples
from ..options import CheckedFor, ConfigFile, Output, PlanSettings
from ..settings import FILLED, Options


class CheckFlags(ConfigFile):
    format: Literal["human", "json", "github"] = Field(
        "human", description="Output on stdout; github: annotations of a GitHub workflow"
    )


def check_command(
    files: Annotated[list[Path], Parameter(negative="", json_list=False)],
    *,
    facts: Options[CheckedFor] = FILLED,
    options: Options[CheckFlags] = FILLED,
) -> int:
    """Find all errors in DeepSpeed, Accelerate and TRL configuration files.

    The exit code is 2 for errors, and 0 for warnings only.

    Parameters
    ----------
    files
        Files, or the directory of a plan. Files that an Accelerate YAML or a TRL file names are checked too.
    """
    hardware = None
    if facts.hardware is not None:
        from ...plugins.planning import read_hardware

        hardware = read_hardware(facts.hardware)
    result = check(*files, **facts.model_dump(exclude={"hardware"}), hardware=hardware)
    if options.format == "json":
        print(json.dumps(result.to_dict(), indent=2))
    elif options.format == "github":
        for finding in result.findings:
            print(annotation(finding))
    else:
        from rich.text import Text

        from ..show import console

        out = console()

        for finding in sorted(result.findings, key=lambda item: item.kind != "error"):
            style = "bold red" if finding.kind == "error" else "yellow"
            out.print(Text.assemble((f"{finding.kind}: ", style), str(finding.error)))
        warnings = len(result.findings) - result.errors
        if not {str(file) for file in files}.issuperset(result.files):
            console().print(f"Checked {', '.join(result.files)}", markup=False)
        console().print(f"{len(result.files)} file(s): {result.errors} error(s), {warnings} warning(s)")
    return 2 if result.errors else 0


_PLACE = re.compile(r"(?P<file>.+?):(?:(?P<line>\d+))? ?(?P<key>.*)", re.DOTALL)


def annotation(finding: Finding) -> str:
    """Return a finding as a command of a GitHub workflow, which shows it at its line of the file."""

    def escaped(text: str, also: str = "") -> str:
        return "".join(f"%{ord(sign):02X}" if sign in "%\r\n" + also else sign for sign in text)

    place = _PLACE.fullmatch(finding.error.where)
    file, line, key = (finding.error.where, None, "") if place is None else place.group("file", "line", "key")
    fields = {"file": file, "line": line or "1", "title": f"Shardwright: {key}" if key else "Shardwright"}
    listed = ",".join(f"{name}={escaped(text, ':,')}" for name, text in fields.items())
    return f"::{finding.kind} {listed}::{escaped(str(finding.error))}"


SUBJECTS = ("settings", "hardware", *ANSWERS)


def schema_command(subject: str = "settings", *, options: Options[Output] = FILLED) -> int:
    """Print the JSON schema of a file that you write, or of an answer; in one line with `--format json`.

    Parameters
    ----------
    subject
        settings (YAML of plan --config), hardware (YAML of --hardware), or plan-answer, check-answer or
        error-answer: what `plan`, `check` and `explain --error` print with --format json.
    """
    if subject not in SUBJECTS:
        rule, fix = f"must be one of {', '.join(SUBJECTS)}", removals().get(f"subject={subject}", "")
        raise UsageError(ConfigError(where="subject", value=subject, rule=rule, fix=fix))
    schema = TypeAdapter(ANSWERS[subject]).json_schema() if subject in ANSWERS else PlanSettings.model_json_schema()
    if subject == "hardware":
        schema = TypeAdapter(HardwareSpec).json_schema() | {"additionalProperties": False}
        fields = schema["properties"]
        del fields["assumed"], schema["required"]
        for name, field in fields.items():
            if "bytes" in name or "flops" in name:
                fields[name] = {"title": field["title"], "anyOf": [{"type": "number"}, {"type": "string"}]}
    print(json.dumps(schema, indent=None if options.as_json else 2))
    return 0


app = App(name="configs", help="List ready-made configurations, or copy one.", help_epilogue=shown_examples("configs"))


@app.command(name="ls")
def list_command(subject: str = "", *, options: Options[Output] = FILLED) -> int:
    """List the gallery, or its entries with a word such as llama.

    Parameters
    ----------
    subject
        Part of a name.
    """
    if fix := removals().get(f"configs={subject.lower()}"):
        raise UsageError(ConfigError(where="subject", value=subject, rule="is not in the gallery", fix=fix))
    entries = [entry for entry in GALLERY if subject.lower() in entry.name.lower()]
    if options.as_json:
        listed = [
            {"name": entry.name, "model": entry.model, "hardware": entry.hardware, "job": dict(entry.job)}
            for entry in entries
        ]
        print(json.dumps({"schema_version": 1, "configs": listed}, indent=2))
        return 0
    from ..show import console, print_rows

    table = [
        (entry.name, entry.model, entry.hardware, ", ".join(f"{name} {value}" for name, value in entry.job.items()))
        for entry in entries
    ]
    print_rows(console(), ("name", "model", "hardware", "job"), table)
    return 0


class CopyFlags(ConfigFile):
    force: bool = Field(False, description="Replace the files of an earlier copy")


@app.command(name="cp")
def copy_command(name: str, output_dir: Path, *, options: Options[CopyFlags] = FILLED) -> int:
    """Copy a configuration with its paths changed to the new directory.

    Parameters
    ----------
    name
        A name from `configs ls`.
    output_dir
        Directory for the files.
    """
    paths = gallery_plan(gallery_entry(name)).write(output_dir, force=options.force)
    for path in paths:
        print(path)
    return 0
