"""`shardwright configs ls|cp`: the gallery of ready-made configurations."""

from __future__ import annotations

import json
from difflib import get_close_matches
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from .. import ds_configs
from ..ds_configs.errors import Fault, UsageError
from ..ds_configs.plan import Plan
from ..ds_configs.reasons import display_name
from ..ds_configs.units import gigabytes

app = App(name="configs", help="List the ready-made configurations, or copy one.")


@app.command(name="ls")
def list_command(subject: str = "", /, *, format: Literal["human", "json"] = "human") -> int:
    """List the gallery; a word narrows it, such as llama or lora.

    Parameters
    ----------
    subject
        Text that a name must hold.
    format
        human or json; json prints one object on stdout.
    """
    plans = {name: load_entry(name) for name in entry_names() if subject.lower() in name.lower()}
    rows = [
        {
            "name": name,
            "model": plan.model.name,
            "hardware": plan.hardware.name,
            "strategy": plan.chosen.strategy.label,
            "peak_bytes": plan.chosen.memory.gpu.peak_bytes,
        }
        for name, plan in plans.items()
    ]
    if format == "json":
        print(json.dumps({"schema_version": 1, "configs": rows}, indent=2))
        return 0
    from rich.table import Table

    from .show import console

    table = Table(box=None, pad_edge=False)
    for column in ("name", "strategy", "micro-batch", "GB per accelerator"):
        table.add_column(column, justify="right" if column in ("micro-batch", "GB per accelerator") else "left")
    for name, plan in plans.items():
        strategy, gpu = plan.chosen.strategy, plan.chosen.memory.gpu
        table.add_row(name, display_name(strategy), str(strategy.micro_batch_size), gigabytes(gpu.peak_bytes))
    console().print(table)
    return 0


@app.command(name="cp")
def copy_command(name: str, output_dir: Path, *, force: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Copy one configuration of the gallery into a directory, with the paths of that directory in it.

    Parameters
    ----------
    name
        A name that `configs ls` prints.
    output_dir
        Where the files go.
    force
        Replace the files of an earlier copy.
    """
    plan = load_entry(name)
    for path in plan.write(output_dir, force=force):
        print(path)
    return 0


def entry_names() -> list[str]:
    """Return the names of all gallery entries."""
    return sorted(entry.name for entry in _gallery().iterdir() if entry.joinpath("plan.json").is_file())


def load_entry(name: str) -> Plan:
    """Return the plan of a gallery entry.

    Raises:
        UsageError: there is no such entry; the nearest names are given.
    """
    names = entry_names()
    if name not in names:
        near = get_close_matches(name, names, n=3, cutoff=0.3)
        raise UsageError(
            Fault(where="name", value=name, rule="is not in the gallery", fix=f"nearest: {', '.join(near) or 'none'}")
        )
    with as_file(_gallery().joinpath(name, "plan.json")) as path:
        return Plan.load(path)


def _gallery() -> Traversable:
    return files(ds_configs).joinpath("gallery")
