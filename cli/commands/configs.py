"""`shardwright configs ls|cp`: the gallery of ready-made configurations."""

from __future__ import annotations

import json
from pathlib import Path

from cyclopts import App
from pydantic import Field

from ...ds_configs.plan.gallery import GALLERY, gallery_entry, gallery_plan
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.synonyms import REMOVED
from ..help import shown_examples
from ..options import ConfigFile, Output
from ..settings import FILLED, Options

app = App(name="configs", help="List ready-made configurations, or copy one.", help_epilogue=shown_examples("configs"))


@app.command(name="ls")
def list_command(subject: str = "", *, options: Options[Output] = FILLED) -> int:
    """List the gallery, or its entries with a word such as llama.

    Parameters
    ----------
    subject
        Part of a name.
    """
    if fix := REMOVED.get(f"configs={subject.lower()}"):
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
    print_rows(console(), ("name", "model", "hardware", "job"), table, folded={"job": 30})
    return 0


class Flags(ConfigFile):
    force: bool = Field(False, description="Replace the files of an earlier copy")


@app.command(name="cp")
def copy_command(name: str, output_dir: Path, *, options: Options[Flags] = FILLED) -> int:
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
