"""DeepSpeed's CPU operators: compile them before ranks need them, and find locks left by killed compilations.

Observed with deepspeed 0.19.8 and torch 2.13.0: operators are compiled at first use into `TORCH_EXTENSIONS_DIR`, for 1
to 3 minutes; `async_io` has 15 files that include all of torch, 20 CPU-minutes. torch creates
`<operator>/lock` meanwhile (torch/utils/file_baton.py) and holds it open. A compilation or rank that is killed leaves
the lock behind, and every later one waits for it silently.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ShardwrightError
from .. import patches
from ..launching.launch import Launch, LaunchFailedError, launch_ranks

# Two processors compile `async_io` in ten minutes. Beside other work they took more than thirty.
COMPILE_TIMEOUT_SECONDS = 4200.0
ABANDONED_SECONDS = 10.0
BUILDERS: Mapping[str, str] = {
    "cpu_adam": "CPUAdamBuilder",
    "cpu_adagrad": "CPUAdagradBuilder",
    "cpu_lion": "CPULionBuilder",
    "deepspeed_shm_comm": "ShareMemCommBuilder",
    "async_io": "AsyncIOBuilder",
}
"""DeepSpeed's builder for each operator that CPU ranks may load."""
_BUILT_ALONG: Mapping[str, tuple[str, ...]] = {"async_io": ("pin_memory",)}
"""Operators that another operator's builder compiles first in deepspeed 0.19.8 (`op_builder/async_io.py`)."""

_COMPILE = """
import sys
from deepspeed.accelerator import get_accelerator
for builder in sys.argv[1:]:
    get_accelerator().create_op_builder(builder).load(verbose=False)
"""


logger = logging.getLogger(__name__)


class StaleLockError(ShardwrightError):
    """A killed compilation left a lock that every later compilation would wait for."""

    def __init__(self, locks: Sequence[Path]) -> None:
        lines = [
            f"{lock}: a killed compilation left this lock, and a launch would wait for it forever; no process has it "
            f"open (`fuser {lock}` prints nothing); delete it: rm {lock}"
            for lock in locks
        ]
        super().__init__("\n".join(lines))
        self.locks = tuple(locks)


def needed_operators(*, offload_optimizer: bool, nvme: bool, optimizer: str) -> tuple[str, ...]:
    """Return the operators that DeepSpeed loads on CPU ranks; `optimizer` is a value of the Trainer's `optim`."""
    operators = ["deepspeed_shm_comm"]
    if offload_optimizer:
        kind = "adagrad" if "adagrad" in optimizer else "lion" if "lion" in optimizer else "adam"
        operators.append(f"cpu_{kind}")
    if nvme:
        operators.append("async_io")
    return tuple(operators)


def prepare_operators(operators: Sequence[str]) -> None:
    """Compile operators that are not compiled yet, so that launches with short time limits do not wait for them.

    Raises:
        StaleLockError: a killed compilation left its lock.
        ShardwrightError: the compilation fails.
    """
    directory = extensions_directory()
    # A process of another machine or container may hold the lock of a compiled operator while it loads the operator.
    locks = stale_locks(directory, operators)
    if locks := [lock for lock in locks if is_abandoned(lock) or not is_compiled(directory, lock.parent.name)]:
        raise StaleLockError(locks)
    missing = [name for name in operators if not is_compiled(directory, name)]
    if not missing:
        return
    duration = "20 CPU-minutes" if "async_io" in missing else "1-3 minutes"
    logger.info(f"compiling DeepSpeed's CPU operators ({', '.join(missing)}), once, {duration}")
    try:
        launch_ranks(
            Launch(arguments=("-c", _COMPILE, *(BUILDERS[name] for name in missing))),
            timeout_seconds=COMPILE_TIMEOUT_SECONDS,
        )
    except LaunchFailedError as error:
        raise ShardwrightError(f"cannot compile DeepSpeed's operators {', '.join(missing)}: {error}") from None
    finally:
        # There were no locks before, and this compilation has ended: a remaining lock is its own.
        for lock in stale_locks(directory, missing):
            lock.unlink(missing_ok=True)


def break_abandoned_locks() -> None:
    """Make ranks that load an operator remove a lock left by a killed process.

    The lock of a compiled operator is held only while its file is loaded. If it is older than `ABANDONED_SECONDS` and
    no process of this host has it open, nothing will remove it.
    """

    def passing_abandoned(wait: Callable[[Any], None]) -> Callable[[Any], None]:
        def wait_for_holder(self: Any) -> None:
            lock = Path(self.lock_file_path)
            while lock.exists() and not is_abandoned(lock):
                time.sleep(self.wait_seconds)
            if lock.exists():
                print(f"removed {lock}, left by a killed process", file=sys.stderr, flush=True)
                lock.unlink(missing_ok=True)
            wait(self)

        return wait_for_holder

    patches.apply("abandoned-locks", passing_abandoned)


def is_abandoned(lock: Path) -> bool:
    """Return whether the lock of a compiled operator was left by a killed process."""
    try:
        age = time.time() - lock.stat().st_mtime
    except OSError:
        return False
    return any(lock.parent.glob("*.so")) and age > ABANDONED_SECONDS and not is_open_somewhere(lock)


def extensions_directory() -> Path:
    """Return the root directory of torch's compiled extensions."""
    if configured := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(configured)
    from torch.utils.cpp_extension import get_default_build_root

    return Path(get_default_build_root())


def stale_locks(directory: Path, operators: Sequence[str] = tuple(BUILDERS)) -> list[Path]:
    """Return the `lock` files of DeepSpeed's operators below `directory` that no process has open."""
    built = [part for name in operators for part in (name, *_BUILT_ALONG.get(name, ()))]
    locks = [lock for name in built for lock in (*directory.glob(f"{name}/lock"), *directory.glob(f"*/{name}/lock"))]
    return sorted(lock for lock in locks if not is_open_somewhere(lock))


def is_open_somewhere(path: Path) -> bool:
    """Return whether a process may have `path` open, as torch has during compilation; true on hosts without /proc."""
    if not Path("/proc/self/fd").is_dir():
        return True
    target = str(path.resolve())
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()) == target:
                return True
        except OSError:
            continue
    return False


def is_compiled(directory: Path, name: str) -> bool:
    """Return whether this Python's build of an operator is newer than the installed DeepSpeed."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}_*"
    built = [*directory.glob(f"{name}/{name}.so"), *directory.glob(f"{python}/{name}/{name}.so")]
    spec = find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return False
    return any(file.stat().st_mtime > Path(spec.origin).stat().st_mtime for file in built)
