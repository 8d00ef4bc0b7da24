"""What a host may lack: looked for once, and named with the line that would let its tests run.

`TESTS_REQUIRE`, names separated by commas, makes a missing one an error: CI installs what it can.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from browsing import chromium_program


def _has_libaio() -> bool:
    from shardwright.plugins.deepspeed.engine import has_libaio

    return has_libaio()


def _processor_has(flag: str) -> bool:
    information = Path("/proc/cpuinfo")
    return information.is_file() and flag in information.read_text().split()


def _has_accelerator() -> bool:
    import torch

    return bool(torch.cuda.is_available())


OPTIONAL: dict[str, tuple[Callable[[], bool], str]] = {
    "libaio": (_has_libaio, "apt-get install libaio-dev (its header, for NVMe offload)"),
    "avx512_bf16": (lambda: _processor_has("avx512_bf16"), "a processor with AVX512-BF16"),
    "accelerator": (_has_accelerator, "a GPU and a CUDA build of torch"),
    "chromium": (lambda: chromium_program() is not None, "apt-get install chromium (to look at pages)"),
    "zsh": (lambda: shutil.which("zsh") is not None, "apt-get install zsh (to complete in it)"),
    "bash-completion": (
        lambda: Path("/usr/share/bash-completion/bash_completion").is_file(),
        "apt-get install bash-completion",
    ),
    "trl": (lambda: importlib.util.find_spec("trl") is not None, "pip install trl"),
    "llmcompressor": (lambda: importlib.util.find_spec("llmcompressor") is not None, "pip install '.[quantize]'"),
    "no-kernels": (lambda: importlib.util.find_spec("kernels") is None, "pip uninstall kernels"),
}
"""Whether it is there, and the way to have it."""


def require(*names: str) -> None:
    """Skip the running test where something is missing, or fail it where that must be there."""
    for name in names:
        is_there, remedy = OPTIONAL[name]
        if not is_there():
            message = f"this host lacks {name}: {remedy}"
            if name in os.environ.get("TESTS_REQUIRE", "").split(","):
                pytest.fail(message)
            pytest.skip(message)
