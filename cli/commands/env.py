"""`shardwright env`: what to paste into a report; `env create`: an environment of its own for quantization."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App
from pydantic import Field

from ..examples import shown_examples
from ..options import FormatOptions
from ..progress import note
from ..settings import FILLED, Options, grouped

if TYPE_CHECKING:
    from ...plugins.llm_compressor.own_environment import OwnEnvironment

grouped(FormatOptions)
app = App(name="env", help="Print versions and hardware to paste into a report.", help_epilogue=shown_examples("env"))


@app.default
def env_command(*, options: Annotated[FormatOptions, Options] = FILLED) -> int:
    """Print versions, hardware and build tools, without secrets."""
    facts = environment_facts()
    if options.as_json:
        print(json.dumps({"schema_version": 1} | facts, indent=2))
        return 0
    for name, value in facts.items():
        shown = ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else value
        print(f"- {name}: {shown}")
    return 0


@grouped
class CreateOptions(FormatOptions):
    """Environment that is made."""

    path: Path = Field(Path("quantize-env"), description="Directory of the environment")
    source: str | None = Field(
        None, description="Shardwright itself: a directory, URL or requirement. Default: where this one came from"
    )
    force: bool = Field(False, description="Make an environment that lies there anew")
    dry_run: bool = Field(False, description="Show what would be installed; make nothing")


@app.command(name="create")
def create_command(
    extra: Literal["quantize"] = "quantize", *, options: Annotated[CreateOptions, Options] = FILLED
) -> int:
    """Make an environment of its own for quantization, with pip: the one that trains keeps its torch.

    pip reads its own settings, such as PIP_INDEX_URL. Example: shardwright env create quantize --path quantize-env

    Parameters
    ----------
    extra
        What it is for: quantize.
    """
    from ...plugins.llm_compressor.own_environment import create_environment, planned_environment

    planned = planned_environment(options.path, source=options.source, force=options.force)
    _tell_planned(planned)
    versions = {} if options.dry_run else create_environment(planned, notify=note)
    if options.as_json:
        from ...plugins.llm_compressor.own_environment import INSTALLED_BYTES

        found = {"path": str(options.path), "requirements": planned.requirements, "expected_bytes": INSTALLED_BYTES}
        print(json.dumps({"schema_version": 1} | found | {"versions": versions}, indent=2))
    elif options.dry_run:
        print("Nothing made; drop --dry-run to make it")
    else:
        from ..show import show_next

        print(f"Made {options.path}: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
        words = ("--scheme", "W4A16", "--dataset", "python-help", "--output-dir", "OUT")
        show_next(planned.command, extra, "MODEL", *words)
    return 0


def _tell_planned(planned: OwnEnvironment) -> None:
    from ...ds_configs.specs.units import gigabytes
    from ...plugins.llm_compressor.own_environment import INSTALLED_BYTES

    note(f"{planned.directory} would hold " + ", ".join(planned.requirements) + ", with all that they need")
    nearest = next(place for place in (planned.directory.absolute(), *planned.directory.absolute().parents)
                   if place.exists())  # fmt: skip
    free = shutil.disk_usage(nearest).free
    warning = ": too little for the CUDA build of torch" if free < INSTALLED_BYTES else ""
    note(f"it takes about {gigabytes(INSTALLED_BYTES)} GB; {gigabytes(free)} GB are free{warning}")


def environment_facts() -> dict[str, Any]:
    """Return what a report needs: system, libraries, accelerators, memory, and what DeepSpeed's builds need."""
    import psutil
    import torch

    from ...plugins.deepspeed.engine import has_libaio
    from ...plugins.llm_compressor.ceilings import installation_of_quantize
    from ...plugins.planning.from_names import installed_versions

    accelerators = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "none found")
    default_config = Path(os.path.expanduser("~/.cache/huggingface/accelerate/default_config.yaml"))  # noqa: PTH111
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "versions": dict(installed_versions()),
        "extra_quantize": installation_of_quantize(),
        "accelerators": ", ".join(accelerators) or "none",
        "cpu_cores": os.cpu_count(),
        "host_memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "cxx_compiler": compiler,
        "libaio": "found" if has_libaio() else "not found; NVMe offload needs libaio-dev",
        "accelerate_default_config": "present, but plans never read it" if default_config.exists() else "none",
    }
