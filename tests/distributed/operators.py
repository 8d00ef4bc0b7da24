"""Compiles DeepSpeed's CPU operators before ranks need them, and clears what a killed compilation left behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from launching import run

COMPILE_TIMEOUT_SECONDS = 600
DEEPSPEED_OPERATORS = ("cpu_adam", "deepspeed_shm_comm")
_COMPILE = """
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("CPUAdamBuilder").load(verbose=False)
get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
"""


def compile_deepspeed_operators() -> None:
    """Compile cpu_adam and the shared-memory communication operator into torch's extensions directory."""
    remove_stale_locks(extensions_directory())
    run(["-c", _COMPILE], timeout_seconds=COMPILE_TIMEOUT_SECONDS)


def extensions_directory() -> Path:
    """Return the directory in which torch keeps compiled extensions."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def remove_stale_locks(directory: Path) -> list[Path]:
    """Remove the `lock` files of DeepSpeed's operators below `directory` that no process has open, and say so.

    torch creates `lock` while it compiles; a compilation that was killed leaves it, and later ones wait for ever.
    """
    removed = []
    for lock in directory.glob("**/lock"):
        if lock.parent.name in DEEPSPEED_OPERATORS and not is_open_somewhere(lock):
            lock.unlink()
            removed.append(lock)
            print(f"removed {lock}: a compilation was killed and left it behind", file=sys.stderr)
    return removed


def is_open_somewhere(path: Path) -> bool:
    """Tell whether a process may have `path` open, as torch has while it compiles; without /proc the answer is yes."""
    target = str(path.resolve())
    return not Path("/proc/self/fd").is_dir() or any(name == target for name in _open_files())


def _open_files() -> Iterator[str]:
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            yield str(link.readlink())
        except OSError:
            continue
