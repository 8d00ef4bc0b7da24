"""View of the working directory for a rehearsed script, which can read the user's files but not change them.

The view has new directories with links to the user's files. A file that the script writes replaces the link, and is
removed with the view after the rehearsal.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ShardwrightError

MOST_FILES = 20_000
"""Maximum number of files in a view; a link takes about 50 microseconds."""
LARGEST_COPY_BYTES = 64 * 2**20
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".onnx", ".gguf"})
"""Files that libraries write without Python, through a link: they are copied, or omitted if they are large."""
_OMITTED = frozenset({"__pycache__", "node_modules"})
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.truncate": 1, "os.rename": 2}
"""Audit events of Python that change files, and the number of their path arguments."""


def make_view(here: Path, view: Path, exchanged: Mapping[Path, Path], *, apart: Path) -> bool:
    """Create a view of a directory, and return whether it is complete.

    Hidden directories, environments, caches and weights over 64 MiB are omitted.

    Args:
        here: Directory to show.
        view: New directory.
        exchanged: Replacements of files and directories, by absolute path.
        apart: Directory of the rehearsal, which is never shown.
    """
    view.mkdir()
    for shown, (source, target) in enumerate(_entries(here.absolute(), view, exchanged, apart)):
        if shown >= MOST_FILES:
            return False
        if source.suffix in _WEIGHTS and source not in exchanged.values():
            if source.stat().st_size <= LARGEST_COPY_BYTES:
                shutil.copyfile(source, target)
        else:
            target.symlink_to(source)
    return True


def _entries(here: Path, view: Path, exchanged: Mapping[Path, Path], apart: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each file with its path in the view, and create the view's directories."""
    for name, directories, files in os.walk(here):
        directory = Path(name)
        target = view / directory.relative_to(here)
        target.mkdir(exist_ok=True)
        for entry in list(directories):
            source = directory / entry
            if source in exchanged or source.is_symlink():
                yield exchanged.get(source, source), target / entry
            elif not (
                entry.startswith(".") or entry in _OMITTED or source == apart or (source / "pyvenv.cfg").is_file()
            ):
                continue
            directories.remove(entry)
        for entry in files:
            source = directory / entry
            yield exchanged.get(source, source), target / entry


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewGuard:
    """Audit hook that protects the user's files: it replaces links before writes, and rejects other writes."""

    view: Path
    """Working directory of the script."""
    kept: tuple[Path, ...]
    """Protected directories: the user's working directory and the script's."""
    free: tuple[Path, ...]
    """Directories below them that may change: the rehearsal's."""

    @classmethod
    def of(cls, view: Path, *kept: Path, free: Path) -> ViewGuard:
        """Return a guard; a directory with all temporary files is not protected."""
        temporary = Path(tempfile.gettempdir()).resolve()
        directories = {directory.resolve() for directory in kept}
        protected = tuple(path for path in sorted(directories) if not temporary.is_relative_to(path))
        return cls(view=view.resolve(), kept=protected, free=(free.resolve(),))

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handle an event of `sys.addaudithook` before it happens."""
        if event == "open":
            path, _, flags = arguments
            if not (isinstance(path, str | bytes | os.PathLike) and flags & _WRITES):
                return
            file = Path(os.fsdecode(path)).absolute()
            if file.is_symlink() and file.is_relative_to(self.view):
                source = file.resolve()
                file.unlink(missing_ok=True)
                if not flags & os.O_TRUNC and source.is_file():
                    shutil.copyfile(source, file)
            else:
                self._check(file)
        elif event in _CHANGES:
            for path in arguments[: _CHANGES[event]]:
                if isinstance(path, str | bytes | os.PathLike):
                    self._check(Path(os.fsdecode(path)).absolute())

    def _check(self, path: Path) -> None:
        """Reject a change in a protected directory, except in caches of libraries and Python."""
        changed = path.parent.resolve() / path.name
        if any(changed.is_relative_to(free) for free in self.free):
            return
        for directory in self.kept:
            if changed.is_relative_to(directory):
                parts = changed.relative_to(directory).parts
                if not any(part.startswith(".") or part in _OMITTED for part in parts):
                    raise ShardwrightError(
                        f"the script writes {changed}, but a rehearsal must not change your files: write to "
                        "output_dir, or relative to the working directory"
                    )
