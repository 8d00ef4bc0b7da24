"""DeepSpeed's CPU operators: compiled before ranks wait for them, and locks that a killed compilation left are found.

Seen with deepspeed 0.19.8 and torch 2.13.0: operators are compiled at first use, for 1 to 3 minutes, into
`TORCH_EXTENSIONS_DIR`. torch creates `<operator>/lock` meanwhile (torch/utils/file_baton.py) and holds it open; a
compilation or a rank that is killed leaves it behind, and every later one waits for it without a word.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ShardwrightError
from ..launching.launch import LaunchFailedError, run_launch

# 1 to 3 minutes on a usual machine; a shared one with few cores may take five times as long.
COMPILE_TIMEOUT_SECONDS = 900.0
ABANDONED_SECONDS = 10.0
BUILDERS: Mapping[str, str] = {
    "cpu_adam": "CPUAdamBuilder",
    "cpu_adagrad": "CPUAdagradBuilder",
    "cpu_lion": "CPULionBuilder",
    "deepspeed_shm_comm": "ShareMemCommBuilder",
    "async_io": "AsyncIOBuilder",
}
"""DeepSpeed's builder of each operator that CPU ranks may load."""
_BUILT_ALONG: Mapping[str, tuple[str, ...]] = {"async_io": ("pin_memory",)}
"""Operators that another one's builder compiles first, seen with deepspeed 0.19.8 (`op_builder/async_io.py`)."""

_COMPILE = """
import sys
from deepspeed.accelerator import get_accelerator
for builder in sys.argv[1:]:
    get_accelerator().create_op_builder(builder).load(verbose=False)
"""


class StaleLockError(ShardwrightError):
    """A killed compilation left its lock, for which every later one would wait for ever."""

    def __init__(self, locks: Sequence[Path]) -> None:
        lines = [
            f"{lock}: a killed compilation left this lock, and a launch would wait for it for ever; no process has it "
            f"open (`fuser {lock}` prints nothing); delete it: rm {lock}"
            for lock in locks
        ]
        super().__init__("\n".join(lines))
        self.locks = tuple(locks)


def needed_operators(*, offload_optimizer: bool, nvme: bool, optimizer: str) -> tuple[str, ...]:
    """Return the operators that DeepSpeed loads on CPU ranks; `optimizer` is a name of the Trainer's `optim`."""
    found = ["deepspeed_shm_comm"]
    if offload_optimizer:
        found.append("cpu_adagrad" if "adagrad" in optimizer else "cpu_lion" if "lion" in optimizer else "cpu_adam")
    if nvme:
        found.append("async_io")
    return tuple(found)


def prepare_operators(operators: Sequence[str], *, notify: Callable[[str], None] | None = None) -> None:
    """Compile what is not compiled yet, so that launches with short limits do not wait for it.

    Raises:
        StaleLockError: a killed compilation left its lock.
        ShardwrightError: the compilation fails.
    """
    directory = extensions_directory()
    # That of a compiled operator may be held this moment by a process of another machine or container that loads it.
    found = stale_locks(directory, operators)
    locks = [lock for lock in found if is_abandoned(lock) or not is_compiled(directory, lock.parent.name)]
    if locks:
        raise StaleLockError(locks)
    missing = [name for name in operators if not is_compiled(directory, name)]
    if not missing:
        return
    if notify is not None:
        notify(f"compiling DeepSpeed's CPU operators ({', '.join(missing)}), once, 1-3 minutes")
    try:
        run_launch(["-c", _COMPILE, *(BUILDERS[name] for name in missing)], timeout_seconds=COMPILE_TIMEOUT_SECONDS)
    except LaunchFailedError as error:
        raise ShardwrightError(f"DeepSpeed's operators {', '.join(missing)} do not compile: {error}") from None
    finally:
        # There was none before, and the compilation has ended: what an interrupted one left is its own.
        for lock in stale_locks(directory, missing):
            lock.unlink(missing_ok=True)


def break_abandoned_locks() -> None:
    """Let ranks pass a lock that a killed process left, which they meet when they load an operator.

    The lock of an operator that is compiled is held for as long as the file is loaded, a moment; where it has lain for
    `ABANDONED_SECONDS`, and no process here has it open, nobody will remove it.
    """
    from torch.utils.file_baton import FileBaton

    if getattr(FileBaton, "_passes_abandoned_locks", False):
        return
    wait = FileBaton.wait

    def wait_for_holder(self: Any) -> None:
        lock = Path(self.lock_file_path)
        while lock.exists() and not is_abandoned(lock):
            time.sleep(self.wait_seconds)
        if lock.exists():
            print(f"{lock} was left by a process that was killed: removed", file=sys.stderr, flush=True)
            lock.unlink(missing_ok=True)
        wait(self)

    FileBaton.wait, FileBaton._passes_abandoned_locks = wait_for_holder, True


def is_abandoned(lock: Path) -> bool:
    """Tell whether nobody will remove the lock of a compiled operator."""
    try:
        age = time.time() - lock.stat().st_mtime
    except OSError:
        return False
    return any(lock.parent.glob("*.so")) and age > ABANDONED_SECONDS and not is_open_somewhere(lock)


def extensions_directory() -> Path:
    """Return the directory below which torch keeps compiled extensions."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    from torch.utils.cpp_extension import get_default_build_root

    return Path(get_default_build_root())


def stale_locks(directory: Path, operators: Sequence[str] = tuple(BUILDERS)) -> list[Path]:
    """Return the `lock` files of DeepSpeed's operators below `directory` that no process has open."""
    built = [part for name in operators for part in (name, *_BUILT_ALONG.get(name, ()))]
    locks = [lock for name in built for lock in (*directory.glob(f"{name}/lock"), *directory.glob(f"*/{name}/lock"))]
    return sorted(lock for lock in locks if not is_open_somewhere(lock))


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


def is_compiled(directory: Path, name: str) -> bool:
    """Tell whether this Python's build of an operator is newer than the installed DeepSpeed."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}_*"
    built = [*directory.glob(f"{name}/{name}.so"), *directory.glob(f"{python}/{name}/{name}.so")]
    found = find_spec("deepspeed")
    if found is None or found.origin is None:
        return False
    return any(file.stat().st_mtime > Path(found.origin).stat().st_mtime for file in built)
