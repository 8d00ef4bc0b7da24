"""`shardwright env`: versions and hardware."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from ... import __version__
from ..options import Output
from ..settings import FILLED, Options


def env_command(*, options: Options[Output] = FILLED) -> int:
    """Print versions, hardware and build tools, without secrets."""
    facts = environment_facts()
    if options.as_json:
        print(json.dumps({"schema_version": 1} | facts, indent=2))
        return 0
    versions, tested, problems = facts.pop("versions"), facts.pop("tested"), facts.pop("release_problems")
    for name, value in facts.items():
        print(f"- {name}: {value}")
    width = max(map(len, versions))
    print("- versions, installed and tested:")
    for name, version in versions.items():
        print(f"  {name:{width}}  {version:14}  tested {tested[name]}")
    for problem in problems:
        print(f"- release problem: {problem}")
    return 0


def environment_facts() -> dict[str, Any]:
    """Return system, libraries, accelerators, memory and the build tools of DeepSpeed."""
    import psutil

    from ...plugins.deepspeed.engine import has_libaio
    from ...plugins.releases import installed_version, release_errors, release_warnings, tested_releases

    try:
        import torch

        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        accelerators = ", ".join(names) or "none"
    except Exception as error:  # Bug reports matter most when torch does not load.
        accelerators = f"unknown: torch cannot be used ({error})"
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "none found")
    default_config = Path(os.path.expanduser("~/.cache/huggingface/accelerate/default_config.yaml"))  # noqa: PTH111
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "shardwright": __version__,
        "versions": {name: installed_version(name) or "not installed" for name in tested_releases()},
        "tested": {name: str(tested) for name, tested in tested_releases().items()},
        "release_problems": [*map(str, release_errors()), *release_warnings()],
        "accelerators": accelerators,
        "cpu_cores": os.cpu_count(),
        "host_memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "cxx_compiler": compiler,
        "libaio": "found" if has_libaio() else "not found; NVMe offload needs libaio-dev",
        "accelerate_default_config": "present; plans do not use it" if default_config.exists() else "none",
    }
