"""`shardwright env`: what to paste into a report."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

from ..options import FormatOptions
from ..settings import FILLED, Options


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
